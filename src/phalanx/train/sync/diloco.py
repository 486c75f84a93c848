"""DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1): local steps, then one outer step for all.

Every `layout.sync_every` steps each replica's difference from the common anchor counts as a gradient; their average
moves the anchor by SGD with Nesterov momentum; all replicas continue there. The inner optimizer's state
stays local.
"""

from __future__ import annotations

import torch

from phalanx.config.job import Job
from phalanx.parallel.mesh import Mesh
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.sync.flat import join, parts, spread
from phalanx.train.sync.local import LocalSGD, State

MOMENTUM = "outer_momentum"


class DiLoCo(LocalSGD):
    """Local SGD whose average is a gradient for an outer optimizer. Keeps two copies of the parameters: the anchor,
    which all replicas have right after a synchronization, and its momentum."""

    def __init__(self, job: Job, mesh: Mesh, optimizer: ShardedOptimizer, device: torch.device):
        super().__init__(job, mesh, optimizer, device)
        self.lr, self.decay = job.optimizer.outer_lr, job.optimizer.outer_momentum
        self.anchor = join(self.values)
        self.momentum = torch.zeros_like(self.anchor)

    @torch.no_grad()
    def agree(self) -> None:
        gradient = self.anchor - join(self.values)
        self.replicas.all_reduce(gradient).wait()
        gradient.div_(self.replicas.size)
        # Nesterov momentum in the form of torch.optim.SGD.
        self.momentum.mul_(self.decay).add_(gradient)
        self.anchor.sub_(gradient.add_(self.momentum, alpha=self.decay), alpha=self.lr)
        spread(self.anchor, self.values)

    def state_tensors(self) -> State:
        return {MOMENTUM: dict(zip(self.optimizer.masters, parts(self.momentum, self.values), strict=True))}

    def reload(self) -> None:
        self.anchor = join(self.values)
