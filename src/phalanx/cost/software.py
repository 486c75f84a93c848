"""How a training program uses a machine: what the same layout costs more or less in another framework."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.cost.habits import Habits


@dataclass(frozen=True)
class Software:
    """A training program, as far as time and memory depend on it."""

    name: str = "phalanx"
    """What it is called in reports."""
    attention: Literal["flash", "unfused"] = "flash"
    """Whether attention is one kernel that keeps no scores, or products with a softmax between them in memory."""
    passes: float = 1.0
    """Memory-bound work (norms, activations, residuals, rotary) in multiples of reading and writing each operand once:
    1 where kernels are fused by hand or by a compiler, more where each operation is a kernel of its own."""
    kernel_us: float = 6.0
    """Time the host needs to launch a kernel, in microseconds: below it devices wait for their programs."""
    tp_hidden: float = 0.0
    """Share of tensor-parallel traffic that travels while matrix products run (user buffers, AsyncTP)."""
    dp_overlaps: bool = True
    """Whether gradients are reduced, and parameters gathered, while other layers compute."""
    pp_overlaps: bool = True
    """Whether stage boundaries travel while other micro-batches compute."""
    interference: float = 1.1
    """What a product takes longer while a collective runs beside it (Galvatron measured 1.13)."""
    habits: Habits = field(default_factory=Habits)
    """What it keeps in memory."""
