"""The facts of a pipeline schedule besides its program: all that checking, prediction and planning need.

Facts are functions of P ranks, M micro-batches, V stages per rank (chunks) and rank r, in the letters of the papers.
probe.py compares each with the schedule's own programs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from phalanx.facts import stated
from phalanx.schedule.schedule import Schedule

MOST_ACTIONS = 10_000_000
"""Most actions of a schedule that is built; that many take 20 seconds and 1.2 GiB. The largest layouts of published
models have half as many: 126 stages with 16,384 micro-batches."""


class Size(NamedTuple):
    """The numbers that determine how many actions a schedule has."""

    ranks: int
    micro_batches: int
    chunks: int = 1
    slices: int = 1
    steps: int = 1

    def stages(self, entry: ScheduleEntry) -> int:
        return self.ranks * self.chunks // entry.directions

    def slots(self) -> int:
        """Returns the micro-batches per stage that generators visit, including those that only fill and drain."""
        return max(self.micro_batches, 2 * self.ranks)

    def actions(self, entry: ScheduleEntry) -> int:
        return self.stages(entry) * self.slots() * entry.passes * self.slices * self.steps


def too_large(name: str, entry: ScheduleEntry, size: Size) -> str:
    """Returns why a schedule of that size is not built, with the nearest legal choice; empty if it is small enough."""
    actions = size.actions(entry)
    if actions <= MOST_ACTIONS:
        return ""
    filling = f" to fill and drain {size.ranks:,} ranks" if size.slots() > size.micro_batches else ""
    factors = [
        f"{size.stages(entry):,} stages",
        f"{size.slots():,} micro-batches{filling}",
        f"{entry.passes} passes",
        *(f"{number:,} {what}" for what, number in (("slices", size.slices), ("steps", size.steps)) if number > 1),
    ]
    return (
        f"{name}: {' × '.join(factors)} = {actions:,} actions, the limit is {MOST_ACTIONS:,}; nearest legal: "
        f"{_legal(entry, size)}"
    )


def _legal(entry: ScheduleEntry, size: Size) -> str:
    """Returns the largest legal value of each number, the others unchanged; if none suffices alone, ranks and
    micro-batches with the schedule's defaults."""
    least = Size(entry.directions, entry.directions, entry.chunks[0])
    found = {field: _most(entry, size, field) for field in Size._fields}
    enough = [
        f"{number} {field.replace('_', '-')}" for field, number in found.items() if number >= getattr(least, field)
    ]
    if enough:
        return ", or ".join(enough)
    own = Size(size.ranks, 1, entry.chunks[0], entry.slices, entry.steps)
    ranks = _most(entry, own, "ranks")
    return f"{ranks} ranks with at most {2 * ranks} micro-batches"


def _most(entry: ScheduleEntry, size: Size, field: str) -> int:
    """Returns the largest legal value of a field up to its own; 0 if there is none."""
    numbers = range(1, min(getattr(size, field), MOST_ACTIONS) + 1)
    return bisect_right(numbers, MOST_ACTIONS, key=lambda number: size._replace(**{field: number}).actions(entry))


UNBOUNDED_CHUNKS = 1_000_000
"""Upper bound of schedules that take any number of stages per rank; more than any model has layers."""


def never(ranks: int, micro_batches: Any) -> Any:
    """Returns False: the closed form is a lower bound only."""
    return False


def nothing_refused(ranks: int, micro_batches: int, chunks: int) -> str:
    """Returns nothing: the schedule takes any numbers that its other facts allow."""
    return ""


@stated
@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule with the arguments it takes and its facts."""

    build: Callable[..., Schedule]
    """Builds the program for P and M, and for the keyword arguments `chunks`, `slices` and `steps` that it has."""
    title: str
    """One-line description for `phalanx schedule list`."""
    source: str
    """Paper and section."""
    in_flight: Callable[[int, int, int, int], int]
    """Lower bound on `Schedule.peak_live_activations`, in activations of a stage, from P, M, V and r."""
    idle: Callable[[int, Any, int, Any], Any]
    """Lower bound on the idle time of a step, from P, M, V and the forward pass's share of a micro-batch's time, in
    units of the time of one micro-batch on one rank (forward and backward). Ranks are equal and messages free. M and
    the share may be numpy arrays of one shape."""
    searched: bool
    """Whether the planner tries it if the schedule is left open."""
    idle_is_exact: Callable[[int, Any], Any] = never
    """Whether `idle` is exact for P ranks and M micro-batches; M may be a numpy array."""
    all_in_flight: bool = False
    """Whether every micro-batch is in flight before the first backward pass, however many there are."""
    seeds: bool = False
    """Whether the planner's search starts with it, because the others are seldom much better."""
    usual: bool = False
    """Whether it is common practice, with which the planner's report compares its choice."""
    chunks: tuple[int, int] = (1, 1)
    """Fewest and most stages per rank; the fewest are the default."""
    most_searched_chunks: int = 8
    """Most stages per rank that the planner tries: each further one adds messages and reduces the bubble less."""
    interleaves: str = ""
    """The schedule with one stage per rank that this one generalises, if any."""
    placement: Literal["round robin", "V", "both ways"] = "round robin"
    """Placement of stages on ranks (generators.py)."""
    slices: int = 1
    """Default number of slices of a sequence; 1: whole sequences only."""
    steps: int = 1
    """Default number of optimizer steps without a flush; 1: a flush at the end of every step."""
    stashes: bool = False
    """Whether each stage is updated after each micro-batch, with a version of its weights per micro-batch in flight."""
    splits: bool = False
    """Whether backward passes are split into I and W."""
    also_called: tuple[str, ...] = ()
    """Names in other frameworks, as lower-case letters and digits."""
    refuses: Callable[[int, int, int], str] = nothing_refused
    """Why it cannot be built for P, M and V, with the nearest legal choice; nothing if it can."""

    @property
    def directions(self) -> int:
        """Number of directions through the ranks, each with a copy of every stage."""
        return 2 if self.placement == "both ways" else 1

    @property
    def sliced(self) -> bool:
        """Whether it cuts sequences into slices."""
        return self.slices > 1

    @property
    def passes(self) -> int:
        """Number of actions of a stage per micro-batch: F and B, or F, I and W."""
        return 3 if self.splits else 2

    @property
    def takes_chunks(self) -> bool:
        """Whether the number of stages per rank is a choice."""
        return self.chunks[0] < self.chunks[1]

    @property
    def searched_chunks(self) -> range:
        """Numbers of stages per rank that the planner tries."""
        least, most = self.chunks
        return range(least, min(most, self.most_searched_chunks) + 1)

    def program(self, ranks: int, micro_batches: int, chunks: int = 0, slices: int = 0, steps: int = 0) -> Schedule:
        """Builds the schedule for `micro_batches` micro-batches per step; for chunks, slices or steps 0 stands for the
        schedule's default."""
        taken = dict[str, int]()
        if self.takes_chunks:
            taken["chunks"] = chunks or self.chunks[0]
        if self.sliced:
            taken["slices"] = slices or self.slices
        if self.steps > 1:
            taken["steps"] = steps or self.steps
        return self.build(ranks, micro_batches, **taken)

    def least_micro_batches(self, ranks: int) -> int:
        """Returns the fewest micro-batches per step: one per direction, or without a flush as many as ranks, because
        two versions of the weights would not suffice for fewer."""
        return ranks if self.steps > 1 else self.directions if ranks > 1 else 1

    def period(self, ranks: int) -> int:
        """Returns the micro-batches after which the program repeats itself once the pipeline is full."""
        return ranks * self.directions
