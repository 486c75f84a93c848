"""A pipeline schedule as data: for each rank the list of its actions, in order.

The layers of a model are cut into stages 0 to S - 1; each rank holds one or more. Sends and receives are not listed:
they follow from the placement of the stages.

Beside it stand its facts: all that checking, prediction and planning need besides the program. They are functions of P
ranks, M micro-batches, V stages per rank (chunks) and rank r, in the letters of the papers. probe.py compares each with
the schedule's own programs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from phalanx.facts import stated

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One action of a rank, written as `2F7`, or with a slice of the sequence as `2F7.1`."""

    kind: Kind
    """F: forward pass. B: backward pass. I and W: its halves (Qi et al. 2023, section 2), the gradients of the stage's
    input, which the stage before waits for, and those of its weights, which no other rank needs."""
    stage: int
    micro: int
    """Index of the micro-batch."""
    slice: int = 0
    """Index of the slice of the sequence; 0 if sequences are whole."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}" + (f".{self.slice}" if self.slice else "")


action_of: Callable[[tuple[Any, ...]], Action] = partial(tuple.__new__, Action)
"""Creates an action from the tuple of all its fields: a planner builds millions of them."""


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank in one step (or, without a flush, in several steps)."""

    name: str
    placements: tuple[tuple[int, ...], ...]
    """For each direction, the rank that holds each stage. Only DualPipe has two directions: half of the micro-batches
    pass through the ranks in reverse, through second copies of the stages."""
    micro_batches: int
    programs: tuple[tuple[Action, ...], ...]
    """Actions of each rank, in order."""
    slices: int = 1
    """Slices that each sequence is cut into (TeraPipe: Li et al. 2021)."""
    steps: int = 1
    """Optimizer steps, each over an equal share of the micro-batches, that the program spans without a flush in between
    (PipeDream). 1: the optimizer runs when every micro-batch has returned."""

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @property
    def stages(self) -> int:
        return len(self.placements[0])

    @property
    def splits(self) -> bool:
        """Whether some backward passes are split into I and W."""
        return any(action.kind == "W" for program in self.programs for action in program)

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """Pairs of ranks, sender and receiver, between which messages pass."""
        neighbours = {pair for placement in self.placements for pair in itertools.pairwise(placement)}
        return {pair for one, other in neighbours if one != other for pair in ((one, other), (other, one))}

    def direction(self, micro: int) -> int:
        """Returns the placement that a micro-batch uses: equal shares of them, in order."""
        return micro * len(self.placements) // self.micro_batches

    def rank_of(self, stage: int, micro: int) -> int:
        """Returns the rank that computes a stage for a micro-batch."""
        return self.placements[self.direction(micro)][stage]

    def forward_passes(self, rank: int) -> int:
        """Returns the number of a rank's forward passes: each micro-batch passes every stage of its direction, in
        slices."""
        passes = Counter(map(self.direction, range(self.micro_batches)))
        stages = (passes[way] * placement.count(rank) for way, placement in enumerate(self.placements))
        return self.slices * sum(stages)

    def stages_on(self, rank: int) -> list[int]:
        """Returns the stages of a rank, in order."""
        return sorted({stage for placement in self.placements for stage, at in enumerate(placement) if at == rank})

    def peak_live_activations(self, rank: int, weights: Sequence[float] | None = None) -> float:
        """Returns the peak live activations of a rank, each activation of stage s weighted by weights[s] (default 1),
        from its F to the end of its B, or of its W if the backward pass is split."""
        live = peak = 0.0
        for kind, stage, _, _ in self.programs[rank]:
            weight = 1 if weights is None else weights[stage]
            if kind == "F":
                live += weight
                peak = max(peak, live)
            elif kind != "I":
                live -= weight
        return peak

    def needs(self, action: Action) -> Iterator[tuple[Action, ...]]:
        """Yields the actions that must precede an action, on any rank: of each group, any one."""
        kind, stage, micro, part = action
        if kind == "F":
            if stage > 0:
                yield (Action("F", stage - 1, micro, part),)
            if part > 0:
                yield (Action("F", stage, micro, part - 1),)
        elif kind == "W":
            yield (Action("I", stage, micro, part),)
        else:
            yield (Action("F", stage, micro, part),)
            if stage < self.stages - 1:
                yield Action("B", stage + 1, micro, part), Action("I", stage + 1, micro, part)
            # Later slices attend to this one, so their gradients of its keys come first.
            if part < self.slices - 1:
                yield Action("B", stage, micro, part + 1), Action("I", stage, micro, part + 1)


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
