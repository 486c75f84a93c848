"""The Job: a model, a cluster and a layout, with data, optimizer and the options of a run. Every verb takes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.config.checkpoint import Checkpoint
from phalanx.config.cluster import Cluster
from phalanx.config.data import Data
from phalanx.config.guard import GuardOptions
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.optimizer import Optimizer
from phalanx.config.run import RunOptions
from phalanx.config.train import Train


@dataclass(frozen=True)
class Job:
    """One job: what to train, on what, how spread, and how long."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: Cluster = field(default_factory=Cluster)
    layout: Layout = field(default_factory=Layout)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    guard: GuardOptions = field(default_factory=GuardOptions)
    run: RunOptions = field(default_factory=RunOptions)
