"""Manifests of Kubernetes against its schemas, and those of JobSet and Kubeflow against their models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.submit.kubernetes import ManifestRequest, manifest

REQUEST = ManifestRequest(
    name="My run_1",
    job_yaml="run:\n  name: 'My run_1'  # a comment\n",
    grid=ProcessGrid(2, 4, 1),
    values={"NCCL_DEBUG": "INFO", "ODD": "a: b #c"},
    secrets=("HF_TOKEN",),
    secret="tokens",
    image="registry.example.org/phalanx:1",
    claim="runs",
    namespace="team",
    devices=4,
    time_s=3600,
    grace_s=90,
)
KINDS = ("job", "jobset", "trainjob")


def documents(request: ManifestRequest, kind: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest(request, kind)))


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    return (
        spec["template"] if document["kind"] == "Job" else spec["replicatedJobs"][0]["template"]["spec"]["template"]
    )["spec"]


def job_of(jobset: dict[str, Any]) -> dict[str, Any]:
    """Returns the Job that the controller of a JobSet makes."""
    template = jobset["spec"]["replicatedJobs"][0]["template"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}


@pytest.mark.parametrize("kind", ["job", "jobset"])
@pytest.mark.parametrize("devices", [0, 4])
def test_kubernetes_takes_it(kind, devices):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in documents(replace(REQUEST, devices=devices), kind):
        known = job_of(document) if document["kind"] == "JobSet" else document
        validate.validate(known, validate.latest_version(), strict=True)


def test_strict_validation_finds_an_unknown_key():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    job = documents(REQUEST, "job")[-1]
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(validate.ValidationError):
        validate.validate(job, validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("kind", "model"), [("jobset", "JobsetV1alpha2JobSet"), ("trainjob", "TrainerV1alpha1TrainJob")]
)
def test_the_models_of_kubeflow_lose_nothing(kind, model):
    """The models ignore keys that they do not know: what comes back must be what was given."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    document = documents(REQUEST, kind)[-1]
    assert getattr(models, model).from_dict(document).to_dict() == document


def test_an_indexed_job_meets_through_its_service():
    config, service, job = documents(REQUEST, "job")
    assert [each["kind"] for each in (config, service, job)] == ["ConfigMap", "Service", "Job"]
    assert {each["metadata"]["namespace"] for each in (config, service, job)} == {"team"}
    spec, pod = job["spec"], pod_of(job)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"] == "my-run-1"
    command = pod["containers"][0]["command"]
    assert command[:5] == ["python3", "-P", "-m", "phalanx.cli.node", "--await-host=600"]
    port = service["spec"]["ports"][0]["port"]
    assert command[-3:] == ["/etc/phalanx/job.yaml", "run.nnodes=1:2", f"run.rdzv_endpoint=my-run-1-0.my-run-1:{port}"]
    assert config["data"]["job.yaml"] == REQUEST.job_yaml
    assert pod["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    rules = spec["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", [2, 3, 4, 5]),
        ("Ignore", [75]),
        ("Ignore", None),
    ]


def test_jobsets_and_train_jobs_meet_at_their_first_pod():
    for kind in ("jobset", "trainjob"):
        text = manifest(REQUEST, kind)
        assert "run.rdzv_endpoint=my-run-1-node-0-0.my-run-1:" in text


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_come_from_a_secret(kind):
    assert "secretKeyRef" in manifest(REQUEST, kind)
    with pytest.raises(JobError, match="kubectl create secret generic"):
        manifest(replace(REQUEST, secret=""), kind)


def test_everything_that_is_missing_at_once():
    with pytest.raises(JobError) as caught:
        manifest(replace(REQUEST, image="", claim="", namespace="No_Name", mount="runs"), "job")
    assert [problem.split()[0].rstrip(":") for problem in caught.value.problems] == [
        *("--image", "--namespace", "--pvc", "--pvc")
    ]


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=200), st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=50))
def test_any_name_and_value_survives(name, value):
    request = replace(REQUEST, name=name, values={"A": value}, job_yaml=f"x: {value}\ny: 1\n")
    config, service, job = documents(request, "job")
    assert pod_of(job)["containers"][0]["env"][0] == {"name": "A", "value": value}
    assert config["data"]["job.yaml"] == request.job_yaml
    assert service["metadata"]["name"] == request.resource
    assert len(request.resource) <= 44
    assert request.resource.strip("-").replace("-", "").isalnum()
