"""Checks that every collective of an axis gives exact values, for several types, sizes and placements of tensors.

Every collective stands here in one form: what each rank contributes, how the call is made, and the exact result. Those
that training makes go through comm/axis.py, as in training; the rest are the backend's own.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.agree import gather_json
from phalanx.comm.axis import Axis
from phalanx.launch.verdict import TEXTS
from phalanx.units import counted

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
    whole: tuple[Literal["input", "result"], ...] = ()
    """Which of them are n elements from or for every rank."""
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


def _to_rank(rank: int, ranks: int, n: int) -> Tensor:
    return torch.cat([integers(other, ranks, n, rank * n) for other in range(ranks)])


def _sum(rank: int, ranks: int, n: int) -> Tensor:
    return total(ranks, n)


def _from(offset: int) -> Values:
    return lambda rank, ranks, n: integers((rank + offset) % ranks, ranks, n)


def _at_root(values: Values) -> Values:
    return lambda rank, ranks, n: values(rank, ranks, n) if rank == root(ranks) else torch.zeros(0, dtype=torch.int64)


def _average_scale(ranks: int) -> dict[str, int]:
    """Returns the scale of the contributions to an average: multiples of the number of ranks, in the range of bf16 if
    that is wide enough."""
    return {"unit": ranks, "exact": EXACT if averages_fit_bf16(ranks) else EXACT_WIDE}


def averages_fit_bf16(ranks: int) -> bool:
    """Returns whether an average over so many ranks is exact in bf16."""
    return 2 * ranks * ranks <= EXACT


def _backend(name: str, call: Make, inputs: Values, expected: Values, **more: Any) -> AxisCollective:
    """Returns a call of the backend itself, which is recorded for the watchdog, as those of an axis are."""

    def make(axis: Axis, x: Tensor, out: Tensor) -> None:
        # All ranks have to record the same shape: that of a rank's part.
        record = axis.calls.begin(name, out if name == "scatter" else x, waits=True)
        call(axis, x, out)
        if record is not None:
            record.done()

    return AxisCollective(name, make, inputs, expected, of_axis=False, **more)


def barrier(axis: Axis) -> None:
    """Waits for the ranks of an axis, and records that."""
    record = axis.calls.begin("barrier", torch.empty(0), waits=True)
    dist.barrier(axis.group)
    if record is not None:
        record.done()


def _parts(axis: Axis, x: Tensor) -> list[Tensor] | None:
    return list(x.view(axis.size, -1).unbind()) if axis.rank == root(axis.size) else None


def _neighbours(axis: Axis, x: Tensor, out: Tensor) -> None:
    """Sends to the next rank: first the even ranks, then the odd ones, so that no two messages cross."""
    for parity in (0, 1):
        if axis.rank % 2 == parity and axis.rank + 1 < axis.size:
            axis.send(x, axis.rank + 1)
        elif axis.rank % 2 != parity and axis.rank > 0:
            axis.receive(out, axis.rank - 1)


ALL = (
    AxisCollective("all_reduce", lambda axis, x, _: axis.all_reduce(x).wait(), _mine, _sum, in_place=True),
    AxisCollective(
        *("all_reduce_max", lambda axis, x, _: axis.all_reduce(x, dist.ReduceOp.MAX).wait(), _mine),
        lambda rank, ranks, n: extreme(ranks, n, largest=True),
        in_place=True,
    ),
    _backend(
        *("all_reduce_min", lambda axis, x, _: dist.all_reduce(x, dist.ReduceOp.MIN, group=axis.group), _mine),
        lambda rank, ranks, n: extreme(ranks, n, largest=False),
        in_place=True,
    ),
    _backend(
        *("all_reduce_avg", lambda axis, x, _: dist.all_reduce(x, dist.ReduceOp.AVG, group=axis.group)),
        lambda rank, ranks, n: integers(rank, ranks, n, **_average_scale(ranks)),
        lambda rank, ranks, n: total(ranks, n, **_average_scale(ranks)) // ranks,
        in_place=True,
        exact=False,
    ),
    _backend(
        *("reduce", lambda axis, x, _: dist.reduce(x, group=axis.group, group_dst=root(axis.size)), _mine),
        _at_root(_sum),
        in_place=True,
    ),
    AxisCollective(
        *("broadcast", lambda axis, x, _: axis.broadcast(x, root(axis.size)).wait(), _mine),
        lambda rank, ranks, n: integers(root(ranks), ranks, n),
        in_place=True,
    ),
    _backend(
        "scatter",
        lambda axis, x, out: dist.scatter(out, _parts(axis, x), group=axis.group, group_src=root(axis.size)),
        *(_at_root(_everyone), _mine),
        whole=("input",),
    ),
    _backend(
        "gather",
        lambda axis, x, out: dist.gather(x, _parts(axis, out), group=axis.group, group_dst=root(axis.size)),
        *(_mine, _at_root(_everyone)),
        whole=("result",),
    ),
    AxisCollective(
        "all_gather", lambda axis, x, out: axis.all_gather(out, x).wait(), _mine, _everyone, whole=("result",)
    ),
    AxisCollective(
        *("reduce_scatter", lambda axis, x, out: axis.reduce_scatter(out, x).wait(), _whole),
        lambda rank, ranks, n: total(ranks, n, rank * n),
        whole=("input",),
    ),
    AxisCollective(
        *("all_to_all", lambda axis, x, out: axis.all_to_all(out, x).wait(), _whole, _to_rank),
        whole=("input", "result"),
    ),
    AxisCollective("send", _neighbours, _mine, lambda rank, ranks, n: _from(-1)(rank, ranks, n if rank else 0)),
    AxisCollective("rotate", lambda axis, x, out: axis.rotate(out, x).wait(), _mine, _from(-1)),
    AxisCollective("shift", lambda axis, x, out: axis.shift(out, x, -1).wait(), _mine, _from(1)),
)
"""Every collective but the barrier, which has no values. `send` goes from each rank to the next; `rotate` does so while
the previous rank sends too, as in ring attention."""


TIMED_AS = {"send": "rotate"}
"""The cost model's `send` goes to the next rank while the previous one sends too, as in ring attention and a full
pipeline."""


def call_of(name: str, axis: Axis, nbytes: int, device: torch.device) -> Callable[[], Any]:
    """Returns one collective over a tensor of `nbytes` in fp32, to be timed; nothing on an axis of size 1."""
    if axis.size == 1:
        return lambda: None
    collective = next(each for each in ALL if each.name == TIMED_AS.get(name, name))
    if axis.gloo and not collective.of_axis:
        device = torch.device("cpu")
    part = max(1, nbytes // 4 // axis.size)

    def zeros(end: Literal["input", "result"]) -> Tensor:
        is_part = collective.whole and end not in collective.whole
        return torch.zeros(part if is_part else part * axis.size, device=device)

    x = zeros("input")
    out = x if collective.in_place else zeros("result")
    return lambda: collective.make(axis, x, out)


SIZES = (0, 1, 7, 1031, 40_009)
"""Elements of the whole tensor: none, odd numbers, and more than gloo's collectives treat as latency-bound."""
SHAPE = (24, 43)
"""Of tensors that are not contiguous."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64, "fp64": torch.float64}
MOST_WRONG = 8
"""Wrong results that a rank reports in detail."""

Form = Literal["plain", "view", "transposed", "strided"]
"""plain: a tensor of its own. view: a part of a larger one, at an odd offset, whose other elements must stay.
transposed: dense, but not in the order of its elements. strided: every second element of a larger tensor."""

_GUARD, _MARK = 3, -7


@dataclass(frozen=True)
class WrongResult:
    """A collective that gave a rank another value than the exact one."""

    rank: int
    host: str
    axis: str
    collective: str
    dtype: str
    elements: int
    form: Form
    place: int
    """Index of the first wrong element; -1: elements beside the tensor were overwritten."""
    expected: float
    got: float
    wrong: int
    """Number of wrong elements."""

    def line(self) -> str:
        name = self.collective.replace("_", "-")
        form = "" if self.form == "plain" else f" ({self.form})"
        what = f"{name} of {self.elements} × {self.dtype}{form} per rank on {self.axis}"
        where = f"rank {self.rank} ({self.host}): {what}"
        if self.place < 0:
            return f"{where}: wrote to {counted(self.wrong, 'element')} beside the tensor"
        return (
            f"{where}: element {self.place} is {self.got:g}, expected {self.expected:g} "
            f"({counted(self.wrong, 'wrong element')})"
        )


@dataclass
class AxisChecks:
    axis: str
    ranks: int
    checked: int = 0
    """Results that a rank compared; a root compares some more than the others, and counts here."""
    wrong: list[WrongResult] = field(default_factory=list)
    wrong_count: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """What the backend does not do, by collective, type and form, with its message."""
    limits: list[str] = field(default_factory=list)
    """Collectives that give wrong values for strided tensors, which the backend should refuse. Training sends none."""
    differs: list[str] = field(default_factory=list)
    """Calls that only some ranks refused, and those that training makes, if any rank refused them."""

    @property
    def ok(self) -> bool:
        return not self.wrong_count and not self.differs


def check_axis(axis: Axis, name: str, device: torch.device, tick: Callable[[], None]) -> AxisChecks:
    """Checks every collective of an axis. All ranks of the world call it; returns the same on each. `tick` is called
    after every collective."""
    mine = RankChecks(axis, name, device)
    for collective in ALL:
        for dtype, n, form in _cases(collective, axis.size):
            mine.check(collective, dtype, n, form)
        tick()
    mine.check_barrier()
    tick()
    return mine.of_all_ranks()


def _cases(collective: AxisCollective, ranks: int) -> Iterator[tuple[str, int, Form]]:
    parts = ranks if collective.whole else 1
    sizes = [-(-size // parts) for size in SIZES]
    for dtype in TYPES:
        if collective.name == "all_reduce_avg" and (
            dtype == "int64" or (dtype == "bf16" and not averages_fit_bf16(ranks))
        ):
            continue
        for n in sizes:
            yield dtype, n, "plain"
    for n in sizes[2:]:
        yield "fp32", n, "view"
    if collective.in_place:
        yield "fp32", SHAPE[0] * SHAPE[1], "transposed"
        yield "fp32", SHAPE[0] * SHAPE[1], "strided"


class _Placed:
    def __init__(self, values: Tensor, dtype: torch.dtype, device: torch.device, form: Form):
        n = values.numel()
        self.around = torch.zeros(0)
        if form == "view":
            self.around = torch.full((n + 2 * _GUARD,), _MARK, dtype=dtype, device=device)
            self.tensor = self.around[_GUARD : _GUARD + n]
            self.beside = torch.ones(n + 2 * _GUARD, dtype=torch.bool)
            self.beside[_GUARD : _GUARD + n] = False
        elif form == "strided":
            self.around = torch.full((2 * n,), _MARK, dtype=dtype, device=device)
            self.tensor = self.around[::2]
            self.beside = torch.arange(2 * n) % 2 == 1
        elif form == "transposed":
            self.tensor = torch.empty(SHAPE[1], SHAPE[0], dtype=dtype, device=device).t()
        else:
            self.tensor = torch.empty(n, dtype=dtype, device=device)
        self.tensor.copy_(values.view_as(self.tensor))

    def overwritten(self) -> int:
        if not self.around.numel():
            return 0
        return int((self.around.cpu()[self.beside] != _MARK).sum())


class RankChecks:
    def __init__(self, axis: Axis, name: str, device: torch.device):
        self.axis, self.device, self.found = axis, device, AxisChecks(name, axis.size)
        self.needed: set[str] = set()
        """The refused calls that training makes."""
        self._known: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def check(self, collective: AxisCollective, dtype: str, n: int, form: Form) -> None:
        found = self.found
        inputs, expected = self._values(collective, n)
        # gloo has only some of its collectives for GPU tensors; an axis brings its own through host memory.
        device = torch.device("cpu") if self.axis.gloo and not collective.of_axis else self.device
        x = _Placed(inputs, TYPES[dtype], device, form)
        out = x if collective.in_place else _Placed(torch.zeros_like(expected), TYPES[dtype], device, form)
        try:
            collective.make(self.axis, x.tensor, out.tensor)
        except (RuntimeError, ValueError, TypeError) as error:
            if any(text in str(error) for text in TEXTS):
                raise  # a peer is gone: no refusal
            what = f"{collective.name} ({dtype}{'' if form == 'plain' else f', {form}'})"
            found.refused[what] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            if collective.of_axis and form in ("plain", "view"):
                self.needed.add(what)
            return
        if expected.numel() == 0 and n:
            return  # no result on this rank
        found.checked += 1
        got = out.tensor.reshape(-1).cpu().to(torch.float64)
        exact = expected.to(torch.float64)
        # An average may be rounded by one unit in the last place.
        slack = 0.0 if collective.exact else torch.finfo(TYPES[dtype]).eps
        bad = ((got - exact).abs() <= slack * exact.abs()).logical_not().nonzero().flatten()
        beside = out.overwritten()
        if form == "strided" and (bad.numel() or beside):
            found.limits = sorted({*found.limits, collective.name})
        elif bad.numel():
            place = int(bad[0])
            values = place, float(exact[place]), float(got[place]), bad.numel()
            self._wrong(collective.name, dtype, n, form, *values)
        elif beside:
            self._wrong(collective.name, dtype, n, form, -1, _MARK, _MARK, beside)

    def check_barrier(self) -> None:
        """Checks that no rank leaves a barrier before all have entered it, by a counter in the group's store."""
        assert self.axis.group is not None
        ranks = "-".join(map(str, dist.get_process_group_ranks(self.axis.group)))
        store, key = dist.distributed_c10d._get_default_store(), f"phalanx/selftest/{self.found.axis}/{ranks}"
        store.add(key, 1)
        barrier(self.axis)
        entered = store.add(key, 0)
        self.found.checked += 1
        if entered < self.axis.size:
            self._wrong("barrier", "ranks", self.axis.size, "plain", 0, self.axis.size, entered, 1)

    def of_all_ranks(self) -> AxisChecks:
        """Combines the checks of all ranks, which call it together."""
        every: list[dict[str, Any]] = gather_json({**asdict(self.found), "needed": sorted(self.needed)})
        found = AxisChecks(self.found.axis, self.axis.size, max(theirs["checked"] for theirs in every))
        for theirs in every:
            found.wrong += [WrongResult(**each) for each in theirs["wrong"]]
            found.wrong_count += theirs["wrong_count"]
            found.refused |= theirs["refused"]
            found.limits = sorted({*found.limits, *theirs["limits"]})
        for what, text in found.refused.items():
            some = [rank for rank, theirs in enumerate(every) if what in theirs["refused"]]
            where = f"{what} on {found.axis}"
            if len(some) < len(every):
                found.differs.append(f"{where}: only rank {', '.join(map(str, some[:8]))} refused it: {text}")
            elif any(what in theirs["needed"] for theirs in every):
                found.differs.append(f"{where}, which training makes: every rank refused it: {text}")
        return found

    def _values(self, collective: AxisCollective, n: int) -> tuple[Tensor, Tensor]:
        """Returns input and expected result, which are the same for all types."""
        key = collective.name, n
        if key not in self._known:
            place = self.axis.rank, self.axis.size, n
            self._known = {} if self._known and next(iter(self._known))[0] != collective.name else self._known
            self._known[key] = collective.inputs(*place), collective.expected(*place)
        return self._known[key]

    def _wrong(
        self, name: str, dtype: str, n: int, form: Form, place: int, exact: float, got: float, wrong: int
    ) -> None:
        self.found.wrong_count += 1
        if len(self.found.wrong) < MOST_WRONG:
            who = dist.get_rank(), platform.node(), self.found.axis
            self.found.wrong.append(WrongResult(*who, name, dtype, n, form, place, exact, got, wrong))
