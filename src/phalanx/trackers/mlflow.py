"""MLflow: a SQLite database in RUN/trackers/mlflow, or what MLFLOW_TRACKING_URI names. A run keeps its id over all
attempts. MLflow cannot take a step back, so each is sent once; a value that is sent twice is stored once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.trackers.tracker import TrackedRun, Tracker

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
