"""How a training program uses a machine: what the same layout costs more or less in another framework."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.blocks.kinds import BlockKind
from phalanx.blocks.memory_profile import MemoryProfile
from phalanx.hashed import Hashed, hashed_once


@hashed_once
@dataclass(frozen=True)
class Framework(Hashed):
    """A training program, as far as time and memory depend on it."""

    name: str = "phalanx"
    """What it is called in reports."""
    slowdown: float = 1.0
    """Time on the device beside what sizes and the device's best rates give: clocks that power and heat hold down, and
    kernels that are not the best ones. Calibrated (calibration.py)."""
    moe_slowdown: float = 1.0
    """The same of blocks with experts, on top: routing, permuting and small products in one program after another."""
    attention: Literal["flash", "unfused"] = "flash"
    """Whether attention is one kernel that keeps no scores, or products with a softmax between them in memory."""
    flash: int = 2
    """Generation of the fused attention kernel (kernel.FLASH)."""
    passes: float = 1.0
    """Memory-bound work (norms, activations, residuals, rotary) in multiples of reading and writing each operand once:
    1 where kernels are fused by hand or by a compiler, more where each operation is a kernel of its own."""
    kernel_us: float = 6.0
    """Time the host needs to launch a kernel, in microseconds: below it devices wait for their programs."""
    softmax_passes: float = 4.5
    """attention=unfused: passes over the scores besides those of the products: softmax and dropout, each reading and
    writing, and a mask of one byte."""
    cast_bytes: float = 3.0
    """fp8, fp4: bytes that are moved for each number of an operand to turn it into 8 bits (read two, write one)."""
    tp_hidden: float = 0.0
    """Share of tensor-parallel traffic that travels while matrix products run (user buffers, AsyncTP)."""
    dp_overlaps: bool = True
    """Whether gradients are reduced, and parameters gathered, while other layers compute."""
    pp_overlaps: bool = True
    """Whether stage boundaries travel while other micro-batches compute."""
    pp_scatters: bool = False
    """Tensor ranks each send a part of a stage boundary and gather it on the other side (Narayanan et al. 2021,
    section 4.1), without sp, where they hold parts already."""
    ep_once: bool = False
    """A token travels once to each node that has some of its experts (DeepEP, HybridEP), not once an expert."""
    messages: int = 1
    """zero 3: collectives a block in which its state travels; a program that gathers each parameter by itself needs one
    for each."""
    ep_folds: bool = False
    """Expert ranks lie next to each other, tensor ranks among them, and hold whole experts (Megatron Core's parallel
    folding, Liu et al. 2025); otherwise tensor ranks share every expert."""
    gathers_narrow: bool = False
    """fp8: parameters are gathered in 8 bits."""
    sum_passes: float = 0.0
    """Times that adding a micro-batch's gradients to those before goes over them: 3 reads two and writes one; 0 where
    `slowdown` has it."""
    interference: float = 1.1
    """What a product takes longer while a collective runs beside it (Galvatron measured 1.13)."""
    spread: tuple[float, float] = (0.91, 1.23)
    """Measured over predicted time, the tenth and the ninetieth of a hundred: of 765 published steps, calibrated or not
    (docs/accuracy.md)."""
    memory_spread: tuple[float, float] = (0.95, 1.05)
    """The same for memory, of 100 published figures."""
    memory_profile: MemoryProfile = field(default_factory=MemoryProfile)
    """What it keeps in memory."""

    def block_slowdown(self, kind: BlockKind) -> float:
        """Returns the time of a block's kernels beside that of the same kernels alone."""
        return self.slowdown * (self.moe_slowdown if kind.feed_forward == "experts" else 1.0)
