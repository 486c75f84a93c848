"""The subject of a prediction: a step of a model, on a cluster, in a layout, by a framework."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.config.cluster import Cluster
from phalanx.config.job import Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.frameworks.framework import Framework
from phalanx.hashed import Hashed, hashed_once
from phalanx.partition.batch import Batch

Products = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]


@hashed_once
@dataclass(frozen=True)
class StepSpec(Hashed):
    """One training step. The model's vocabulary size is set, the layout complete."""

    model: ModelConfig
    cluster: Cluster
    layout: Layout
    batch: Batch
    products: Products = "bf16"
    """Number format of the matrix products of the blocks; attention and head stay in 16 bits with fp8 and fp4."""
    width: int = 2
    """Bytes per element of a parameter and of an activation."""
    framework: Framework = field(default_factory=Framework)
    stages: tuple[range, ...] = ()
    """Layers of every pipeline stage; empty: those of `layout.pp_cut`, else as even as possible."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """The optimizer: its state, and what its step takes."""
    document_mask: bool = False
    """Whether attention must not cross documents (data.document_mask)."""
    pairs: bool = False
    """Whether the loss compares pairs of sequences (DPO), so that the gradients of one follow the other."""


def as_used_by(world: int, cluster: Cluster, framework: Framework) -> tuple[Cluster, Framework]:
    """Returns the machine and the framework as a job of `world` devices has them: one device has rates of its own
    (Accelerator.alone, Framework.alone)."""
    device = cluster.accelerator
    if world > 1:
        return cluster, framework
    own = replace(device, sustained=device.alone or device.sustained)
    return replace(cluster, accelerator=own), framework.alone or framework
