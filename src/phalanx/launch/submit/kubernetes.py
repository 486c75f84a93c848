"""Manifests of Kubernetes: an Indexed Job with a headless Service, a JobSet, or a TrainJob of Kubeflow.

Sources: https://kubernetes.io/docs/concepts/workloads/controllers/job/ (completion mode, pod failure policy),
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/, https://www.kubeflow.org/docs/components/trainer/
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from phalanx.errors import JobError
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.start.choose import port_for
from phalanx.launch.submit.script import Submission

FILE = "submit.yaml"
JOB_FILE, JOB_FOLDER = "job.yaml", "/etc/phalanx"
AWAIT_HOST_S = 600
"""A pod whose host has not started yet waits for its name as long as for the ranks of other nodes."""
Kind = Literal["job", "jobset", "trainjob"]
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_LONGEST_NAME = 40
"""Pods and their hosts are named after the run, with up to 23 characters more."""
_LONGEST_MANIFEST = 2**20
_FATAL_CODES = (2, 3, 4, 5)
"""Exit codes that a restart does not change: a wrong job, invalid data, NaN."""
_STOPPED = 75


class _Readable(yaml.SafeDumper):
    """Writes texts of several lines as they are: a job file stays readable."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)


@dataclass(frozen=True)
class ManifestRequest:
    """A job for Kubernetes."""

    name: str
    """The run's name."""
    job_yaml: str
    """The resolved job, for a ConfigMap."""
    grid: ProcessGrid
    values: dict[str, str]
    """Variables of the pods."""
    secrets: tuple[str, ...] = ()
    """Names of variables that pods take from the Secret `secret`."""
    secret: str = ""
    image: str = ""
    python: str = "python3"
    """The interpreter in the image."""
    claim: str = ""
    """The PersistentVolumeClaim that holds the run directories, which all nodes share."""
    mount: str = "/runs"
    """Where the claim is mounted: the working directory of every pod."""
    namespace: str = ""
    devices: int = 0
    """Accelerators of a pod; 0 asks for none."""
    device_resource: str = "nvidia.com/gpu"
    shm_gib: int = 8
    grace_s: float = 30.0
    max_restarts: int = 3
    time_s: int = 0
    """Seconds after which the Job is ended; 0 is never."""
    words: tuple[str, ...] = ()
    """Further words of the job's command line."""
    runtime: str = "torch-distributed"
    """The runtime that a TrainJob refers to."""

    @property
    def resource(self) -> str:
        """The name of everything that is created."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
        return plain if re.match("[a-z]", plain) else f"run-{plain}".strip("-")


def manifest(request: ManifestRequest, kind: Kind) -> str:
    """Returns the manifest as YAML documents. Raises JobError with everything that is missing or malformed."""
    _check(request)
    documents = {"job": _indexed_job, "jobset": _jobset, "trainjob": _train_job}[kind](request)
    text = yaml.dump_all(
        [
            (
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": _meta(request, f"{request.resource}-job"),
                    "data": {JOB_FILE: request.job_yaml},
                }
            ),
            *documents,
        ],
        Dumper=_Readable,
        sort_keys=False,
        allow_unicode=True,
        width=120,
    )
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


def _meta(request: ManifestRequest, name: str = "") -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "phalanx", "app.kubernetes.io/instance": request.resource}
    found: dict[str, Any] = {"name": name or request.resource}
    if request.namespace:
        found["namespace"] = request.namespace
    return {**found, "labels": labels}


def _indexed_job(request: ManifestRequest) -> list[dict[str, Any]]:
    name = request.resource
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(request),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": name},
            # A node must find the host before the host is ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "rendezvous", "port": port_for(name)}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(request),
        "spec": _job_spec(request, f"{name}-0.{name}", subdomain=name),
    }
    return [service, job]


def _job_spec(request: ManifestRequest, host: str, subdomain: str = "") -> dict[str, Any]:
    nodes = request.grid.nodes
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": request.max_restarts * nodes,
    }
    if request.time_s:
        spec["activeDeadlineSeconds"] = request.time_s
    spec["podFailurePolicy"] = {
        "rules": [
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": "node", "operator": "In", "values": list(_FATAL_CODES)},
            },
            # Stopped cleanly, or taken away: another pod resumes from the checkpoint, and it is no failure.
            {
                "action": "Ignore",
                "onExitCodes": {"containerName": "node", "operator": "In", "values": [_STOPPED]},
            },
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    }
    spec["template"] = {"metadata": {"labels": _meta(request)["labels"]}, "spec": _pod(request, host, subdomain)}
    return spec


def _pod(request: ManifestRequest, host: str, subdomain: str) -> dict[str, Any]:
    pod: dict[str, Any] = {"subdomain": subdomain} if subdomain else {}
    return {
        **pod,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _grace_s(request),
        "containers": [
            {
                "name": "node",
                "image": request.image,
                "command": _command(request, host),
                "workingDir": request.mount,
                "env": _variables(request),
                "resources": _resources(request),
                "securityContext": {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}},
                "volumeMounts": _mounts(request),
            }
        ],
        "volumes": _volumes(request),
    }


def _grace_s(request: ManifestRequest) -> int:
    # A stop by SIGTERM ends with a checkpoint.
    return round(request.grace_s) + 30


def _command(request: ManifestRequest, host: str) -> list[str]:
    python = [request.python, "-P", "-m", "phalanx.cli.node"]
    job = [f"--await-host={AWAIT_HOST_S}", f"{JOB_FOLDER}/{JOB_FILE}", *request.words]
    meets = [f"run.nnodes={request.grid.nnodes}", f"run.rdzv_endpoint={host}:{port_for(request.resource)}"]
    return [*python, *job, *meets]


def _variables(request: ManifestRequest) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in sorted(request.values.items())]
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": request.secret, "key": name}}} for name in request.secrets
    ]


def _resources(request: ManifestRequest) -> dict[str, Any]:
    if request.devices:
        return {"limits": {request.device_resource: request.devices}}
    return {"requests": {"cpu": str(request.grid.per_node)}}


def _mounts(request: ManifestRequest) -> list[dict[str, Any]]:
    return [
        {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True},
        {"name": "runs", "mountPath": request.mount},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def _volumes(request: ManifestRequest) -> list[dict[str, Any]]:
    return [
        {"name": "job", "configMap": {"name": f"{request.resource}-job"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": request.claim}},
        # A container's own /dev/shm has 64 MiB, too little for NCCL.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{request.shm_gib}Gi"}},
    ]


def _jobset(request: ManifestRequest) -> list[dict[str, Any]]:
    name = request.resource
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _meta(request),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": request.max_restarts},
                "replicatedJobs": [
                    {
                        "name": "node",
                        "replicas": 1,
                        "template": {"spec": _job_spec(request, f"{name}-node-0-0.{name}")},
                    }
                ],
            },
        }
    ]


def _train_job(request: ManifestRequest) -> list[dict[str, Any]]:
    name = request.resource
    trainer: dict[str, Any] = {
        "image": request.image,
        "command": _command(request, f"{name}-node-0-0.{name}"),
        "env": _variables(request),
        "numNodes": request.grid.nodes,
        # One process per pod: the node's launcher, which starts the ranks.
        "numProcPerNode": 1,
        "resourcesPerNode": _resources(request),
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": request.runtime}, "trainer": trainer}
    if request.time_s:
        spec["activeDeadlineSeconds"] = request.time_s
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": _meta(request),
            "spec": {**spec, **_patches(request)},
        }
    ]


def _patches(request: ManifestRequest) -> dict[str, Any]:
    """Returns what a TrainJob changes in the pods of its runtime (Trainer 2.2; before, podTemplateOverrides)."""
    pod = {
        "volumes": _volumes(request),
        "containers": [{"name": "node", "volumeMounts": _mounts(request)}],
        "terminationGracePeriodSeconds": _grace_s(request),
    }
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {"runtimePatches": [{"manager": "phalanx/launch", "trainingRuntimeSpec": runtime}]}


def kubernetes_submission(request: ManifestRequest, kind: Kind, folder: str) -> Submission:
    """Returns the manifest of Kubernetes; its file goes to `folder`."""
    file = Path(os.path.abspath(folder)) / request.name / FILE
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
        manifest(request, kind),
        file,
        ("kubectl", *space, "apply", "--filename", str(file)),
        lambda _: f"{kind}/{request.resource}",
        next_steps,
    )
