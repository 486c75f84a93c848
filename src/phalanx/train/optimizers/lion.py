"""Lion (Chen et al. 2023, algorithm 2): each weight moves by the rate, in the direction of an interpolated momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.config.optimizer import Optimizer
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.train.optimizers.rule import Groups, UpdateRule, chunks


def lion(groups: Groups, config: Optimizer) -> torch.optim.Optimizer:
    """Returns Lion with the job's betas."""
    return Lion(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})


class Lion(UpdateRule):
    """w ← w - lr (sign(β1 m + (1 - β1) g) + λ w), m ← β2 m + (1 - β2) g.

    Elements of the interpolation that are not above `eps` have no direction: the sign of a gradient that is zero except
    for rounding would differ from layout to layout."""

    def update(self, parameter: Tensor, gradient: Tensor, shard: ParameterShard, group: dict[str, Any]) -> None:
        """Updates a shard's parameter and its momentum."""
        (beta1, beta2), lr, state = group["betas"], group["lr"], self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        for w, g, m in chunks(1, parameter, gradient, state["exp_avg"]):
            direction = torch.lerp(g, m, beta1)
            torch.hardshrink(direction, group["eps"], out=direction).sign_()
            w.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
            m.lerp_(g, 1 - beta2)
