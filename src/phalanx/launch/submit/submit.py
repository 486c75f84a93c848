"""Writes what is submitted into the run directory, and hands it to the scheduler."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.data.files import write_atomic
from phalanx.errors import RunError
from phalanx.launch.submit import kubernetes, pbs, slurm
from phalanx.launch.submit.kubernetes import ManifestRequest
from phalanx.launch.submit.script import SubmitRequest

_SUBMIT_S = 120.0


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
    """Returns the batch script of Slurm."""
    file = request.directory / slurm.FILE
    command = slurm.submit_command(file)
    return Submission(
        slurm.batch_script(request), file, command, slurm.job_id, lambda job: slurm.next_steps(job, request)
    )


def pbs_submission(request: SubmitRequest) -> Submission:
    """Returns the batch script of PBS."""
    file = request.directory / pbs.FILE
    return Submission(
        pbs.batch_script(request), file, pbs.submit_command(file), pbs.job_id, lambda job: pbs.next_steps(job, request)
    )


def kubernetes_submission(request: ManifestRequest, kind: kubernetes.Kind, folder: str) -> Submission:
    """Returns the manifest of Kubernetes; its file goes to `folder`."""
    file = Path(os.path.abspath(folder)) / request.name / kubernetes.FILE
    space = ("--namespace", request.namespace) if request.namespace else ()

    def next_steps(_: str) -> dict[str, str]:
        scope = "".join(f" {word}" for word in space)
        label = f"app.kubernetes.io/instance={request.resource}"
        return {
            "watch": f"kubectl{scope} get pods --selector {label}",
            "output": f"kubectl{scope} logs --follow --selector {label}",
            "cancel": f"kubectl{scope} delete --filename {file}",
        }

    return Submission(
        kubernetes.manifest(request, kind),
        file,
        ("kubectl", *space, "apply", "--filename", str(file)),
        lambda _: f"{kind}/{request.resource}",
        next_steps,
    )
