"""Batch scripts of Slurm and PBS (batch.yaml) with the values of a job, and what hands a script or a manifest to its
scheduler."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.data.files import write_atomic
from phalanx.errors import JobError, RunError
from phalanx.launch.exported import Exported
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.sites.site import Site
from phalanx.launch.start.choose import RanksBy
from phalanx.launch.template import filled, template

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_LONGEST_NAME = 63
_PLAIN = r"[A-Za-z0-9._@,+-]+"
_SHELL_VARIABLES = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER")
_SUBMIT_S = 120.0


@dataclass(frozen=True)
class SubmitRequest:
    name: str
    words: tuple[str, ...]  # the words of `phalanx launch` inside the job
    python: str  # path of the interpreter, the same on every node
    folder: str
    directory: Path  # the run directory, absolute: the script and its output go there
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
    options: tuple[str, ...] = ()  # further options of sbatch or qsub
    devices: int = 0  # accelerators to ask for on each node; 0 asks for none


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
    steps: Mapping[str, str]  # how to watch and to cancel the job; {job} stands for its id
    job: str = ""  # the job's id; empty if the command prints it

    def next_steps(self, job: str) -> dict[str, str]:
        return {name: text.replace("{job}", job) for name, text in self.steps.items()}


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
    return wanted.job or done.stdout.strip().partition(";")[0]  # "1234.server"; "1234" or "1234;cluster" of Slurm


def batch_submission(request: SubmitRequest) -> Submission:
    """Returns the batch script of the site's scheduler. Raises JobError for a path that a directive cannot hold, and
    for an account or a queue that is no plain word."""
    grid, site, secrets = request.grid, request.site, request.exported.secrets
    form = template("submit/batch.yaml")[site.scheduler]
    directory, file = request.directory, request.directory / form["file"]
    stated = (
        (form["path"], "the run directory", str(directory)),
        (form["path"], "the working directory", request.folder),
        (_PLAIN, "--account", request.account),
        (_PLAIN, "--queue", request.queue),
    )
    problems = [
        f"{what} {text[:200]!r} cannot stand in a script of {form['title']}: choose one of letters, digits and . _ - /"
        for pattern, what, text in stated
        if text and not re.fullmatch(pattern, text)
    ]
    if problems:
        raise JobError(problems)
    others = [*(each.replace("{nodes}", str(grid.nodes)) for each in site.directives), *request.options]
    values = {
        "name": plain_name(request.name),
        "nodes": grid.nodes,
        "tasks": grid.per_node if request.ranks_by == "launcher" else 1,
        "time": clock(request.time_s),
        "directory": directory,
        "file": str(file),
        "file_quoted": shlex.quote(str(file)),
        "folder_quoted": shlex.quote(request.folder),
        "output": shlex.quote(str(directory / "slurm-").replace("%", "%%") + "%j.out"),
        "exported": ",".join((*_SHELL_VARIABLES, *secrets)),
        "secrets": ",".join(secrets),
        "requeue": request.requeue,
        "stays": not request.requeue,
        "account": request.account,
        "queue": request.queue or site.queue,
        "queue_option": site.queue_option,
        "filesystems": ":".join(site.filesystems),
        "signal_s": request.signal_s or None,
        "devices": request.devices or None,
        "share": _node_share(request, others),
        "shrinks": grid.least_nodes < grid.nodes,
        "unplaced": not any("select" in line for line in others),
        "others": others,
        "job": "{job}",
    }
    title = f"# Run {values['name']} ({grid.nnodes} × {grid.per_node} processes), made by `phalanx launch --submit "
    launch = shlex.join([request.python, "-P", "-m", "phalanx", "launch", *request.words])
    directives = [f"{form['directive']} {line}" for line in filled(form["directives"], values)]
    body = [*filled(form["first"], values), *_setup_lines(request), "code=0", f"{launch} || code=$?"]
    if request.requeue:  # 75: stopped cleanly, with a checkpoint, from which the same command resumes
        body += ['if [ "$code" -eq 75 ]; then', f"    {filled(form['again'], values)}", "fi"]
    lines = ["#!/bin/bash -l", f"{title}{site.scheduler}`.", *directives, "", *body, 'exit "$code"']
    command = tuple(filled(form["command"], values))
    return Submission("\n".join(lines) + "\n", file, command, filled(form["steps"], values))


def _node_share(request: SubmitRequest, others: Sequence[str]) -> list[str]:
    """Returns the options for the cores and the memory of the ranks, but for those that the site or the user sets:
    without them a site that allots cores gives one to a task that starts every rank of a node."""
    grid, site = request.grid, request.site
    cores = site.cpus_per_rank * (1 if request.ranks_by == "launcher" else grid.per_node)
    wanted = {"--cpus-per-task": f"--cpus-per-task={cores}"} if cores else {}
    if request.devices and site.exclusive:
        wanted |= {"--exclusive": "--exclusive", "--mem": "--mem=0"}
    elif not request.devices and not cores and request.ranks_by != "launcher" and grid.per_node > 1:
        wanted["--cpus-per-task"] = f"--cpus-per-task={grid.per_node}"
    stated = {re.split(r"[=\s]", option, maxsplit=1)[0] for option in others}
    stated |= {"--cpus-per-task"} if stated & {"-c", "--cpus-per-gpu"} else set()
    stated |= {"--mem"} if stated & {"--mem-per-cpu", "--mem-per-gpu"} else set()
    return [option for name, option in wanted.items() if name not in stated]
