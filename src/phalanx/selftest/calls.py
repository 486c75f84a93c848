"""Every collective of an axis in one form: what each rank contributes, how the call is made, and the exact result.

Those that training makes go through comm/axis.py, as in training; the rest are the backend's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.axis import Axis

# Integers that ranks contribute to a collective. Every sum is exact, also in bf16, so results are compared exactly.
EXACT = 256
"""bf16 has 8 significant bits: integers up to 256, and sums of them that stay below, are exact."""
EXACT_WIDE = 2**22
"""The same for fp32, with room to spare."""
CONTRIBUTORS = 16
"""Most ranks that contribute to one element: with more, a sum would leave the exact range. Which ranks these are
differs from element to element, so all of them are tested."""


def integers(rank: int, ranks: int, n: int, start: int = 0, *, unit: int = 1, exact: int = EXACT) -> Tensor:
    """Returns elements `start` to `start + n` of a rank's contribution, int64 of shape (n,).

    They are multiples of `unit`, and the sum over the ranks of a group of `ranks` is below `exact`. Raises ValueError
    where there are no such numbers but 0.
    """
    sharers = min(ranks, CONTRIBUTORS)
    count = exact // (sharers * unit)
    if count < 2:
        raise ValueError(f"multiples of {unit} from {sharers} ranks do not stay below {exact}")
    place = torch.arange(start, start + n)
    apart = -(-ranks // CONTRIBUTORS)
    return (7 * place + 13 * rank) % count * unit * ((place + rank) % apart == 0)


def total(ranks: int, n: int, start: int = 0, *, unit: int = 1, exact: int = EXACT) -> Tensor:
    """Returns the sum of all ranks' contributions, int64 of shape (n,)."""
    found = torch.zeros(n, dtype=torch.int64)
    for rank in range(ranks):
        found += integers(rank, ranks, n, start, unit=unit, exact=exact)
    return found


def extreme(ranks: int, n: int, *, largest: bool) -> Tensor:
    """Returns the elementwise maximum or minimum of all ranks' contributions, int64 of shape (n,)."""
    found = integers(0, ranks, n)
    for rank in range(1, ranks):
        other = integers(rank, ranks, n)
        found = torch.maximum(found, other) if largest else torch.minimum(found, other)
    return found


Make = Callable[[Axis, Tensor, Tensor], Any]
"""Makes the call on this rank's axis with its input and a tensor for its output, and waits for the result."""
Values = Callable[[int, int, int], Tensor]
"""(rank on the axis, ranks, n) → int64 values."""


@dataclass(frozen=True)
class AxisCollective:
    """One collective over tensors of `n` elements per rank's part."""

    name: str
    make: Make
    inputs: Values
    """The rank's input."""
    expected: Values
    """The rank's result; empty where it receives nothing, as all ranks but the root of a reduce."""
    in_place: bool = False
    """The result replaces the input, where there is one."""
    by_parts: bool = False
    """The input or the result is n elements from or for every rank."""
    of_axis: bool = True
    """The call that training makes (comm/axis.py); otherwise the backend's own."""
    exact: bool = True
    """False: backends may round (an average is the sum of values that were divided, or the other way round)."""


def root(ranks: int) -> int:
    """Returns the rank of the axis that is the root of reduce, gather, scatter and broadcast: the last one, since a
    program that ignores the root takes the first."""
    return ranks - 1


def _mine(rank: int, ranks: int, n: int) -> Tensor:
    return integers(rank, ranks, n)


def _whole(rank: int, ranks: int, n: int) -> Tensor:
    return integers(rank, ranks, ranks * n)


def _everyone(rank: int, ranks: int, n: int) -> Tensor:
    return torch.cat([integers(other, ranks, n) for other in range(ranks)])


def _nothing() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


def _average_scale(ranks: int) -> dict[str, int]:
    """Returns the scale of the contributions to an average: multiples of the number of ranks, in the range of bf16 if
    that is wide enough."""
    return {"unit": ranks, "exact": EXACT if averages_fit_bf16(ranks) else EXACT_WIDE}


def averages_fit_bf16(ranks: int) -> bool:
    """Returns whether an average over so many ranks is exact in bf16."""
    return 2 * ranks * ranks <= EXACT


def _recorded(operation: str, call: Callable[[Axis, Tensor, Tensor], Any]) -> Make:
    """Returns a call of the backend that is recorded for the watchdog, as those of an axis are."""

    def make(axis: Axis, x: Tensor, out: Tensor) -> None:
        # All ranks have to record the same shape: that of a rank's part.
        record = axis.calls.begin(operation, out if operation == "scatter" else x, waits=True)
        call(axis, x, out)
        if record is not None:
            record.done()

    return make


def _reduced(op: dist.ReduceOp.RedOpType, operation: str) -> Make:
    return _recorded(operation, lambda axis, x, out: dist.all_reduce(x, op, group=axis.group))


