"""The subject of a prediction: a step of a model, on a cluster, in a layout, by a framework."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.blocks.kinds import BlockKind
from phalanx.blocks.operator import MemoryProfile
from phalanx.config.cluster import Cluster
from phalanx.config.job import Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.precision import Products
from phalanx.hashed import Hashed, hashed_once
from phalanx.optimizers.entry import NOTHING_MORE, UpdateCosts
from phalanx.partition.derived import Batch

FusedKernel = Literal[1, 2, 3, "cudnn"]
"""A kernel of fused attention: a generation of FlashAttention, or cuDNN's (kernel.FLASH)."""


@hashed_once
@dataclass(frozen=True)
class Framework(Hashed):
    """A training framework, as far as time and memory depend on it."""

    name: str = "phalanx"
    """Name in reports."""
    slowdown: float = 1.0
    """Factor on the device time that sizes and the device's best rates give: clocks that power and heat hold down, and
    kernels that are not the best ones. Calibrated (calibration.yaml)."""
    moe_slowdown: float = 1.0
    """Further factor on blocks with experts: routing, permuting and small products in one kernel after another."""
    attention: Literal["flash", "unfused"] = "flash"
    """Whether attention is one kernel that saves no scores, or products with a softmax between them in memory."""
    flash: FusedKernel = 2
    """The kernel of fused attention."""
    passes: float = 1.0
    """Memory-bound work (norms, activations, residuals, rotary) in multiples of reading and writing each operand once:
    1 if kernels are fused by hand or by a compiler, more if each operation is a kernel of its own."""
    kernel_us: float = 6.0
    """Microseconds in which the host launches a kernel; shorter kernels are launch-bound."""
    softmax_passes: float = 4.5
    """attention=unfused: passes over the scores besides those of the products: softmax and dropout, each reading and
    writing, and a mask of one byte."""
    cast_bytes: float = 3.0
    """fp8, fp4: bytes moved per element of an operand to cast it to 8 bits (read two, write one)."""
    casts_each: bool = False
    """fp8, fp4: whether each of the three products casts both operands, weights too; otherwise an activation and its
    gradient are cast once, and weights with the optimizer's step."""
    narrow_experts: bool = True
    """fp8, fp4: whether the products of experts run in that format, too."""
    tp_hidden: float = 0.0
    """Share of tensor-parallel traffic that overlaps with matrix products (user buffers, AsyncTP)."""
    dp_overlaps: bool = True
    """Whether gradients are reduced, and parameters gathered, while other layers compute."""
    pp_overlaps: bool = True
    """Whether stage boundaries are sent while other micro-batches compute."""
    pp_scatters: bool = False
    """Whether tensor ranks each send a part of a stage boundary and gather it on the other side (Narayanan et al. 2021,
    section 4.1) without sp, with which they hold parts already."""
    ep_once: bool = False
    """Whether a token is sent once to each node with some of its experts (DeepEP, HybridEP), not once per expert."""
    messages: int = 1
    """ZeRO-3: collectives per block for its state; a framework that gathers each parameter by itself needs one for
    each."""
    ep_folds: bool = False
    """Whether expert ranks are adjacent, tensor ranks among them, and hold whole experts (Megatron Core's parallel
    folding, Liu et al. 2025); otherwise tensor ranks share every expert."""
    gathers_narrow: bool = False
    """Whether parameters in fp8 are gathered in 8 bits."""
    sum_passes: float = 0.0
    """Passes over memory to add a micro-batch's gradients to those before: 3 reads two and writes one; 0 if `slowdown`
    includes it."""
    clip_bytes: int = 8
    """Bytes moved per gradient to clip it: its norm is read, and it is set to zero, in fp32; 0: twice its own bytes, as
    a norm takes twice as long as its bytes (2.36e9 gradients in bf16 in 2.2 ms on an H200, 2.1 TB/s)."""
    interference: float = 1.1
    """Factor on the time of a product during a collective (Galvatron measured 1.13)."""
    spread: tuple[float, float] = (0.91, 1.23)
    """Measured over predicted time, 10th and 90th percentiles of 765 published steps, calibrated or not
    (docs/explanation/accuracy.md)."""
    memory_spread: tuple[float, float] = (0.95, 1.05)
    """Measured over predicted memory, the same percentiles of 100 published figures."""
    memory_profile: MemoryProfile = field(default_factory=MemoryProfile)
    """Its buffers, copies and reserves in memory."""
    alone: Framework | None = None
    """The framework that replaces this one in a job of one device, if it was measured there."""

    def block_slowdown(self, kind: BlockKind) -> float:
        """Returns the slowdown of a block's kernels over the same kernels alone."""
        return self.slowdown * (self.moe_slowdown if kind.routed else 1.0)


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
    more: UpdateCosts = NOTHING_MORE
    """What techniques add to the optimizer's step."""
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
