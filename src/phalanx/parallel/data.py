"""Data parallelism: each replica computes the gradients of its own samples, and they are summed.

`Replica` is one replica alone; `DDPReplica` is one of several processes (DistributedDataParallel: Li et al. 2020);
`ThreadReplicas` runs them all as threads of one process, the baseline that shows what one interpreter costs.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from phalanx.model.noise import Noise
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.objective import Objective


@dataclass(frozen=True)
class MicroTensors:
    """One micro-batch on the device."""

    tokens: Tensor
    """(micro_batch, seq_len), int64."""
    targets: Tensor
    """(micro_batch, seq_len), int64, IGNORE where a position does not count."""
    noise: Noise | None
    """What dropout masks derive from; None without dropout."""

    def part(self, chosen: slice) -> MicroTensors:
        """Some of its samples."""
        noise = self.noise and replace(self.noise, sample_ids=self.noise.sample_ids[chosen])
        return MicroTensors(self.tokens[chosen], self.targets[chosen], noise)


class Replica:
    """One process that computes a whole step by itself."""

    def __init__(self, objective: Objective):
        self.objective = objective

    def forward_backward(self, micro: MicroTensors, factor: float, *, last: bool) -> Tensor:
        """Add `factor` × the gradient of the micro-batch's summed loss to the parameters' .grad.

        Returns the loss summed over the micro-batch's tokens, detached. After the call with `last`, .grad holds the
        sum over all data ranks.
        """
        loss = self.objective(micro.tokens, micro.targets, micro.noise)
        (loss * factor).backward()
        return loss.detach()


class DDPReplica(Replica):
    """One of several replicas, each in its own process. Buckets are reduced while the backward pass goes on."""

    def __init__(self, objective: Objective, mesh: Mesh, bucket_mb: float):
        super().__init__(objective)
        self.ranks = mesh.sizes["dp_replicate"]
        # DDP broadcasts rank 0's parameters when it is built. gradient_as_bucket_view saves a copy of all gradients.
        self.ddp = DistributedDataParallel(
            objective,
            process_group=mesh.group("dp_replicate"),
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
        )

    def warm_up(self) -> None:
        """Run one tiny backward pass, so that DDP has ordered its buckets before the first step.

        It reorders them by the first pass's order of gradients. With three ranks and more the order of a ring's
        additions depends on a value's place in its bucket: a resumed run, whose first steps would still have the old
        order, would differ from an unbroken one in the last bits.
        """
        device = next(self.ddp.parameters()).device
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
        self.ddp(tokens, tokens).backward()
        self.ddp.zero_grad(set_to_none=True)

    def forward_backward(self, micro: MicroTensors, factor: float, *, last: bool) -> Tensor:
        self.ddp.require_backward_grad_sync = last  # what no_sync() does: accumulation sends nothing
        loss = self.ddp(micro.tokens, micro.targets, micro.noise)
        (loss * (factor * self.ranks)).backward()  # DDP averages over ranks; we want the sum
        return loss.detach()


class ThreadReplicas(Replica):
    """All replicas in one process, each a thread over its share of the micro-batch, on shared parameters."""

    def __init__(self, objective: Objective, replicas: int):
        super().__init__(objective)
        self.replicas = replicas
        share = max(1, torch.get_num_threads() // replicas)
        self.pool = ThreadPoolExecutor(replicas, "replica", initializer=torch.set_num_threads, initargs=(share,))

    def forward_backward(self, micro: MicroTensors, factor: float, *, last: bool) -> Tensor:
        size = len(micro.tokens)
        bounds = [size * i // self.replicas for i in range(self.replicas + 1)]
        parts = [micro.part(slice(a, b)) for a, b in itertools.pairwise(bounds) if b > a]
        run = super().forward_backward
        return torch.stack(list(self.pool.map(lambda part: run(part, factor, last=last), parts))).sum()
