"""Batch scripts of Slurm and PBS, and what hands a script or a manifest to its scheduler.

Sources: https://slurm.schedmd.com/sbatch.html for Slurm; the PBS Professional Reference Guide, `qsub`, and
https://docs.alcf.anl.gov/running-jobs/ for PBS Professional and OpenPBS. No PBS server was there to try it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.data.files import write_atomic
from phalanx.errors import JobError, RunError
from phalanx.launch.exported import Exported
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.sites.site import Site
from phalanx.launch.start.choose import RanksBy

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_LONGEST_NAME = 63
_PLAIN = r"[A-Za-z0-9._@,+-]+"
_SLURM_PATH = r"[^\x00-\x1f\x7f\\]+"  # a backslash quotes the next character, but not everywhere
_PBS_PATH = r"[A-Za-z0-9._/+-]+"  # no colon, which ends the name of a host, and no ^, which begins an array's index
_SLURM_VARIABLES = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER")
"""Variables that a job of Slurm takes from the shell that submits it, beside the secrets named one by one."""
_SUBMIT_S = 120.0


@dataclass(frozen=True)
class SubmitRequest:
    """A job for a scheduler's queue."""

    name: str
    """The run's name."""
    words: tuple[str, ...]
    """The words of `phalanx launch` inside the job."""
    python: str
    """Path of the interpreter, the same on every node."""
    folder: str
    """The working directory."""
    directory: Path
    """The run directory, absolute: the script and its output go there."""
    grid: ProcessGrid
    ranks_by: RanksBy
    site: Site
    exported: Exported
    time_s: int
    signal_s: int
    """Seconds before the end of the time limit at which the run is asked to stop; 0 asks for nothing."""
    requeue: bool = False
    account: str = ""
    queue: str = ""
    options: tuple[str, ...] = ()
    """Further options of sbatch or qsub."""
    devices: int = 0
    """Accelerators to ask for on each node; 0 asks for none."""


def parse_time(text: str) -> int:
    """Returns a time limit in seconds: 1:30:00, 2-00:00:00, 30:00 (minutes and seconds), 90m, 1h30m.

    Raises JobError for anything else; a bare number is minutes for Slurm and seconds for PBS."""
    units = re.fullmatch(r"(?:([0-9]{1,4})d)?(?:([0-9]{1,5})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,7})s)?", text)
    clock = re.fullmatch(r"(?:([0-9]{1,3})-)?(?:([0-9]{1,4}):)?([0-9]{1,4}):([0-9]{2})", text)
    match = clock or units
    if (
        not match
        or not text
        or not (
            seconds := sum(int(part or 0) * unit for part, unit in zip(match.groups(), _UNITS.values(), strict=True))
        )
    ):
        raise JobError(f"--time {text[:80]!r}: expected a time limit, such as 1:30:00, 90m or 2-00:00:00")
    return seconds


def clock(seconds: int) -> str:
    """Returns a time limit as all schedulers read it: HH:MM:SS."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def plain_name(name: str) -> str:
    """Returns a run's name as the name of a job: letters, digits, . _ -, at most 63."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:_LONGEST_NAME].rstrip("-._")
    return plain or "phalanx"


def _check_words(request: SubmitRequest, path: str, scheduler: str) -> None:
    """Raises JobError for a path that the regular expression `path` does not match, and for an account or a queue that
    is no plain word: directives cannot hold them."""
    words = (
        (path, "the run directory", str(request.directory)),
        (path, "the working directory", request.folder),
        (_PLAIN, "--account", request.account),
        (_PLAIN, "--queue", request.queue),
    )
    problems = [
        f"{what} {text[:200]!r} cannot stand in a script of {scheduler}: choose one of letters, digits and . _ - /"
        for pattern, what, text in words
        if text and not re.fullmatch(pattern, text)
    ]
    if problems:
        raise JobError(problems)


