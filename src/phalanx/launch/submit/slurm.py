"""The batch script of Slurm. Source of every option: https://slurm.schedmd.com/sbatch.html"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from phalanx.launch.submit.script import (
    SubmitRequest,
    check_words,
    clock,
    launch_line,
    plain_name,
    script,
    setup_lines,
    site_directives,
    title,
)

FILE = "submit.sbatch"
BASE = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER")
"""Variables that the job takes from the shell that submits it, beside the secrets named one by one."""
_DIRECTORY = r"[^\x00-\x1f\x7f\\]+"  # a backslash quotes the next character, but not everywhere


def batch_script(request: SubmitRequest) -> str:
    """Returns the script. Raises JobError for a path that Slurm cannot take."""
    check_words(request, _DIRECTORY, "Slurm")
    head = [
        title(request, "slurm"),
        *(f"#SBATCH {line}" for line in _directives(request)),
    ]
    body = [*setup_lines(request), "code=0", launch_line(request)]
    if request.requeue:
        body += [
            # 75: stopped cleanly, with a checkpoint. Requeued, the same command resumes from it.
            'if [ "$code" -eq 75 ]; then',
            '    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this shell meanwhile',
            "fi",
        ]
    return script(head, [*body, 'exit "$code"'])


def _directives(request: SubmitRequest) -> list[str]:
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
        f"--export={','.join((*BASE, *request.exported.secrets))}",
        "--requeue" if request.requeue else "--no-requeue",
    ]
    found += [f"--account={request.account}"] if request.account else []
    queue = request.queue or site.queue
    found += [f"--{site.queue_option}={queue}"] if queue else []
    # Without B: the signal goes to the steps, whose tasks pass it on to the ranks.
    found += [f"--signal=USR1@{request.signal_s}"] if request.signal_s else []
    found += [f"--gpus-per-node={request.devices}"] if request.devices else []
    found += _node_share(request, [*site_directives(request)])
    found += ["--no-kill"] if grid.least_nodes < grid.nodes else []
    return [*found, *site_directives(request)]


def _node_share(request: SubmitRequest, others: list[str]) -> list[str]:
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


def submit_command(file: Path) -> tuple[str, ...]:
    """Returns the command that submits a script, and prints the job's id alone."""
    return ("sbatch", "--parsable", str(file))


def job_id(output: str) -> str:
    """Returns the id in sbatch's output: "1234" or "1234;cluster"."""
    return output.strip().partition(";")[0]


def next_steps(job: str, request: SubmitRequest) -> dict[str, str]:
    """Returns how to watch and to cancel a job."""
    output = request.directory / f"slurm-{job}.out"
    return {"watch": f"squeue --job {job}", "output": f"tail -F {output}", "cancel": f"scancel {job}"}
