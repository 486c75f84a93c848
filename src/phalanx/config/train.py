"""Settings of the training loop: steps, batch, precision, and how often it logs and validates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from phalanx.config.constraints import AtLeast
from phalanx.config.dpo import DpoOptions
from phalanx.config.profile import ProfileOptions

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
Fp8Scaling = Literal["rowwise", "tensorwise"]
FP8_ALIGNMENT = 16
"""Elements: torch._scaled_mm takes products whose inner dimension and whose columns are multiples of it."""


@dataclass(frozen=True)
class Train:
    """The training loop."""

    steps: Annotated[int, AtLeast(1)] = 200
    """Optimizer steps."""
    global_batch: Annotated[int, AtLeast(0)] = 0
    """Sequences per step over all ranks = micro-batch × accumulation × data ranks; 0: follows from the layout."""
    precision: Precision = "fp32"
    """Precision of parameters, activations and gradients; bf16 and fp16 keep fp32 master weights. fp8: bf16, with the
    matrix products of blocks in 8 bits."""
    fp8_scaling: Fp8Scaling = "rowwise"
    """precision=fp8: one scale per row of each factor, or one per tensor."""
    gradients: Literal["same", "fp32"] = "same"
    """Precision in which gradients are summed over ranks (and, in flat buckets, over micro-batches): that of training,
    or fp32 for twice the memory and traffic of bf16."""
    seed: Annotated[int, AtLeast(0)] = 1337
    """The one seed: weights, order of samples and dropout derive from it by hashing."""
    compile: bool | Literal["auto"] = "auto"
    """Compile blocks (once per kind), embedding, final norm and loss with torch.compile; it saves no logits in fp32.
    auto does on GPUs, where torch can."""
    cpu_linear: Literal["auto", "mkl", "onednn"] = "auto"
    """Library for fp32 matrix products on a CPU; auto uses oneDNN on non-Intel processors with AVX-512."""
    deterministic: bool = False
    """Ask torch for deterministic kernels only (a CPU run is deterministic anyway)."""
    log_every: Annotated[int, AtLeast(1)] = 10
    """Steps between log lines; every step goes to metrics.jsonl."""
    eval_every: Annotated[int, AtLeast(0)] = 0
    """Steps between validations; 0: only at the end."""
    eval_samples: Annotated[int, AtLeast(0)] = 256
    """Sequences of the validation split per validation (at most the whole split)."""
    dpo: DpoOptions = field(default_factory=DpoOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)
