"""The door for things from outside: one call and one object per thing. docs/reference/extending.md has examples.

A package calls these functions in its entry point of the group `phalanx.extensions` (registry.py), and its things are
then used like the project's own, which stand in the same tables. An object states all facts of its thing; one that
states too little, or what its own code contradicts, is refused with every problem at once (ExtensionError).

Nothing here imports torch: code that needs it is stated as a place, "package.module:name", and imported when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.axes.axis import AxisEntry
from phalanx.axes.catalogue import AXES_TABLE
from phalanx.blocks.kinds import ATTENTION, FEED_FORWARD, AttentionKind, Connection, FeedForwardKind
from phalanx.config.cluster import Accelerator, Cluster, Link
from phalanx.config.clusters import DEVICES, MACHINES, DeviceEntry, MachineEntry
from phalanx.config.constraints import Interval
from phalanx.config.corpora import CORPORA, TOKENIZERS, CorpusEntry, TokenizerEntry
from phalanx.config.dispatchers import DISPATCHERS, DispatcherEntry
from phalanx.config.job import Data
from phalanx.config.trackers import TRACKERS, TrackerEntry
from phalanx.errors import DataError, ExtensionError, JobError
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.optimizers.catalogue import extra_options as optimizer_options
from phalanx.optimizers.entry import ExtraOption, OptimizerEntry, StateKind, UpdateCosts
from phalanx.registry import Registry
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.generators import round_robin, v_shape
from phalanx.schedule.schedule import Action, Schedule, ScheduleEntry
from phalanx.techniques.catalogue import TECHNIQUES
from phalanx.techniques.technique import Effect, Technique

__all__ = [
    "TABLES",
    "Accelerator",
    "Action",
    "AttentionKind",
    "AxisEntry",
    "Cluster",
    "Connection",
    "CorpusEntry",
    "Data",
    "DataError",
    "DeviceEntry",
    "DispatcherEntry",
    "Effect",
    "ExtensionError",
    "ExtraOption",
    "FeedForwardKind",
    "Interval",
    "JobError",
    "Link",
    "MachineEntry",
    "OptimizerEntry",
    "Schedule",
    "ScheduleEntry",
    "StateKind",
    "Technique",
    "TokenizerEntry",
    "TrackerEntry",
    "UpdateCosts",
    "attention",
    "axis",
    "cluster",
    "corpus",
    "device",
    "dispatcher",
    "feed_forward",
    "optimizer",
    "optimizer_options",
    "round_robin",
    "schedule",
    "technique",
    "tokenizer",
    "tracker",
    "v_shape",
]

TABLES: Mapping[str, Registry[Any]] = {
    "schedule": SCHEDULES,
    "optimizer": OPTIMIZERS,
    "device": DEVICES,
    "cluster": MACHINES,
    "attention": ATTENTION,
    "feed_forward": FEED_FORWARD,
    "corpus": CORPORA,
    "tokenizer": TOKENIZERS,
    "tracker": TRACKERS,
    "technique": TECHNIQUES,
    "axis": AXES_TABLE,
    "dispatcher": DISPATCHERS,
}
"""Every table that packages may add to, by the name of its function here."""


def schedule(name: str, entry: ScheduleEntry) -> None:
    """Adds a pipeline schedule: `layout.schedule=name`. Its facts are compared with the programs that it builds for
    small pipelines. Raises ExtensionError with every problem."""
    SCHEDULES.add(name, entry)


def optimizer(name: str, entry: OptimizerEntry) -> None:
    """Adds an optimizer: `optimizer.name=name`. `optimizer_options` returns the numbers of a job's
    `optimizer.options`. Raises ExtensionError with every problem."""
    OPTIMIZERS.add(name, entry)


def device(name: str, entry: DeviceEntry) -> None:
    """Adds a device, which is recognised by the names that its driver reports, and may be named in tables of `phalanx
    predict --table`. Raises ExtensionError with every problem."""
    DEVICES.add(name, entry)


def cluster(name: str, entry: MachineEntry) -> None:
    """Adds a machine, as one node: `cluster=name:NODES`. Raises ExtensionError with every problem."""
    MACHINES.add(name, entry)


def corpus(name: str, entry: CorpusEntry) -> None:
    """Adds a corpus: `data.corpus=name`. Raises ExtensionError with every problem."""
    CORPORA.add(name, entry)


def tokenizer(name: str, entry: TokenizerEntry) -> None:
    """Adds a kind of tokenizer: `data.tokenizer=name`. What it makes is a `phalanx.data.tokenizer.Tokenizer`,
    and is checked when it is made. Raises ExtensionError with every problem."""
    TOKENIZERS.add(name, entry)


def dispatcher(name: str, entry: DispatcherEntry) -> None:
    """Adds a way of tokens to their experts: `layout.dispatch=name`. Raises ExtensionError with every problem."""
    DISPATCHERS.add(name, entry)


def tracker(name: str, entry: TrackerEntry) -> None:
    """Adds a tracker: `run.trackers=name`. What it opens is a `phalanx.trackers.tracker.Tracker`, in a process of its
    own. Raises ExtensionError with every problem."""
    TRACKERS.add(name, entry)


def attention(name: str, kind: AttentionKind) -> None:
    """Adds a kind of attention: `model.attention=name`. Its facts are compared with its operators for small models, and
    these with its torch module when a model is built. Raises ExtensionError with every problem."""
    ATTENTION.add(name, kind)


def feed_forward(name: str, kind: FeedForwardKind) -> None:
    """Adds a kind of feed-forward layer: `model.feed_forward=name`; compared as a kind of attention is. Raises
    ExtensionError with every problem."""
    FEED_FORWARD.add(name, kind)


def technique(name: str, entry: Technique) -> None:
    """Adds a technique, whose options are the section `techniques.name` of a job: `techniques.name.option=value`. Its
    facts are computed for the default job, with which it must be off. Raises ExtensionError with every problem."""
    TECHNIQUES.add(name, entry)


def axis(name: str, entry: AxisEntry) -> None:
    """Adds an axis of data-parallel replicas, whose options, among them its size, are the section `layout.axes.name` of
    a job: `axes.name.size=2`. Raises ExtensionError with every problem."""
    AXES_TABLE.add(name, entry)
