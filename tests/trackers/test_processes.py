"""Trackers are processes of their own: one that fails, hangs or dies is dropped with one warning, within the limit."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from extend.install import install
from phalanx.cli import main
from phalanx.config import trackers as table
from phalanx.config.job import Job
from phalanx.errors import JobError, StoppedError
from phalanx.trackers.processes import Trackers

pytestmark = pytest.mark.cold  # they measure how long a process takes

BROKEN = """
import ctypes, os, time
from phalanx import extend
from phalanx.trackers.tracker import Tracker


class Raises(Tracker):
    def __init__(self, run):
        raise ConnectionError(f"no route to https://me:secret@host with {os.environ['WANDB_API_KEY']}")


class Dies(Tracker):
    def __init__(self, run):
        print(os.environ["WANDB_API_KEY"])

    def log(self, step, values, time):
        os._exit(7)


class Hangs(Tracker):
    def __init__(self, run):
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock


def register():
    for kind in (Raises, Dies, Hangs):
        extend.tracker(kind.__name__.lower(), extend.TrackerEntry("broken", "a test", open=kind))
"""

FILES = """
from phalanx import extend
from phalanx.trackers.tracker import Tracker


class Files(Tracker):
    def __init__(self, run):
        self.names = run.directory / "names"

    def file(self, path):
        with open(self.names, "a") as names:
            names.write(path.name + " ")


def register():
    extend.tracker("files", extend.TrackerEntry("names of files", "a test", open=Files))
"""


def write(directory: Path, *steps: int) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"event": "step", "time": 1.5, "step": n, "loss": n / 2}) + "\n" for n in steps)


def job_with(*names: str, wait_s: float = 60.0) -> Job:
    job = Job()
    return dataclasses.replace(job, run=dataclasses.replace(job.run, name="r", trackers=names, trackers_wait_s=wait_s))


def test_a_tracker_that_fails_hangs_or_dies_costs_a_warning_and_a_limited_time(tmp_path, monkeypatch):
    """The one of docs/reference/extending.md beside them gets everything, and goes on where it ended."""
    for path in (install(tmp_path / "a", "csv_tracker"), install(tmp_path / "b", "broken", text=BROKEN)):
        monkeypatch.syspath_prepend(str(path))
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    run, warnings = tmp_path / "r", []
    run.mkdir()
    write(run, 1, 2)
    with Trackers(job_with("csv", "raises", "dies", "hangs"), run, run, warnings.append) as trackers:
        write(run, 3)
        for follower in trackers.followers[1:3]:
            follower._thread.join(60)
        deadline = time.monotonic() + 60
        place = run / "trackers/csv/place.json"
        while not (place.exists() and json.loads(place.read_text())["sent"].get("step") == 3):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(warnings) == 2
        began = time.monotonic()
        trackers.end("finished", 3.0)
        assert time.monotonic() - began < 4.5
    shown = "\n".join(sorted(warnings))
    assert len(warnings) == 3
    assert "tracker dies is dropped: its process ended with code 7" in shown
    assert "tracker hangs is dropped: it had not finished 3 s after the run" in shown
    assert "ConnectionError: no route to https://…@host with …" in shown
    logs = "".join(log.read_text() for log in run.glob("tracker_*.log"))
    assert "ConnectionError" in logs
    assert "0123456789abcdef" not in shown + logs
    write(run, 4)
    monkeypatch.setattr("phalanx.trackers.processes.STOPPED_S", 60.0)
    trackers = Trackers(job_with("csv"), run, None, warnings.append)
    trackers.__enter__()
    trackers.__exit__(StoppedError, StoppedError("stopped"), None)
    lines = [f"{n},train/loss,{n / 2}" for n in (1, 2, 3)]
    assert (run / "trackers/csv/metrics.csv").read_text().split() == [
        *(*lines, "#", "finished", "4,train/loss,2.0", "#", "stopped")
    ]
    assert len(warnings) == 3


def test_a_process_outlives_its_trainer_by_a_limited_time(tmp_path, monkeypatch):
    """A trainer that was killed says nothing: the pipe closes, and the run is recorded as killed."""
    monkeypatch.syspath_prepend(str(install(tmp_path / "a", "csv_tracker")))
    write(tmp_path, 1)
    with Trackers(job_with("csv"), tmp_path, tmp_path, print) as trackers:
        [follower] = trackers.followers
        assert follower._process
        assert follower._process.stdin
        follower._process.stdin.close()
        follower._thread.join(60)
    assert (tmp_path / "trackers/csv/metrics.csv").read_text() == "1,train/loss,0.5\n# killed\n"


def test_a_tracker_gets_the_job_and_the_pictures_also_of_a_profile(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(install(tmp_path / "a", "files", text=FILES)))
    (tmp_path / "traces").mkdir()
    for name in ("config.yaml", "loss.svg", "report.html", "traces/profile.svg", "traces/profile.json"):
        (tmp_path / name).write_text("")
    warnings: list[str] = []
    with Trackers(job_with("files"), tmp_path, tmp_path, warnings.append):
        pass
    assert warnings == []
    assert (tmp_path / "names").read_text().split() == ["config.yaml", "loss.svg", "report.html", "profile.svg"]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError) as caught:
        main.run(["train", "--trackers", "wandb,mlflow"])
    assert caught.value.problems == [
        'run.trackers: wandb needs wandb, not installed here: pip install "phalanx[wandb]", or leave wandb out',
        "run.trackers: mlflow needs mlflow and sqlalchemy and alembic, not installed here: "
        'pip install "phalanx[mlflow]", or leave mlflow out',
    ]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("value", "names"), [("wandb", ["wandb"]), ("[tensorboard, wandb]", ["tensorboard", "wandb"]), ("", [])]
)
def test_a_list_of_names_is_a_field(capsys, value, names):
    assert main.run(["train", f"run.trackers={value}", "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["run"]["trackers"] == names


def test_a_wrong_name_gets_a_suggestion():
    with pytest.raises(JobError) as caught:
        main.run(["plan", "--trackers", "wandv,mlflow,mlflow"])
    assert "no tracker 'wandv'; did you mean wandb? (known: tensorboard, wandb, mlflow)" in caught.value.problems[0]
    assert "names mlflow 2 times" in caught.value.problems[1]