def _site_directives(request: SubmitRequest) -> list[str]:
    """Returns the site's options with the number of nodes, then the user's."""
    nodes = str(request.grid.nodes)
    return [*(directive.replace("{nodes}", nodes) for directive in request.site.directives), *request.options]


def _setup_lines(request: SubmitRequest) -> list[str]:
    """Returns the lines that load modules and set variables. Every word is quoted; secrets have no line."""
    site = request.site
    lines = [f"module use {shlex.quote(path)}" for path in site.module_paths]
    lines += [f"module load {shlex.quote(module)}" for module in site.modules]
    # After the modules, which set some of these themselves.
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(request.exported.values.items())]
    for name, folder in site.prepend.items():
        lines.append(f'export {name}={shlex.quote(folder)}"${{{name}:+:${name}}}"')
    return lines


@dataclass(frozen=True)
class Submission:
    """A script or a manifest, and the command that submits it."""

    text: str
    file: Path
    command: tuple[str, ...]
    job_id: Callable[[str], str]
    """Returns the job's id in the output of the command."""
    next_steps: Callable[[str], dict[str, str]]
    """Returns how to watch and to cancel a job."""


def submit(wanted: Submission, which: Callable[[str], str | None]) -> str:
    """Writes the file, submits it, and returns the job's id.

    Raises RunError if the scheduler's program is not installed, if it refuses the job, and if the file cannot be
    written."""
    program = wanted.command[0]
    if not which(program):
        raise RunError(
            f"{program} is not installed here: submit on a login node of the cluster, or print the text with --dry-run"
        )
    folder = wanted.file.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(wanted.file, wanted.text.encode())
    except OSError as error:
        raise RunError(f"{wanted.file} could not be written: {error.strerror or error}") from None
    try:
        done = subprocess.run(
            wanted.command, capture_output=True, text=True, errors="replace", timeout=_SUBMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{program}: {error}") from None
    if done.returncode:
        reason = (done.stderr or done.stdout).strip()
        raise RunError(f"{program} refused {wanted.file} (exit code {done.returncode}):\n{reason}")
    return wanted.job_id(done.stdout)


def slurm_submission(request: SubmitRequest) -> Submission:
    """Returns the batch script of Slurm. Raises JobError for a path that Slurm cannot take."""
    _check_words(request, _SLURM_PATH, "Slurm")
    # 75: stopped cleanly, with a checkpoint. Requeued, the same command resumes from it.
    again = 'scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this shell meanwhile'
    file = request.directory / "submit.sbatch"
    return Submission(
        _script(request, "slurm", [f"#SBATCH {line}" for line in _slurm_directives(request)], [], again),
        file,
        ("sbatch", "--parsable", str(file)),
        lambda output: output.strip().partition(";")[0],  # "1234" or "1234;cluster"
        lambda job: {
            "watch": f"squeue --job {job}",
            "output": f"tail -F {request.directory / f'slurm-{job}.out'}",
            "cancel": f"scancel {job}",
        },
    )


def _slurm_directives(request: SubmitRequest) -> list[str]:
    grid, site = request.grid, request.site
    # sbatch reads quotes as a shell does, if there is no backslash.
    output = str(request.directory / "slurm-").replace("%", "%%") + "%j.out"
    found = [
        f"--job-name={plain_name(request.name)}",
        f"--nodes={grid.nodes}",
        f"--ntasks-per-node={grid.per_node if request.ranks_by == 'launcher' else 1}",
        f"--time={clock(request.time_s)}",
        f"--chdir={shlex.quote(request.folder)}",
        f"--output={shlex.quote(output)}",
        "--open-mode=append",
        f"--export={','.join((*_SLURM_VARIABLES, *request.exported.secrets))}",
        "--requeue" if request.requeue else "--no-requeue",
    ]
    found += [f"--account={request.account}"] if request.account else []
    queue = request.queue or site.queue
    found += [f"--{site.queue_option}={queue}"] if queue else []
    # Without B: the signal goes to the steps, whose tasks pass it on to the ranks.
    found += [f"--signal=USR1@{request.signal_s}"] if request.signal_s else []
    found += [f"--gpus-per-node={request.devices}"] if request.devices else []
    found += _node_share(request)
    found += ["--no-kill"] if grid.least_nodes < grid.nodes else []
    return [*found, *_site_directives(request)]


def _node_share(request: SubmitRequest) -> list[str]:
    """Returns the options for the cores and the memory of the ranks, but for those that the site or the user sets:
    without them a site that allots cores gives one to a task that starts every rank of a node."""
    grid, site = request.grid, request.site
    cores = site.cpus_per_rank * (1 if request.ranks_by == "launcher" else grid.per_node)
    wanted = {"--cpus-per-task": f"--cpus-per-task={cores}"} if cores else {}
    if request.devices and site.exclusive:
        wanted |= {"--exclusive": "--exclusive", "--mem": "--mem=0"}
    elif not request.devices and not cores and request.ranks_by != "launcher" and grid.per_node > 1:
        wanted["--cpus-per-task"] = f"--cpus-per-task={grid.per_node}"
    stated = {re.split(r"[=\s]", option, maxsplit=1)[0] for option in _site_directives(request)}
    stated |= {"--cpus-per-task"} if stated & {"-c", "--cpus-per-gpu"} else set()
    stated |= {"--mem"} if stated & {"--mem-per-cpu", "--mem-per-gpu"} else set()
    return [option for name, option in wanted.items() if name not in stated]


def pbs_submission(request: SubmitRequest) -> Submission:
    """Returns the batch script of PBS. Raises JobError for a path that a directive cannot hold."""
    _check_words(request, _PBS_PATH, "PBS")
    file = request.directory / "submit.pbs"
    # 75: stopped cleanly, with a checkpoint. The same command resumes from it. A job cannot requeue itself.
    again = f"qsub {shlex.quote(str(file))}"
    first = [f"cd {shlex.quote(request.folder)} || exit 1"]
    return Submission(
        _script(request, "pbs", [f"#PBS {line}" for line in _pbs_directives(request)], first, again),
        file,
        ("qsub", str(file)),
        str.strip,  # "1234.server"
        lambda job: {"watch": f"qstat {job}", "output": f"ls -t {request.directory}/*.OU", "cancel": f"qdel {job}"},
    )


def _pbs_directives(request: SubmitRequest) -> list[str]:
    site, others = request.site, _site_directives(request)
    placed = any("select" in line for line in others)
    found = [] if placed else [f"-l select={request.grid.nodes}", "-l place=scatter"]
    found += [f"-N {plain_name(request.name)}", f"-l walltime={clock(request.time_s)}"]
    found += [f"-l filesystems={':'.join(site.filesystems)}"] if site.filesystems else []
    found += [f"-A {request.account}"] if request.account else []
    queue = request.queue or site.queue
    found += [f"-q {queue}"] if queue else []
    found += ["-j oe", f"-o {request.directory}/", f"-r {'y' if request.requeue else 'n'}"]
    # Names only: qsub takes the values of these from the shell that submits.
    found += [f"-v {','.join(request.exported.secrets)}"] if request.exported.secrets else []
    return [*found, *others]


def _script(request: SubmitRequest, scheduler: str, directives: Sequence[str], first: Sequence[str], again: str) -> str:
    """Returns the text of a script of bash, as a login shell that knows `module`. `again` submits the job once more."""
    grid = request.grid
    title = (
        f"# Run {plain_name(request.name)} ({grid.nnodes} × {grid.per_node} processes), made by `phalanx launch "
        f"--submit {scheduler}`."
    )
    launch = shlex.join([request.python, "-P", "-m", "phalanx", "launch", *request.words])
    body = [*first, *_setup_lines(request), "code=0", f"{launch} || code=$?"]
    if request.requeue:
        body += ['if [ "$code" -eq 75 ]; then', f"    {again}", "fi"]
    return "\n".join(["#!/bin/bash -l", title, *directives, "", *body, 'exit "$code"']) + "\n"
