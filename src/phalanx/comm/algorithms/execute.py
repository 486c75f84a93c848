"""Runs a collective program on torch tensors, over the point-to-point messages of any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.algorithms.program import CollectiveProgram, CollectiveStep, build, chunked, pairwise_all_to_all
from phalanx.launch.ranks import Ranks

Reduction = Literal["sum", "avg", "min", "max"]

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,  # divided once, at the end
    "min": torch.minimum,
    "max": torch.maximum,
}


def execute(
    program: CollectiveProgram, tensor: Tensor, reduction: Reduction = "sum", group: dist.ProcessGroup | None = None
) -> None:
    """Runs `program` as this rank of `group`, with `tensor` as the buffer; blocks until this rank is done.

    Args:
        program: the same on every rank of the group.
        tensor: any shape and dtype, contiguous, `program.sizes[rank]` elements; changed in place. Elements that are
            not part of this rank's result (the other chunks of a reduce-scatter) are undefined afterwards.
        reduction: how elements are combined; `avg` divides the sum by the ranks.
        group: None is the default group.

    Raises:
        ValueError: program, tensor and group do not match, or the reduction does not exist (such as the average of
            integers).
    """
    rank = dist.get_rank(group)
    _check(program, tensor, reduction, rank, dist.get_world_size(group))
    flat = tensor.view(-1)
    for step in program.steps:
        _take_part(step, rank, flat, _COMBINE[reduction], group)
    if reduction == "avg" and program.reduces:
        tensor.div_(program.ranks)


def all_to_all(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns chunk r of every rank's `tensor` on rank r, in rank order: (ranks · elements of chunk r,).

    The tensors have equally many elements; program.chunked divides them."""
    rank, ranks, n = dist.get_rank(group), dist.get_world_size(group), tensor.numel()
    program = pairwise_all_to_all(ranks, n)
    own = program.chunks[rank]
    buffer = tensor.new_empty(program.sizes[rank])
    buffer[:n] = tensor.reshape(-1)
    result = buffer[n:]
    result[rank * len(own) : (rank + 1) * len(own)] = buffer[own.start : own.stop]
    execute(program, buffer, group=group)
    return result


def matches_definition(ranks: Ranks, name: str, elements: int, settings: dict[str, int]) -> bool:
    """Runs the algorithm `name` on the default group, and returns whether this rank's result is that of its collective.

    The inputs are whole numbers, so that sums are exact. `settings` are those of catalogue.build."""
    program = build(name, ranks.world, elements, **settings)
    inputs = [torch.arange(elements) * ranks.world + rank for rank in range(ranks.world)]
    chunks, root = chunked(elements, ranks.world), settings.get("root", 0)
    own = chunks[ranks.rank]
    if name == "all-to-all":
        return torch.equal(all_to_all(inputs[ranks.rank]), torch.cat([x[own.start : own.stop] for x in inputs]))
    total = torch.stack(inputs).sum(dim=0)
    gathered = torch.cat([x[chunk.start : chunk.stop] for x, chunk in zip(inputs, chunks, strict=True)])
    everywhere, part = slice(None), slice(own.start, own.stop)
    at_root = everywhere if ranks.rank == root else slice(0, 0)
    results = {
        "all-reduce": (everywhere, total),
        "reduce-scatter": (part, total),
        "all-gather": (everywhere, gathered),
        "broadcast": (everywhere, inputs[root]),
        "reduce": (at_root, total),
        "gather": (at_root, gathered),
        "scatter": (part, inputs[root]),
    }
    place, expected = results[max((kind for kind in results if name.endswith(kind)), key=len)]
    result = inputs[ranks.rank].clone()
    execute(program, result)
    return torch.equal(result[place], expected[place])


def _take_part(
    step: CollectiveStep, rank: int, flat: Tensor, combine: Callable[..., Tensor], group: dist.ProcessGroup | None
) -> None:
    """Sends and receives this rank's messages of one step, then combines the received ones."""
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


def _check(program: CollectiveProgram, tensor: Tensor, reduction: str, rank: int, ranks: int) -> None:
    if reduction not in _COMBINE:
        raise ValueError(f"no reduction {reduction!r}; there are {', '.join(_COMBINE)}")
    if reduction == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the average of {tensor.dtype} is not defined; sum, or convert to a floating-point type")
    what, size = f"the program ({program.name})", program.sizes[rank] if rank < program.ranks else 0
    if program.ranks != ranks:
        raise ValueError(f"{what} is for {program.ranks} ranks, the group has {ranks}")
    if tensor.numel() != size:
        raise ValueError(f"{what} is for {size} elements on rank {rank}, the tensor has {tensor.numel()}")
    if not tensor.is_contiguous():
        raise ValueError(f"the tensor is changed in place, so it must be contiguous; its strides are {tensor.stride()}")
