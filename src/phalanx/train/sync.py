"""The message that independent replicas exchange when they synchronize: requests, or a problem."""

from __future__ import annotations

import torch

from phalanx.axes.catalogue import AXES_TABLE
from phalanx.comm.axis import Axis
from phalanx.config.job import Job
from phalanx.errors import NotFiniteError
from phalanx.parallel.compression import join, parts, spread
from phalanx.parallel.mesh import Mesh
from phalanx.partition.tensor_slices import STOP_MESSAGE_BYTES
from phalanx.registry import package_code
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.requests import NO_REQUESTS, Requests


def synchronize(replicas: Axis, device: torch.device, requests: Requests, problem: str) -> Requests:
    """Waits for all replicas. Returns the requests of any of them.

    A `problem` keeps its replica from continuing: all raise NotFiniteError with the first replica's."""
    message = (bytes([requests.stop + 2 * requests.save]) + problem.encode())[:STOP_MESSAGE_BYTES]
    mine = torch.zeros(STOP_MESSAGE_BYTES, dtype=torch.uint8)
    mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    every = torch.empty(replicas.size, STOP_MESSAGE_BYTES, dtype=torch.uint8, device=device)
    replicas.all_gather(every.view(-1), mine.to(device)).wait()
    rows = [row.tobytes() for row in every.cpu().numpy()]
    for replica, row in enumerate(rows):
        if text := row[1:].rstrip(b"\0").decode(errors="ignore"):
            raise NotFiniteError(f"replica {replica}, {text}")
    return Requests(stop=any(row[0] & 1 for row in rows), save=any(row[0] & 2 for row in rows))


State = dict[str, dict[str, torch.Tensor]]
"""Tensors of a shard's shape, by kind, then by the shard's name."""


class LocalSGD:
    """One rank's part: it averages its parameter shards with the ranks that hold the same ones in other replicas."""

    def __init__(self, job: Job, mesh: Mesh, optimizer: ShardedOptimizer, device: torch.device):
        self.every, self.steps = job.layout.sync_every, job.train.steps
        self.replicas = mesh.axis(job.layout.replica_axis)
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
        if not self.is_due(step):
            return NO_REQUESTS
        requests = synchronize(self.replicas, self.device, requests, self.problem)
        if any(value.numel() for value in self.values):
            self.agree()
            self.optimizer.write()
        return requests

    def is_due(self, step: int) -> bool:
        return not (step + 1) % self.every or step + 1 == self.steps

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


class AxisSync(LocalSGD):
    """Replicas along an axis of a package, which says when and how they agree."""

    def __init__(self, job: Job, mesh: Mesh, optimizer: ShardedOptimizer, device: torch.device):
        super().__init__(job, mesh, optimizer, device)
        self.name = job.layout.replica_axis
        options = getattr(job.layout.axes, self.name)
        self.every = AXES_TABLE[self.name].every(options)
        with package_code(f"axis {self.name!r} of {AXES_TABLE.owner(self.name)} failed"):
            self.merge = AXES_TABLE.code(self.name, "agree")

    @torch.no_grad()
    def agree(self) -> None:
        """Gives all replicas the same parameters, as the package's code does."""
        self.merge(self.replicas, self.values)


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
        self.move(gradient)

    @torch.no_grad()
    def move(self, gradient: torch.Tensor) -> None:
        """Takes the outer optimizer's step with the replicas' sum of what they have moved by."""
        gradient.div_(self.replicas.size)
        # Nesterov momentum in the form of torch.optim.SGD.
        self.momentum.mul_(self.decay).add_(gradient)
        self.anchor.sub_(gradient.add_(self.momentum, alpha=self.decay), alpha=self.lr)
        spread(self.anchor, self.values)

    def state_tensors(self) -> State:
        return {MOMENTUM: dict(zip(self.optimizer.masters, parts(self.momentum, self.values), strict=True))}

    def reload(self) -> None:
        self.anchor = join(self.values)
