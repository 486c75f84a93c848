"""AdamW (Loshchilov & Hutter 2019, algorithm 2): torch's fused kernel."""

from __future__ import annotations

import torch

from phalanx.config.optimizer import Optimizer
from phalanx.train.optimizers.rule import Groups


def adamw(groups: Groups, config: Optimizer) -> torch.optim.Optimizer:
    """Returns torch's AdamW, which decays the weights by lr × weight_decay."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
