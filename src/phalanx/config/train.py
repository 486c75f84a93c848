"""Settings of the training loop: steps, batch, precision, and how often it logs and validates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Train:
    """The training loop."""

    steps: int = 200
    """Optimizer steps."""
    global_batch: int = 0
    """Sequences per step over all ranks = micro-batch × accumulation × data ranks; 0 derives it from these."""
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    """Precision of parameters, activations and gradients; bf16 and fp16 keep fp32 master weights."""
    gradients: Literal["same", "fp32"] = "same"
    """Precision in which gradients are summed over ranks (and, in flat buckets, over micro-batches): same as training,
    or
    fp32, which takes twice the memory and traffic of bf16."""
    seed: int = 1337
    """Seed of weights, sample order and dropout, which derive from it by hashing."""
    compile: bool = False
    """Compile the blocks with torch.compile."""
    cpu_linear: Literal["auto", "mkl", "onednn"] = "auto"
    """Library for fp32 matrix products on a CPU; auto uses oneDNN on non-Intel processors with AVX-512."""
    deterministic: bool = False
    """Use deterministic kernels only (a CPU run is always deterministic)."""
    log_every: int = 10
    """Steps between log lines; every step goes to metrics.jsonl."""
    eval_every: int = 0
    """Steps between validations; 0 means only at the end."""
    eval_samples: int = 256
    """Sequences of the validation split read per validation (at most the whole split)."""
