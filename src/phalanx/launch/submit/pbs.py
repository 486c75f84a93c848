"""The batch script of PBS Professional and OpenPBS. Source: the PBS Professional Reference Guide, `qsub`;
https://docs.alcf.anl.gov/running-jobs/ for the sites. No PBS server was there to try it.
"""

from __future__ import annotations

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

FILE = "submit.pbs"
_PATH = r"[A-Za-z0-9._/+-]+"  # no colon, which ends the name of a host, and no ^, which begins an array's index


def batch_script(request: SubmitRequest) -> str:
    """Returns the script. Raises JobError for a path that a directive cannot hold."""
    check_words(request, _PATH, "PBS")
    head = [
        title(request, "pbs"),
        *(f"#PBS {line}" for line in _directives(request)),
    ]
    body = [f"cd {shlex.quote(request.folder)} || exit 1", *setup_lines(request), "code=0", launch_line(request)]
    if request.requeue:
        body += [
            # 75: stopped cleanly, with a checkpoint. The same command resumes from it. A job cannot requeue itself.
            'if [ "$code" -eq 75 ]; then',
            f"    qsub {shlex.quote(str(request.directory / FILE))}",
            "fi",
        ]
    return script(head, [*body, 'exit "$code"'])


def _directives(request: SubmitRequest) -> list[str]:
    site, select = request.site, f"select={request.grid.nodes}"
    if not any("select" in line for line in site_directives(request)):
        found = [f"-l {select}", "-l place=scatter"]
    else:
        found = []
    found += [f"-N {plain_name(request.name)}", f"-l walltime={clock(request.time_s)}"]
    found += [f"-l filesystems={':'.join(site.filesystems)}"] if site.filesystems else []
    found += [f"-A {request.account}"] if request.account else []
    queue = request.queue or site.queue
    found += [f"-q {queue}"] if queue else []
    found += ["-j oe", f"-o {request.directory}/", f"-r {'y' if request.requeue else 'n'}"]
    # Names only: qsub takes the values of these from the shell that submits.
    found += [f"-v {','.join(request.exported.secrets)}"] if request.exported.secrets else []
    return [*found, *site_directives(request)]


def submit_command(file: Path) -> tuple[str, ...]:
    """Returns the command that submits a script, and prints the job's id."""
    return ("qsub", str(file))


def job_id(output: str) -> str:
    """Returns the id in qsub's output: "1234.server"."""
    return output.strip()


def next_steps(job: str, request: SubmitRequest) -> dict[str, str]:
    """Returns how to watch and to cancel a job."""
    return {"watch": f"qstat {job}", "output": f"ls -t {request.directory}/*.OU", "cancel": f"qdel {job}"}
