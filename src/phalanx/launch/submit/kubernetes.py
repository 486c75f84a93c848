"""Manifests of Kubernetes (kubernetes.yaml) with the values of a job."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from phalanx.errors import JobError
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.start.choose import port_for
from phalanx.launch.submit.script import Submission
from phalanx.launch.template import filled, template

FILE = "submit.yaml"
Kind = Literal["job", "jobset", "trainjob"]
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_LONGEST_NAME = 40  # pods and their hosts are named after the run, with up to 23 characters more
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
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
        return plain if re.match("[a-z]", plain) else f"run-{plain}".strip("-")


def manifest(request: ManifestRequest, kind: Kind) -> str:
    """Returns the manifest as YAML documents. Raises JobError with everything that is missing or malformed."""
    _check(request)
    forms, name, nodes = template("submit/kubernetes.yaml"), request.resource, request.grid.nodes
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
