"""Lion (Chen et al. 2023, algorithm 2): each weight moves by the rate, in the direction of an interpolated momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.config.job import Optimizer
from phalanx.train.optimizers.rule import ElementwiseRule, Groups, Numbers


def lion(groups: Groups, config: Optimizer) -> Lion:
    """Returns Lion with the job's betas."""
    return Lion(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})


def formula(w: Tensor, g: Tensor, m: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Returns new weights and momentum."""
    kept, lr, beta1, beta2, eps = (numbers[place] for place in range(5))
    direction = g + beta1 * (m - g)
    direction = torch.where(direction.abs() > eps, direction.sign(), 0)
    return w * kept - lr * direction, m + (1 - beta2) * (g - m)


class Lion(ElementwiseRule):
    """w ← w - lr (sign(β1 m + (1 - β1) g) + λ w), m ← β2 m + (1 - β2) g.

    Elements of the interpolation that are not above `eps` have no direction: the sign of a gradient that is zero except
    for rounding would differ from layout to layout."""

    kinds = ("exp_avg",)
    formula = staticmethod(formula)

    def numbers(self, group: dict[str, Any]) -> list[float]:
        lr = group["lr"]
        return [1 - lr * group["weight_decay"], lr, *group["betas"], group["eps"]]

    def update_chunk(self, w: Tensor, g: Tensor, state: list[Tensor], group: dict[str, Any]) -> None:
        if self.bad is not None:
            super().update_chunk(w, g, state, group)
            return
        # The formula in place: a third of the kernels.
        (m,), (kept, lr, beta1, beta2, eps) = state, self.numbers(group)
        direction = torch.lerp(g, m, beta1)
        torch.hardshrink(direction, eps, out=direction).sign_()
        w.mul_(kept).add_(direction, alpha=-lr)
        m.lerp_(g, 1 - beta2)
