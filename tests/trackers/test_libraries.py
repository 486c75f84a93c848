"""The libraries themselves, where they are installed: a run that is resumed one step back, in two processes."""

from __future__ import annotations

import dataclasses
import json
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest

from phalanx.config.job import Job
from phalanx.trackers.libraries import mode
from phalanx.trackers.processes import Trackers

FIRST = [("start", 0, {"devices": 1}), *(("step", n, {"loss": n / 2}) for n in (1, 2, 3))]
SECOND = [
    ("start", 2, {"devices": 1}),
    *(("step", n, {"loss": -n / 2}) for n in (3, 4)),
    ("validation", 4, {"val_loss": 9.0}),
]


def run(name: str, directory: Path) -> list[str]:
    """Runs two attempts, and returns the warnings."""
    warnings: list[str] = []
    job = Job()
    job = dataclasses.replace(
        job,
        run=dataclasses.replace(job.run, name="r", trackers=(name,), trackers_wait_s=240.0),
        model=dataclasses.replace(job.model, vocab_size=64),
    )
    (directory / "config.yaml").write_text("train: {steps: 4}\n")
    (directory / "env.json").write_text('{"host": "here"}')
    for rows, status in ((FIRST, "killed"), (SECOND, "finished")):
        with Trackers(job, directory, directory, warnings.append) as trackers:
            with (directory / "metrics.jsonl").open("a") as file:
                for event, step, values in rows:
                    file.write(json.dumps({"event": event, "time": 1.5, "step": step, **values}) + "\n")
            trackers.end(status, 240.0)
    return warnings


def needs(*modules: str) -> pytest.MarkDecorator:
    absent = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{' and '.join(absent)} not installed")


@needs("tensorboardX")
def test_tensorboard_forgets_the_step_that_came_again(tmp_path: Path):
    """The event files, read with TensorBoard's rule: a START drops the events from its step on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    assert run("tensorboard", tmp_path) == []
    seen: list[Event] = []
    for file in sorted((tmp_path / "trackers/tensorboard").glob("events*"), key=lambda file: file.stat().st_mtime_ns):
        content, at = file.read_bytes(), 0
        while at < len(content):  # TFRecord: length, its CRC, the event, its CRC
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += length + 16
            if event.session_log.status == SessionLog.START:
                seen = [each for each in seen if each.step < event.step]
            seen.append(event)
    values = [(event.step, value) for event in seen for value in event.summary.value]
    losses = [(step, value.simple_value) for step, value in values if value.tag == "train/loss"]
    assert losses == [(1, 0.5), (2, 1.0), (3, -1.5), (4, -2.0)]
    assert [(step, value.simple_value) for step, value in values if "val_loss" in value.tag] == [(4, 9.0)]
    texts = {value.tag: value.tensor.string_val[0].decode() for _, value in values if value.tensor.string_val}
    assert "train: {steps: 4}" in texts["job/text_summary"]
    assert "finished" in texts["status/text_summary"]
    assert any(value.tag.startswith("_hparams_") for _, value in values)
    assert all(event.wall_time == 1.5 for event in seen if event.summary.value[:1] and event.step)


@needs("mlflow", "sqlalchemy", "alembic")
def test_mlflow_has_each_step_once_under_one_run(tmp_path: Path):
    from mlflow.tracking import MlflowClient

    assert run("mlflow", tmp_path) == []
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/trackers/mlflow/mlflow.db")
    [found] = client.search_runs([client.get_experiment_by_name("phalanx").experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(each.step, each.value, each.timestamp) for each in history] == [
        *((1, 0.5, 1500), (2, 1.0, 1500), (3, 1.5, 1500), (4, -2.0, 1500))
    ]
    assert found.info.status == "FINISHED"
    assert found.data.params["train.steps"] == str(Job().train.steps)
    assert found.data.tags["host"] == "here"
    assert {file.path for file in client.list_artifacts(found.info.run_id)} >= {"config.yaml", "pictures"}


@needs("wandb")
def test_wandb_is_offline_in_the_run_directory_under_one_id(tmp_path: Path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert run("wandb", tmp_path) == []
    folders = sorted((tmp_path / "trackers/wandb/wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    place = json.loads((tmp_path / "trackers/wandb/place.json").read_text())
    assert place["notes"]["id"] == folders[0].name.rpartition("-")[2]
    assert place["sent"] == {"start": 3, "step": 4, "validation": 4}


def test_wandb_is_online_only_with_a_key_or_if_asked(tmp_path: Path):
    none = {"NETRC": str(tmp_path / "none")}
    assert mode(none) == "offline"
    assert mode({**none, "WANDB_MODE": "disabled", "WANDB_API_KEY": "x"}) == "disabled"
    assert mode({**none, "WANDB_API_KEY": "x"}) == "online"
    (tmp_path / "netrc").write_text("machine wandb.example.org login user password 0123\n")
    kept = {"NETRC": str(tmp_path / "netrc")}
    assert mode({**kept, "WANDB_BASE_URL": "https://wandb.example.org"}) == "online"
    assert mode(kept) == "offline"
