"""A tracker: what a run's metrics, files and end are sent to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records, as it knows it when it opens."""

    name: str
    directory: Path
    """The run directory."""
    folder: Path
    """The tracker's own folder in it, which exists."""
    job: Mapping[str, Any]
    """The resolved job, as nested plain values."""
    layout: str
    """The layout in one line."""
    facts: Mapping[str, Any]
    """Host, versions and so on, as in env.json; without secrets."""
    step: int | None = None
    """The last step that the tracker has; None for a run that it does not know. Steps after it may come again."""
    notes: dict[str, str] = field(default_factory=dict)
    """Values that the tracker finds again after a resume, such as an id; they are kept in the run directory."""

    def hyperparameters(self) -> dict[str, Any]:
        """Returns every value of the job by its dotted path, and the layout's line."""
        return {**flat(self.job, "."), "layout": self.layout}


class Tracker:
    """The base of trackers. What a method raises drops the tracker, and never stops the run."""

    can_rewind = False
    """Whether steps can be taken back (`rewind`). Otherwise a step that the run repeats is not sent again."""

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Records the values of a row of metrics.jsonl after optimizer step `step`, by names such as "train/loss".
        `time` is in seconds since the epoch."""
        raise NotImplementedError

    def rewind(self, step: int) -> None:
        """Takes back everything after `step`: the run resumed from there, and will log those steps again."""

    def file(self, path: Path) -> None:
        """Keeps a file of the run: the job, or a picture."""

    def flush(self) -> None:
        """Returns when what was logged so far can no longer be lost with this process."""

    def close(self, status: str) -> None:
        """Ends the attempt: "finished", "stopped" (it can be resumed), "failed", or "killed"."""


def flat(values: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Returns the leaves of nested mappings, by their paths."""
    return dict(_leaves(values, "", separator))


def _leaves(values: Mapping[str, Any], prefix: str, separator: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}{separator}", separator)
        else:
            yield f"{prefix}{name}", value
