"""Trackers get each step once; the libraries themselves, in two processes."""

from __future__ import annotations

import dataclasses
import json
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job import Job
from phalanx.trackers.follower import Redactor
from phalanx.trackers.libraries import mode
from phalanx.trackers.processes import Trackers
from phalanx.trackers.tracker import (
    ReadPosition,
    TrackedRun,
    Tracker,
    is_behind,
    place_of,
    read_rows,
    send,
    values_of,
    without_superseded,
)

# A tracker gets each step of metrics.jsonl once, whatever earlier attempts left.


def step(number: int, loss: float = 0.0) -> dict:
    return {"event": "step", "time": 1.0, "step": number, "loss": loss}


class Kept(Tracker):
    """A tracker that keeps what it is sent, by step and name."""

    def __init__(self, can_rewind: bool):
        self.can_rewind, self.logged, self.order = can_rewind, {}, []

    def log(self, step, values, time):
        for name, value in values.items():
            assert name.startswith("start/") or (step, name) not in self.logged, "a step came twice"
            self.logged[step, name] = value
        self.order.append(step)

    def rewind(self, step):
        self.logged = {key: value for key, value in self.logged.items() if key[0] <= step}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.data())
def test_each_step_comes_once_whatever_was_resumed_and_killed(attempts, data):
    """Attempts begin at a step that the one before has reached, and are read in pieces of any size, by processes that
    begin anew. Trackers that can take steps back end with the last version of each, the others with one version."""
    rows, reached, last_version = [], 0, {}
    for number, (back, forward) in enumerate(attempts):
        begin = max(0, reached - back)
        last_version = {each: version for each, version in last_version.items() if each <= begin}
        rows.append({"event": "start", "time": 1.0, "step": begin, "devices": number})
        for each in range(begin + 1, begin + forward + 1):
            rows.append(step(each, loss=number))
            if each % 3 == 0:
                rows.append({"event": "validation", "time": 1.0, "step": each, "val_loss": number})
            last_version[each] = number
        reached = begin + forward
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    pieces = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    for can_rewind in (True, False):
        kept, place = Kept(can_rewind), ReadPosition()
        for piece in pieces:
            send(kept, piece, place)
        losses = {number: value for (number, name), value in kept.logged.items() if name == "train/loss"}
        validated = {number for number, name in kept.logged if name == "validation/val_loss"}
        if can_rewind:
            assert losses == last_version
        else:
            assert losses.keys() == set(range(1, max(losses, default=0) + 1))
            assert kept.order == sorted(kept.order)  # W&B refuses a step below the last
        assert {each for each in validated if each <= reached} == set(range(3, reached + 1, 3))


def test_what_was_superseded_before_it_was_read_is_not_sent():
    guard = {"event": "guard", "step": 3, "text": "spike", "norm": 9.0}
    rows = [step(1), step(2), step(3, 7.0), guard, step(2, 1.0), step(3, 2.0)]
    assert without_superseded(rows) == [step(1), {**guard, "step": 1}, step(2, 1.0), step(3, 2.0)]


def test_rows_are_read_by_whole_lines_from_where_the_last_reader_ended(tmp_path: Path):
    file, kept = tmp_path / "metrics.jsonl", tmp_path / "place.json"
    assert read_rows(file, ReadPosition()) == []
    file.write_text(f"{json.dumps(step(1))}\nno row\n[1]\n{json.dumps(step(2))[:9]}")
    place = ReadPosition()
    assert read_rows(file, place) == [step(1)]
    place.notes["id"] = "a"
    place.write(kept)
    file.write_text(f"{json.dumps(step(1))}\nno row\n[1]\n{json.dumps(step(2))}\n")
    place = ReadPosition.read(kept)
    assert place.notes == {"id": "a"}
    assert read_rows(file, place) == [step(2)]
    file.write_text(f"{json.dumps(step(1))}\n")  # another file: it is shorter
    assert read_rows(file, place) == [step(1)]
    kept.write_text('{"offset": "x"}')
    assert ReadPosition.read(kept) == ReadPosition()


def test_a_tracker_is_behind_until_it_has_the_whole_file(tmp_path: Path):
    assert not is_behind(tmp_path, "wandb")
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(step(1))}\n")
    assert is_behind(tmp_path, "wandb")
    place = ReadPosition()
    read_rows(tmp_path / "metrics.jsonl", place)
    place_of(tmp_path, "wandb").parent.mkdir(parents=True)
    place.write(place_of(tmp_path, "wandb"))
    assert not is_behind(tmp_path, "wandb")


def test_values_are_the_numbers_of_a_row_by_name():
    row = {
        **step(3, 1.5),
        "traffic_bytes": {"tp": {"all_reduce": 8}},
        "text": "x",
        "loads": [1],
        "is": True,
        "no": None,
    }
    assert values_of(row) == {"train/loss": 1.5, "train/traffic_bytes/tp/all_reduce": 8}


def test_hyperparameters_are_the_job_by_dotted_paths(tmp_path: Path):
    run = TrackedRun("a", tmp_path, tmp_path, {"model": {"moe": {"top_k": 2}}, "x": [1, 2]}, "tp=2", {})
    assert run.hyperparameters() == {"model.moe.top_k": 2, "x": [1, 2], "layout": "tp=2"}


def test_secrets_are_masked():
    redact = Redactor({"WANDB_API_KEY": "0123456789abcdef", "AWS_SECRET_ACCESS_KEY": "0123456789", "TOKENS": "on"})
    text = "key 0123456789abcdef, at https://me:pass@host/x, on 0123456789"
    assert redact(text) == "key …, at https://…@host/x, on …"


# The libraries themselves, where they are installed: a run that is resumed one step back, in two processes.

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
