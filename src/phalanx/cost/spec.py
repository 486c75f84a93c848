"""What is predicted: a step of a model, on a cluster, under a layout, by a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.config.cluster import Cluster
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.frameworks.framework import Framework
from phalanx.hashed import Hashed, hashed_once
from phalanx.partition.batch import Batch

Products = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]


@hashed_once
@dataclass(frozen=True)
class StepSpec(Hashed):
    """One training step. The model's vocabulary is written out, the layout complete."""

    model: ModelConfig
    cluster: Cluster
    layout: Layout
    batch: Batch
    products: Products = "bf16"
    """Number format of the matrix products of the blocks; attention and head stay in 16 bits with fp8 and fp4."""
    width: int = 2
    """Bytes of a parameter and of an activation."""
    framework: Framework = field(default_factory=Framework)
    stages: tuple[range, ...] = ()
    """The layers of every pipeline stage; empty takes those of `layout.pp_cut`, else as even as can be."""
