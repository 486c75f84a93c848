"""Checks that every collective of an axis gives exact values, for several types, sizes and placements of tensors."""

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
from phalanx.launch.lost_peer import TEXTS
from phalanx.selftest.calls import ALL, AxisCollective, averages_fit_bf16
from phalanx.units import counted

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
        """Returns the sentence for the user."""
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
    """The checks of one axis, of all its ranks."""

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
    mine = _Checks(axis, name, device)
    for collective in ALL:
        for dtype, n, form in _cases(collective, axis.size):
            mine.check(collective, dtype, n, form)
        tick()
    mine.check_barrier()
    tick()
    return _combine(name, axis.size, mine)


def _cases(collective: AxisCollective, ranks: int) -> Iterator[tuple[str, int, Form]]:
    parts = ranks if collective.by_parts else 1
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
    """A tensor of some values in one of the forms."""

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
        """Returns how many elements beside the tensor have changed."""
        if not self.around.numel():
            return 0
        return int((self.around.cpu()[self.beside] != _MARK).sum())


class _Checks:
    """One rank's checks of an axis."""

    def __init__(self, axis: Axis, name: str, device: torch.device):
        self.axis, self.name, self.device = axis, name, device
        self.rank, self.host = dist.get_rank(), platform.node()
        self.checked, self.wrong_count = 0, 0
        self.wrong: list[WrongResult] = []
        self.refused: dict[str, str] = {}
        self.needed: set[str] = set()
        """Those of `refused` that training makes."""
        self.limits: set[str] = set()
        self._known: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def check(self, collective: AxisCollective, dtype: str, n: int, form: Form) -> None:
        """Makes one call, and compares its result."""
        inputs, expected = self._values(collective, n)
        # gloo has only some of its collectives for GPU tensors; an axis brings its own through host memory.
        device = torch.device("cpu") if self.axis.gloo and not collective.of_axis else self.device
        x = _Placed(inputs, TYPES[dtype], device, form)
        out = x if collective.in_place else _Placed(torch.zeros_like(expected), TYPES[dtype], device, form)
        try:
            collective.make(self.axis, x.tensor, out.tensor)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            if any(text in str(error) for text in TEXTS):
                raise  # a peer is gone: no refusal
            kind = "" if form == "plain" else f", {form}"
            what = f"{collective.name} ({dtype}{kind})"
            self.refused[what] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            if collective.of_axis and form in ("plain", "view"):
                self.needed.add(what)
            return
        if expected.numel() == 0 and n:
            return  # no result on this rank
        self.checked += 1
        got = out.tensor.reshape(-1).cpu().to(torch.float64)
        exact = expected.to(torch.float64)
        # An average may be rounded by one unit in the last place.
        slack = 0.0 if collective.exact else torch.finfo(TYPES[dtype]).eps
        bad = ((got - exact).abs() <= slack * exact.abs()).logical_not().nonzero().flatten()
        beside = out.overwritten()
        if form == "strided" and (bad.numel() or beside):
            self.limits.add(collective.name)
        elif bad.numel():
            place = int(bad[0])
            self._wrong(collective, dtype, n, form, place, float(exact[place]), float(got[place]), bad.numel())
        elif beside:
            self._wrong(collective, dtype, n, form, -1, _MARK, _MARK, beside)

    def check_barrier(self) -> None:
        """Checks that no rank leaves a barrier before all have entered it, by a counter in the group's store."""
        store, key = dist.distributed_c10d._get_default_store(), f"phalanx/selftest/{self._line()}"
        store.add(key, 1)
        record = self.axis.calls.begin("barrier", torch.empty(0), waits=True)
        dist.barrier(self.axis.group)
        if record is not None:
            record.done()
        entered = store.add(key, 0)
        self.checked += 1
        if entered < self.axis.size:
            self.wrong_count += 1
            who = self.rank, self.host, self.name, "barrier", "ranks", self.axis.size, "plain"
            self.wrong.append(WrongResult(*who, 0, self.axis.size, entered, 1))

    def _line(self) -> str:
        assert self.axis.group is not None
        return f"{self.name}/{'-'.join(map(str, dist.get_process_group_ranks(self.axis.group)))}"

    def _values(self, collective: AxisCollective, n: int) -> tuple[Tensor, Tensor]:
        """Returns input and expected result, which are the same for all types."""
        key = collective.name, n
        if key not in self._known:
            place = self.axis.rank, self.axis.size, n
            self._known = {} if self._known and next(iter(self._known))[0] != collective.name else self._known
            self._known[key] = collective.inputs(*place), collective.expected(*place)
        return self._known[key]

    def _wrong(
        self, collective: AxisCollective, dtype: str, n: int, form: Form, place: int, exact: float, got: float, bad: int
    ) -> None:
        self.wrong_count += 1
        if len(self.wrong) < MOST_WRONG:
            who = self.rank, self.host, self.name, collective.name, dtype, n, form
            self.wrong.append(WrongResult(*who, place, exact, got, bad))


def _combine(name: str, ranks: int, mine: _Checks) -> AxisChecks:
    """Combines the checks of all ranks."""
    every: list[dict[str, Any]] = gather_json(
        {
            "wrong": [asdict(each) for each in mine.wrong],
            "count": mine.wrong_count,
            "checked": mine.checked,
            "refused": mine.refused,
            "needed": sorted(mine.needed),
            "limits": sorted(mine.limits),
        }
    )
    found = AxisChecks(name, ranks, max(theirs["checked"] for theirs in every))
    for theirs in every:
        found.wrong += [WrongResult(**each) for each in theirs["wrong"]]
        found.wrong_count += theirs["count"]
        found.refused |= theirs["refused"]
        found.limits = sorted({*found.limits, *theirs["limits"]})
    for what, text in found.refused.items():
        some = [rank for rank, theirs in enumerate(every) if what in theirs["refused"]]
        if len(some) < len(every):
            found.differs.append(f"{what} on {name}: only rank {', '.join(map(str, some[:8]))} refused it: {text}")
        elif any(what in theirs["needed"] for theirs in every):
            found.differs.append(f"{what} on {name}, which training makes: every rank refused it: {text}")
    return found
