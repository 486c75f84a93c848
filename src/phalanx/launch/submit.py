"""Batch scripts of Slurm and PBS and manifests of Kubernetes (templates/) with the values of a job, and what hands them
to the scheduler."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from phalanx.data.files import write_atomic
from phalanx.errors import JobError, RunError
from phalanx.launch.exported import Exported
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.site import Site
from phalanx.launch.start import RanksBy, port_for
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
    signal_s: int  # seconds before the time limit at which the run is asked to stop; 0 asks for nothing
    requeue: bool = False
    account: str = ""
    queue: str = ""
    options: tuple[str, ...] = ()  # further options of sbatch or qsub
    devices: int = 0  # accelerators to ask for on each node; 0 asks for none


def parse_time(text: str) -> int:
    """Returns a time limit in seconds: 1:30:00, 30:00 (minutes and seconds), 90m, 1h30m, and with days, where hours
    come first as Slurm has it, 2-12, 2-12:30, 2-12:30:00.

    Raises JobError for anything else; a bare number is minutes for Slurm and seconds for PBS."""
    units = re.fullmatch(r"(?:([0-9]{1,4})d)?(?:([0-9]{1,5})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,7})s)?", text)
    clock = re.fullmatch(r"()(?:([0-9]{1,4}):)?([0-9]{1,4}):([0-9]{2})", text)
    days = re.fullmatch(r"([0-9]{1,3})-([0-9]{1,4})(?::([0-9]{2})(?::([0-9]{2}))?)?", text)
    match = clock or days or units
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
    form = template("batch.yaml")[site.scheduler]
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


FILE = "submit.yaml"
Kind = Literal["job", "jobset", "trainjob"]
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_LONGEST_RESOURCE = 40  # pods and their hosts are named after the run, with up to 23 characters more
_LONGEST_MANIFEST = 2**20


class _Readable(yaml.SafeDumper):
    """Writes texts of several lines as they are, so that a job file stays readable, and nothing as a reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)


@dataclass(frozen=True)
class ManifestRequest:
    name: str
    job_yaml: str
    grid: ProcessGrid
    values: dict[str, str]
    secrets: tuple[str, ...] = ()  # names of variables that pods take from the Secret `secret`
    secret: str = ""
    image: str = ""
    claim: str = ""  # the PersistentVolumeClaim that holds the run directories, which all nodes share
    mount: str = "/runs"  # where the claim is mounted: the working directory of every pod
    namespace: str = ""
    devices: int = 0  # accelerators of a pod; 0 asks for none
    shm_gib: int = 8
    grace_s: float = 30.0
    max_restarts: int = 3
    time_s: int = 0  # seconds after which the Job is ended; 0 is never

    @property
    def resource(self) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:_LONGEST_RESOURCE].strip("-")
        return plain if re.match("[a-z]", plain) else f"run-{plain}".strip("-")


def manifest(request: ManifestRequest, kind: Kind) -> str:
    """Returns the manifest as YAML documents. Raises JobError with everything that is missing or malformed."""
    _check(request)
    forms, name, nodes = template("kubernetes.yaml"), request.resource, request.grid.nodes
    env = [{"name": name, "value": value} for name, value in sorted(request.values.items())]
    env += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": request.secret, "key": name}}} for name in request.secrets
    ]
    devices, cpus = (
        {"limits": {"nvidia.com/gpu": request.devices}},
        {"requests": {"cpu": str(request.grid.per_node)}},
    )
    values = {
        **vars(request),
        "resource": name,
        "port": port_for(name),
        "subdomain": name if kind == "job" else None,
        "nodes": nodes,
        "nnodes": request.grid.nnodes,
        "backoff": request.max_restarts * nodes,
        "time_s": request.time_s or None,
        "grace_s": round(request.grace_s) + 30,  # a stop by SIGTERM ends with a checkpoint
        "env": env,
        "resources": devices if request.devices else cpus,
    }
    values["host"] = filled(forms["hosts"][kind], values)
    for part, form in forms["parts"].items():
        values[part] = filled(form, values)
    documents = filled(forms[kind], values)
    text = yaml.dump_all(documents, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=120)
    if len(text.encode()) > _LONGEST_MANIFEST:
        raise JobError(f"the manifest has {len(text.encode()):,} bytes; Kubernetes takes 1 MiB")
    return text


