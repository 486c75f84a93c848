"""AdamW (Loshchilov & Hutter 2019, algorithm 2), in one pass over memory."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from phalanx.config.job import Optimizer
from phalanx.train.optimizers.rule import ElementwiseRule, Groups, Numbers, Options, Tensors


def adamw(groups: Groups, config: Optimizer) -> AdamW:
    """Returns AdamW, which decays the weights by lr × weight_decay."""
    return AdamW(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})


def formula(w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Returns new weights and moments."""
    kept, rate, root, beta1, rest1, beta2, rest2, eps = (numbers[place] for place in range(8))
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    return w * kept - rate * m / (v.sqrt() / root + eps), m, v


class AdamW(ElementwiseRule):
    """m ← β1 m + (1 - β1) g, v ← β2 v + (1 - β2) g², w ← (1 - lr λ) w - lr m' / (√v' + ε), where m' and v' are divided
    by 1 - β^step."""

    kinds = ("exp_avg", "exp_avg_sq")
    formula = staticmethod(formula)
    has_fused = True

    def numbers(self, group: Options) -> list[float]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        rate, root = lr / (1 - beta1**self.count), sqrt(1 - beta2**self.count)
        return [1 - lr * group["weight_decay"], rate, root, beta1, 1 - beta1, beta2, 1 - beta2, group["eps"]]

    def fused(self, weights: Tensors, gradients: Tensors, state: list[Tensors], group: Options, **flags: Any) -> None:
        steps = [torch.full((), self.count, dtype=torch.float32, device=weights[0].device)] * len(weights)
        beta1, beta2 = group["betas"]
        numbers = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"]}
        torch.ops.aten._fused_adamw_.default(
            weights, gradients, *state, [], steps, **numbers, eps=group["eps"], amsgrad=False, maximize=False, **flags
        )
