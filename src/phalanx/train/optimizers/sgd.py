"""Stochastic gradient descent with momentum, also Nesterov's (Sutskever et al. 2013), in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.config.job import Optimizer
from phalanx.train.optimizers.rule import ElementwiseRule, Groups, Options, Tensors


def sgd(groups: Groups, config: Optimizer) -> SGD:
    """Returns SGD. Its weight decay is a part of the gradient, and so of the momentum."""
    return SGD(groups, {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov})


def formula(w: Tensor, g: Tensor, *state_and_numbers: Any) -> tuple[Tensor, ...]:
    """Returns new weights and momentum, if there is one."""
    *state, numbers = state_and_numbers
    lr, decay, momentum, ahead, last = (numbers[place] for place in range(5))
    g = g + decay * w
    if not state:
        return (w - lr * g,)
    m = momentum * state[0] + g
    return w - lr * (ahead * m + last * g), m


class SGD(ElementwiseRule):
    """m ← μ m + g + λ w, w ← w - lr m; with Nesterov w ← w - lr (μ m + g + λ w), without momentum w - lr (g + λ w)."""

    formula = staticmethod(formula)
    has_fused = True

    def __init__(self, groups: Groups, defaults: dict[str, Any]):
        super().__init__(groups, defaults)
        self.kinds = ("momentum_buffer",) if defaults["momentum"] else ()

    def numbers(self, group: Options) -> list[float]:
        momentum, nesterov = group["momentum"], group["nesterov"]
        return [group["lr"], group["weight_decay"], momentum, *((momentum, 1.0) if nesterov else (1.0, 0.0))]

    def fused(self, weights: Tensors, gradients: Tensors, state: list[Tensors], group: Options, **flags: Any) -> None:
        torch.ops.aten._fused_sgd_.default(
            weights,
            gradients,
            *(state or [[]]),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=False,
            **flags,
        )
