"""Precisions: the type of parameters, activations and gradients, and fp16's loss scale."""

from __future__ import annotations

import torch

from phalanx.config.precision import FORMATS

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, each.torch) for name, each in FORMATS.items()}
"""The parameters' type, by `train.precision`."""


def needs_master_weights(dtype: torch.dtype) -> bool:
    """Returns whether the optimizer keeps fp32 copies: half precisions lose updates below 2^-8 (bf16) of a weight."""
    return dtype in (torch.bfloat16, torch.float16)


class LossScale:
    """fp16's gradients underflow below 6e-8: the loss is multiplied by a scale that is halved on overflow and doubled
    after `patience` steps without one (Micikevicius et al. 2018, section 3.2). Other precisions use 1."""

    def __init__(self, dtype: torch.dtype, initial: float = 2.0**16, patience: int = 1000):
        self.dynamic = dtype == torch.float16
        self.value = initial if self.dynamic else 1.0
        self.good_steps = 0
        self.patience = patience

    def overflow(self) -> bool:
        """Records a step with infinite gradients. Returns whether a smaller scale may help; the step is skipped."""
        self.good_steps = 0
        if not self.dynamic or self.value <= 1:
            return False
        self.value /= 2
        return True

    def fine(self) -> None:
        """Records a step with finite gradients."""
        self.good_steps += 1
        if self.dynamic and self.good_steps % self.patience == 0:
            self.value *= 2

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
