"""Runs a plan on torch tensors, over the point-to-point messages of any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.algorithms import direct
from phalanx.comm.algorithms.plan import CollectiveProgram, CollectiveStep

Reduction = Literal["sum", "avg", "min", "max"]

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,  # divided once, at the end
    "min": torch.minimum,
    "max": torch.maximum,
}


def execute(
    plan: CollectiveProgram, tensor: Tensor, reduction: Reduction = "sum", group: dist.ProcessGroup | None = None
) -> None:
    """Takes part in `plan` as this rank of `group`, with `tensor` as the buffer; blocks until this rank is done.

    Args:
        plan: the same on every rank of the group.
        tensor: any shape and dtype, contiguous, `plan.sizes[rank]` elements; changed in place. What the plan does not
            promise to this rank (the other chunks of a reduce-scatter) is undefined afterwards.
        reduction: how elements are combined; `avg` divides the sum by the ranks.
        group: None is the default group.

    Raises:
        ValueError: the plan, the tensor and the group do not belong together, or there is no such reduction (as
            the average of integers).
    """
    rank = dist.get_rank(group)
    _check(plan, tensor, reduction, rank, dist.get_world_size(group))
    flat = tensor.view(-1)
    for step in plan.steps:
        _take_part(step, rank, flat, _COMBINE[reduction], group)
    if reduction == "avg" and plan.reduces:
        tensor.div_(plan.ranks)


def all_to_all(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Chunk r of every rank's `tensor` (n elements everywhere, chunks as in plan.chunked), in the order of the ranks.

    Returns (ranks · elements of chunk r,) on rank r.
    """
    rank, ranks, n = dist.get_rank(group), dist.get_world_size(group), tensor.numel()
    plan = direct.all_to_all(ranks, n)
    own = plan.chunks[rank]
    buffer = tensor.new_empty(plan.sizes[rank])
    buffer[:n] = tensor.reshape(-1)
    result = buffer[n:]
    result[rank * len(own) : (rank + 1) * len(own)] = buffer[own.start : own.stop]
    execute(plan, buffer, group=group)
    return result


def _take_part(
    step: CollectiveStep, rank: int, flat: Tensor, combine: Callable[..., Tensor], group: dist.ProcessGroup | None
) -> None:
    """Sends and receive this rank's messages of one step, then combine what arrived."""
    operations = []
    arrivals = []
    for message in step.messages:
        if message.source == rank:
            sent = flat[message.span.start : message.span.stop]
            operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=message.target))
        if message.target == rank:
            place = flat[message.landing.start : message.landing.stop]
            landed = torch.empty_like(place) if message.action == "reduce" else place
            operations.append(dist.P2POp(dist.irecv, landed, group=group, group_peer=message.source))
            if message.action == "reduce":
                arrivals.append((place, landed))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for place, landed in arrivals:
        combine(place, landed, out=place)


def _check(plan: CollectiveProgram, tensor: Tensor, reduction: str, rank: int, ranks: int) -> None:
    if reduction not in _COMBINE:
        raise ValueError(f"no reduction {reduction!r}; there are {', '.join(_COMBINE)}")
    if reduction == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the average of {tensor.dtype} is not defined; sum, or convert to a floating-point type")
    if plan.ranks != ranks:
        raise ValueError(f"the plan ({plan.name}) is for {plan.ranks} ranks, the group has {ranks}")
    if tensor.numel() != plan.sizes[rank]:
        raise ValueError(
            f"the plan ({plan.name}) is for {plan.sizes[rank]} elements on rank {rank}, the tensor has {tensor.numel()}"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"the tensor is changed in place, so it has to be contiguous; its strides are {tensor.stride()}"
        )
