"""TensorBoard, Weights & Biases and MLflow.

TensorBoard: event files written by tensorboardX. A resumed run writes another file, which begins with the mark that
makes TensorBoard forget the steps that come again (its SessionLog.START).

W&B: a run keeps its id over all attempts. W&B cannot take a step back, so each is sent once. It is offline, in
RUN/trackers/wandb, unless WANDB_MODE says otherwise, or a key is there to log in with: WANDB_API_KEY, or the line of
W&B's host in ~/.netrc, which `wandb login` writes.

MLflow: a SQLite database in RUN/trackers/mlflow, or what MLFLOW_TRACKING_URI names. A run keeps its id over all
attempts. MLflow cannot take a step back, so each is sent once; a value that is sent twice is stored once.
"""

from __future__ import annotations

import json
import netrc
import os
import secrets
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from phalanx.trackers.tracker import TrackedRun, Tracker

HOST = "https://api.wandb.ai"
PROJECT = "phalanx"


class WandbTracker(Tracker):
    """Logs to the run that `notes["id"]` names. Variables of W&B's own win: WANDB_PROJECT, WANDB_RUN_ID, and so on."""

    def __init__(self, run: TrackedRun):
        self._wandb = wandb = import_module("wandb")
        run.notes["id"] = os.environ.get("WANDB_RUN_ID") or run.notes.get("id") or secrets.token_hex(4)
        self._run: Any = wandb.init(
            id=run.notes["id"],
            resume=os.environ.get("WANDB_RESUME") or "allow",
            mode=mode(os.environ),
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or run.name,
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            config={**run.hyperparameters(), "facts": dict(run.facts)},
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
        self._step = run.step or 0

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._step = step
        self._run.log(dict(values), step=step)

    def file(self, path: Path) -> None:
        if path.suffix in (".svg", ".html"):
            page = self._wandb.Html(path.read_text(encoding="utf-8"), inject=False)
            self._run.log({f"pictures/{path.stem}": page}, step=self._step, commit=False)
        else:
            self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status in ("failed", "killed")))
        self._wandb.teardown()  # or its service would end some time after this process


def mode(environment: Mapping[str, str]) -> str:
    """Returns W&B's mode: what the environment asks for, else "online" if there is a key to log in with."""
    if asked := environment.get("WANDB_MODE"):
        return asked
    return "online" if environment.get("WANDB_API_KEY") or _is_in_netrc(environment) else "offline"


def _is_in_netrc(environment: Mapping[str, str]) -> bool:
    host = urlsplit(environment.get("WANDB_BASE_URL") or HOST).hostname or ""
    try:
        return netrc.netrc(environment.get("NETRC") or None).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


EXPERIMENT = "phalanx"
MOST_METRICS, MOST_PARAMETERS, LONGEST = 1000, 100, 6000
"""Metrics and parameters of one call, and characters of a parameter: MLflow's own limits."""
ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "killed": "KILLED"}


class MlflowTracker(Tracker):
    """Logs to the run that `notes["run_id"]` names, or MLFLOW_RUN_ID."""

    def __init__(self, run: TrackedRun):
        entities = import_module("mlflow.entities")
        here = "MLFLOW_TRACKING_URI" not in os.environ
        self._client: Any = import_module("mlflow.tracking").MlflowClient(
            tracking_uri=f"sqlite:///{run.folder}/mlflow.db" if here else None
        )
        self._metric: Any = entities.Metric
        self._waiting: list[Any] = []
        known = os.environ.get("MLFLOW_RUN_ID") or run.notes.get("run_id")
        if known:
            self._client.update_run(known, status="RUNNING")
        else:
            known = self._client.create_run(
                self._experiment(run.folder if here else None), run_name=run.name
            ).info.run_id
        self._id = run.notes["run_id"] = known
        if run.step is None:
            parameters = [entities.Param(name, str(value)[:LONGEST]) for name, value in run.hyperparameters().items()]
            for first in range(0, len(parameters), MOST_PARAMETERS):
                self._client.log_batch(self._id, params=parameters[first : first + MOST_PARAMETERS])
        for name in ("host", "phalanx", "git"):
            self._client.set_tag(self._id, name, str(run.facts.get(name)))

    def _experiment(self, folder: Path | None) -> str:
        """Returns the id of the experiment, which is made if it is not there."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        if found := self._client.get_experiment_by_name(name):
            return found.experiment_id
        return self._client.create_experiment(name, artifact_location=folder and (folder / "artifacts").as_uri())

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._waiting += [self._metric(name, value, int(time * 1000), step) for name, value in values.items()]

    def file(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), "pictures" if path.suffix in (".svg", ".html") else None)

    def flush(self) -> None:
        for first in range(0, len(self._waiting), MOST_METRICS):
            self._client.log_batch(self._id, metrics=self._waiting[first : first + MOST_METRICS])
        self._waiting.clear()

    def close(self, status: str) -> None:
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, ENDS[status])


class TensorBoardTracker(Tracker):
    """Writes to RUN/trackers/tensorboard."""

    can_rewind = True

    def __init__(self, run: TrackedRun):
        # tensorboardX imports torch where it is installed, which takes seconds; scalars and texts do not need it.
        sys.modules.setdefault("torch", None)  # pyrefly: ignore[no-matching-overload]
        library = import_module("tensorboardX")
        self._writer: Any = library.SummaryWriter(
            str(run.folder),
            purge_step=None if run.step is None else run.step + 1,
            filename_suffix=f".{time.time_ns()}",  # or a run that resumes in the same second replaces the file
        )
        if run.step is None:
            for summary in library.summary.hparams(
                {
                    name: (value if isinstance(value, str | bool | int | float) else str(value))
                    for name, value in run.hyperparameters().items()
                },
                {},
            ):
                self._writer.file_writer.add_summary(summary)
            self._text("layout", run.layout)
            self._text("facts", json.dumps(run.facts, indent=1))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def rewind(self, step: int) -> None:
        proto = import_module("tensorboardX.proto.event_pb2")
        start = proto.Event(step=step + 1, session_log=proto.SessionLog(status=proto.SessionLog.START))
        self._writer.file_writer.add_event(start, step + 1)

    def file(self, path: Path) -> None:
        if path.suffix == ".yaml":  # TensorBoard shows no SVG
            self._text("job", path.read_text(encoding="utf-8"))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, status: str) -> None:
        self._text("status", status)
        self._writer.close()

    def _text(self, name: str, text: str) -> None:
        self._writer.add_text(name, "    " + text.replace("\n", "\n    "), 0)
