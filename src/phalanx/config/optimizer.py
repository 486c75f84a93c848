"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.config.constraints import Above, AtLeast, Between, HalfOpen


@dataclass(frozen=True)
class Optimizer:
    """The optimizer with its options, and its learning rate. docs/techniques/optimizers.md says which reads what."""

    name: str = "adamw"
    """adamw, sgd, lion, muon, adamw8bit, or one that a package adds."""
    lr: Annotated[float, Above(0)] = 1e-3
    """Peak learning rate, before batch_scaling."""
    betas: Annotated[tuple[float, float], HalfOpen(0, 1)] = (0.9, 0.95)
    """adamw, adamw8bit: decay of the first and second moment; lion: of the step's interpolation and the momentum."""
    eps: Annotated[float, Above(0)] = 1e-8
    """Added to the root of the second moment; lion: elements that are not above it take no step."""
    momentum: Annotated[float, HalfOpen(0, 1)] = 0.9
    """sgd, muon: decay of the momentum; 0 for none."""
    nesterov: bool = False
    """sgd, muon: Nesterov's momentum."""
    newton_schulz: Literal["master", "bf16"] = "master"
    """muon: precision in which matrices are orthogonalised: that of the optimizer's weights, or bf16."""
    options: str = ""
    """Numbers for an optimizer that a package adds, such as rho=0.04,period=10."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.1
    """Decay of matrices and embeddings; biases and norms are not decayed."""
    clip: Annotated[float, AtLeast(0)] = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay of the rate after the warm-up; wsd holds it, then decays over the last decay_fraction."""
    warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Steps over which the rate rises linearly from 0."""
    decay_steps: Annotated[int, AtLeast(0)] = 0
    """Step at which the rate reaches its minimum; 0 means train.steps. A run that resumes with other train.steps
    keeps the step that it was."""
    decay_fraction: Annotated[float, Between(0, 1)] = 0.2
    """wsd: the share of decay_steps that decays (Hu et al. 2024, section 4)."""
    min_lr_ratio: Annotated[float, Between(0, 1)] = 0.1
    """The smallest rate, as a share of the peak."""
    outer_lr: Annotated[float, Above(0)] = 0.7
    """diloco: learning rate of the outer step (Douillard et al. 2023)."""
    outer_momentum: Annotated[float, HalfOpen(0, 1)] = 0.9
    """diloco: Nesterov momentum of the outer step; 0 makes it plain SGD."""
    batch_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the rate by global batch / base_batch (Goyal et al. 2017) or its square root (Krizhevsky 2014)."""
    base_batch: Annotated[int, AtLeast(0)] = 0
    """batch_scaling: the global batch, in sequences, for which lr was chosen."""
