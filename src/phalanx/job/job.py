"""The Job: a model, a cluster and a layout, with data, optimizer and the options of a run. Every verb takes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.job.checkpoint import Checkpoint
from phalanx.job.cluster import Cluster
from phalanx.job.data import Data
from phalanx.job.layout import Layout
from phalanx.job.model import Model
from phalanx.job.optimizer import Optimizer
from phalanx.job.run import Run
from phalanx.job.train import Train


@dataclass(frozen=True)
class Job:
    """One job: what to train, on what, how spread, and how long."""

    model: Model = field(default_factory=Model)
    cluster: Cluster = field(default_factory=Cluster)
    layout: Layout = field(default_factory=Layout)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)
