"""Stochastic gradient descent with momentum, also Nesterov's (Sutskever et al. 2013): torch's fused kernel."""

from __future__ import annotations

import torch

from phalanx.config.optimizer import Optimizer
from phalanx.train.optimizers.rule import Groups


def sgd(groups: Groups, config: Optimizer) -> torch.optim.Optimizer:
    """Returns torch's SGD. Its weight decay is a part of the gradient, and so of the momentum."""
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)
