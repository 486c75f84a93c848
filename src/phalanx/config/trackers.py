"""The table of trackers: what `run.trackers` may name. Their code is in trackers/."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phalanx.facts import Lazy, stated
from phalanx.registry import Registry


@stated
@dataclass(frozen=True)
class TrackerEntry:
    """A tracker, to which a run sends what it writes to metrics.jsonl."""

    title: str
    """One-line description."""
    source: str
    """Its library."""
    open: Lazy
    """`open(run)` returns the `phalanx.trackers.tracker.Tracker` of a `TrackedRun`. It is called in a process of its
    own, which never imports torch by itself."""
    modules: tuple[str, ...] = ()
    """The modules that it imports, which must be installed."""
    install: str = ""
    """The requirement that `pip install` installs for it; needed with `modules`."""


def _entry_problems(name: str, entry: TrackerEntry) -> Iterator[str]:
    """Yields the problems of an entry that is added."""
    if entry.modules and not entry.install:
        yield "install is missing: what pip installs, for a message where its modules are not installed"


TRACKERS = Registry(
    "tracker",
    {
        "tensorboard": TrackerEntry(
            "event files that TensorBoard reads, in the run directory",
            "tensorboardX",
            open="phalanx.trackers.libraries:TensorBoardTracker",
            modules=("tensorboardX",),
            install="phalanx[tensorboard]",
        ),
        "wandb": TrackerEntry(
            "Weights & Biases; offline in the run directory unless you are logged in",
            "wandb",
            open="phalanx.trackers.libraries:WandbTracker",
            modules=("wandb",),
            install="phalanx[wandb]",
        ),
        "mlflow": TrackerEntry(
            "MLflow; a SQLite database in the run directory unless MLFLOW_TRACKING_URI is set",
            "mlflow-skinny",
            open="phalanx.trackers.libraries:MlflowTracker",
            modules=("mlflow", "sqlalchemy", "alembic"),
            install="phalanx[mlflow]",
        ),
    },
    _entry_problems,
)
"""Trackers by name."""


def missing(names: Iterable[str]) -> Iterator[str]:
    """Yields a message for each tracker whose modules are not installed here. Nothing is imported."""
    for name in names:
        entry = TRACKERS[name]
        if absent := [module for module in entry.modules if importlib.util.find_spec(module) is None]:
            yield (
                f"run.trackers: {name} needs {' and '.join(absent)}, not installed here: "
                f'pip install "{entry.install}", or leave {name} out'
            )