def _check(request: ManifestRequest) -> None:
    problems = []
    if not re.fullmatch(r"[a-z0-9][A-Za-z0-9._/:@-]{0,400}", request.image):
        problems.append(
            f"--image {request.image[:80]!r}: give the image that holds Phalanx"
            if request.image
            else "--image is missing: the image that holds Phalanx, such as registry.example.org/phalanx:1"
        )
    for option, value in (("--pvc", request.claim), ("--namespace", request.namespace), ("--secret", request.secret)):
        if value and not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", value):
            problems.append(f"{option} {value[:80]!r}: expected a name of Kubernetes: small letters, digits and -")
    if not request.claim:
        problems.append("--pvc is missing: the PersistentVolumeClaim that all nodes share, as NAME or NAME:/MOUNT/PATH")
    if not re.fullmatch(r"/[^:\x00-\x1f]{1,200}", request.mount):
        problems.append(f"--pvc: the path {request.mount[:80]!r} must be absolute")
    if request.secrets and not request.secret:
        problems.append(
            f"--export-env {', '.join(request.secrets)}: its value is not written into a manifest; make a Secret "
            f"(kubectl create secret generic NAME --from-literal={request.secrets[0]}=…) and give --secret NAME"
        )
    if problems:
        raise JobError(problems)


def sky_submission(request: ManifestRequest, accelerator: str, folder: str) -> Submission:
    """Returns the task of SkyPilot, on machines with `request.devices` of an accelerator each, for example
    "h100-80gb". `request.claim` is the address of a bucket for the run directories. Raises JobError without one on
    several nodes, and for devices that nothing names."""
    problems = []
    if request.claim and not re.fullmatch(r"[a-z0-9]{1,10}://[A-Za-z0-9._/-]{1,200}", request.claim):
        problems.append(f"--bucket {request.claim[:80]!r}: expected an address, such as s3://NAME/FOLDER")
    if request.grid.nodes > 1 and not request.claim:
        problems.append("--bucket is missing: the storage that all nodes share, such as s3://NAME/FOLDER")
    if request.devices and not accelerator:
        problems.append("nothing names the devices: set cluster.accelerator=h100-80gb, or a cluster such as dgx-h100:2")
    if "END_OF_JOB" in request.job_yaml:
        problems.append("the job holds END_OF_JOB, which ends it in the task's script")
    if problems:
        raise JobError(problems)
    form, resource = template("sky.yaml"), request.resource
    file = Path(os.path.abspath(folder)) / request.name / FILE
    # SkyPilot's names: the memory is part of that of the A100 alone.
    kind = accelerator.upper() if accelerator.startswith("a100") else accelerator.partition("-")[0].upper()
    resources: dict[str, Any] = {"accelerators": f"{kind}:{request.devices}"}
    if not request.devices:
        resources = {"cpus": f"{request.grid.per_node}+"}
    if request.image:
        resources["image_id"] = f"docker:{request.image}"
    several = request.grid.nodes > 1
    values = {
        **vars(request),
        "resource": resource,
        "nodes": request.grid.nodes,
        "resources": resources,
        "env": request.values or None,
        "secrets_of": dict.fromkeys(request.secrets) or None,
        "mounts": {request.mount: {"source": request.claim, "mode": "MOUNT"}} if request.claim else None,
        "mount": request.mount if request.claim else "$HOME",
        "job_yaml": request.job_yaml.rstrip(),
        "meet": f'run.nnodes={request.grid.nnodes} run.rdzv_endpoint="$host:{port_for(resource)}"' if several else " ",
        "setup": None if request.image else form["setup"],
        "file": str(file),
    }
    values["run"] = filled(form["run"], values)
    text = yaml.dump(filled(form["task"], values), Dumper=_Readable, sort_keys=False, allow_unicode=True, width=120)
    command = (*filled(form["command"], values), *(f"--secret={name}" for name in request.secrets))
    return Submission(text, file, command, filled(form["steps"], values), resource)


def kubernetes_submission(request: ManifestRequest, kind: Kind, folder: str) -> Submission:
    """Returns the manifest of Kubernetes; its file goes to `folder`."""
    file = Path(os.path.abspath(folder)) / request.name / FILE
    space = ("--namespace", request.namespace) if request.namespace else ()

    scope = "".join(f" {word}" for word in space)
    label = f"app.kubernetes.io/instance={request.resource}"
    steps = {
        "watch": f"kubectl{scope} get pods --selector {label}",
        "output": f"kubectl{scope} logs --follow --selector {label}",
        "cancel": f"kubectl{scope} delete --filename {file}",
    }
    command = ("kubectl", *space, "apply", "--filename", str(file))
    return Submission(manifest(request, kind), file, command, steps, f"{kind}/{request.resource}")