def _gather(axis: Axis, x: Tensor, out: Tensor) -> None:
    mine = axis.rank == root(axis.size)
    parts = list(out.view(axis.size, -1).unbind()) if mine else None
    dist.gather(x, parts, group=axis.group, group_dst=root(axis.size))


def _scatter(axis: Axis, x: Tensor, out: Tensor) -> None:
    mine = axis.rank == root(axis.size)
    parts = list(x.view(axis.size, -1).unbind()) if mine else None
    dist.scatter(out, parts, group=axis.group, group_src=root(axis.size))


def _neighbours(axis: Axis, x: Tensor, out: Tensor) -> None:
    """Sends to the next rank: first the even ranks, then the odd ones, so that no two messages cross."""
    for parity in (0, 1):
        if axis.rank % 2 == parity and axis.rank + 1 < axis.size:
            axis.send(x, axis.rank + 1)
        elif axis.rank % 2 != parity and axis.rank > 0:
            axis.receive(out, axis.rank - 1)


def _from_before(rank: int, ranks: int, n: int) -> Tensor:
    return integers((rank - 1) % ranks, ranks, n)


def _from_after(rank: int, ranks: int, n: int) -> Tensor:
    return integers((rank + 1) % ranks, ranks, n)


def _at_root(values: Values) -> Values:
    return lambda rank, ranks, n: values(rank, ranks, n) if rank == root(ranks) else _nothing()


ALL = (
    AxisCollective(
        "all_reduce",
        lambda axis, x, out: axis.all_reduce(x).wait(),
        _mine,
        lambda rank, ranks, n: total(ranks, n),
        in_place=True,
    ),
    AxisCollective(
        "all_reduce_max",
        lambda axis, x, out: axis.all_reduce(x, dist.ReduceOp.MAX).wait(),
        _mine,
        lambda rank, ranks, n: extreme(ranks, n, largest=True),
        in_place=True,
    ),
    AxisCollective(
        "all_reduce_min",
        _reduced(dist.ReduceOp.MIN, "all_reduce_min"),
        _mine,
        lambda rank, ranks, n: extreme(ranks, n, largest=False),
        in_place=True,
        of_axis=False,
    ),
    AxisCollective(
        "all_reduce_avg",
        _reduced(dist.ReduceOp.AVG, "all_reduce_avg"),
        lambda rank, ranks, n: integers(rank, ranks, n, **_average_scale(ranks)),
        lambda rank, ranks, n: total(ranks, n, **_average_scale(ranks)) // ranks,
        in_place=True,
        of_axis=False,
        exact=False,
    ),
    AxisCollective(
        "reduce",
        _recorded("reduce", lambda axis, x, out: dist.reduce(x, group=axis.group, group_dst=root(axis.size))),
        _mine,
        _at_root(lambda rank, ranks, n: total(ranks, n)),
        in_place=True,
        of_axis=False,
    ),
    AxisCollective(
        "broadcast",
        lambda axis, x, out: axis.broadcast(x, root(axis.size)).wait(),
        _mine,
        lambda rank, ranks, n: integers(root(ranks), ranks, n),
        in_place=True,
    ),
    AxisCollective(
        "scatter",
        _recorded("scatter", _scatter),
        _at_root(_everyone),
        _mine,
        by_parts=True,
        of_axis=False,
    ),
    AxisCollective(
        "gather",
        _recorded("gather", _gather),
        _mine,
        _at_root(_everyone),
        by_parts=True,
        of_axis=False,
    ),
    AxisCollective(
        "all_gather",
        lambda axis, x, out: axis.all_gather(out, x).wait(),
        _mine,
        _everyone,
        by_parts=True,
    ),
    AxisCollective(
        "reduce_scatter",
        lambda axis, x, out: axis.reduce_scatter(out, x).wait(),
        _whole,
        lambda rank, ranks, n: total(ranks, n, rank * n),
        by_parts=True,
    ),
    AxisCollective(
        "all_to_all",
        lambda axis, x, out: axis.all_to_all(out, x).wait(),
        _whole,
        lambda rank, ranks, n: torch.cat([integers(other, ranks, n, rank * n) for other in range(ranks)]),
        by_parts=True,
    ),
    AxisCollective(
        "send",
        _neighbours,
        _mine,
        lambda rank, ranks, n: _from_before(rank, ranks, n) if rank else _nothing(),
    ),
    AxisCollective("rotate", lambda axis, x, out: axis.rotate(out, x).wait(), _mine, _from_before),
    AxisCollective("shift", lambda axis, x, out: axis.shift(out, x, -1).wait(), _mine, _from_after),
)
"""Every collective but the barrier, which has no values. `send` goes from each rank to the next; `rotate` does so while
the previous rank sends too, as in ring attention."""
