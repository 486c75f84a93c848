"""Local SGD (Stich 2019, "Local SGD converges fast and communicates little"): replicas train alone, then average.

Every `layout.sync_every` steps, and after the last, the replicas' parameters are averaged. In between they do not
communicate, not even a loss: requests and a loss that is not finite wait for the next synchronization. The
moments of the optimizer stay local. With plain SGD and sync_every=1 this would be bsp, as the average of steps is the
step of the average. With AdamW it is not, since its step is no linear function of the gradient.
"""

from __future__ import annotations

import torch

from phalanx.config.job import Job
from phalanx.parallel.mesh import Mesh
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.requests import NO_REQUESTS, Requests
from phalanx.train.sync.flat import join, spread
from phalanx.train.sync.synchronization import synchronize

State = dict[str, dict[str, torch.Tensor]]
"""Tensors of a shard's shape, by kind, then by the shard's name."""


class LocalSGD:
    """One rank's part: it averages its parameter shards with the ranks that hold the same ones in other replicas."""

    def __init__(self, job: Job, mesh: Mesh, optimizer: ShardedOptimizer, device: torch.device):
        self.every, self.steps = job.layout.sync_every, job.train.steps
        self.replicas = mesh.axis("dp_replicate")
        self.optimizer, self.device = optimizer, device
        # Half precisions average the fp32 masters: an average rounded to bf16 would lose most of a step.
        self.values = list(optimizer.masters.values())
        self.problem = ""

    def after_update(self, step: int, requests: Requests, problem: str) -> Requests:
        """Averages if it is due, after the optimizer's `step`-th update (from 0 on), or, with a `problem`, instead of
        it. Returns the `requests` of any replica, as far as known: none between synchronizations.

        Raises NotFiniteError on every rank, at the first synchronization after any replica's problem.
        """
        self.problem = self.problem or problem
        if (step + 1) % self.every and step + 1 != self.steps:
            return NO_REQUESTS
        requests = synchronize(self.replicas, self.device, requests, self.problem)
        if any(value.numel() for value in self.values):
            self.agree()
            self.optimizer.write()
        return requests

    @torch.no_grad()
    def agree(self) -> None:
        """Gives all replicas the same parameters."""
        mean = join(self.values)
        self.replicas.all_reduce(mean).wait()
        spread(mean.div_(self.replicas.size), self.values)

    def state_tensors(self) -> State:
        """Returns the state that a checkpoint must hold beside the optimizer's own, the same in all replicas."""
        return {}

    def reload(self) -> None:
        """Adopts the parameters loaded from a checkpoint."""
