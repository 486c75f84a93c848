"""TensorBoard: event files written by tensorboardX. A resumed run writes another file, which begins with the mark that
makes TensorBoard forget the steps that come again (its SessionLog.START)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.trackers.tracker import TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """Writes to RUN/trackers/tensorboard."""

    can_rewind = True

    def __init__(self, run: TrackedRun):
        # tensorboardX imports torch where it is installed, which takes seconds; scalars and texts do not need it.
        sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]
        library = import_module("tensorboardX")
        self._writer: Any = library.SummaryWriter(
            str(run.folder),
            purge_step=None if run.step is None else run.step + 1,
            filename_suffix=f".{time.time_ns()}",  # or a run that resumes in the same second replaces the file
        )
        if run.step is None:
            for summary in library.summary.hparams(
                {name: _value(value) for name, value in run.hyperparameters().items()}, {}
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


def _value(value: object) -> str | float | bool:
    return value if isinstance(value, str | bool | int | float) else str(value)
