"""The passes of a pipeline rank at which its memory may be fullest: micro-batches in flight, gradients, and blocks that
ZeRO-3 has fetched ahead."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from operator import add, le
from typing import Any, NamedTuple

from phalanx.config.layout import Layout
from phalanx.partition import derived
from phalanx.schedule import catalogue
from phalanx.schedule.schedule import Kind, Schedule

NONE, SENT, WHOLE = range(3)
"""Gradients of a stage: there are none yet; they are complete and have been sent; there are some, and more to come. In
the order of their bytes."""
Counts = tuple[float, ...]
"""Micro-batches, or states of gradients, by stage of the rank. A slice of a sequence counts as its share."""


class RankPeak(NamedTuple):
    """A pass of a pipeline rank: the end of a forward pass, or the beginning of a backward pass or one of its halves.
    The micro-batch at work is in flight."""

    kind: Kind
    place: int
    """The stage's, among those of the rank."""
    last: bool
    """Whether it completes the gradients of its stage."""
    gradients: tuple[int, ...]
    """NONE, SENT, or WHOLE, by stage of the rank."""
    in_flight: Counts
    """Micro-batches whose gradients of inputs are not computed yet."""
    deferred: Counts
    """Those of which only weight gradients are left to compute."""
    firsts: tuple[int, ...]
    """By stage, whether FSDP2 has fetched its first blocks ahead: the stage before has, in a forward pass."""
    lasts: tuple[int, ...]
    """By stage, whether its last blocks are there: the stage after has fetched them in a backward pass."""

    @property
    def begun(self) -> bool:
        """Whether any stage of the rank has gradients."""
        return any(self.gradients)

    @property
    def live(self) -> Counts:
        """Micro-batches of which a stage keeps activations."""
        return tuple(map(add, self.in_flight, self.deferred))


class Flight(NamedTuple):
    """The stages and in-flight micro-batches of one pipeline rank."""

    held: tuple[int, ...]
    """The stages of the rank."""
    peaks: tuple[RankPeak, ...]
    """Its passes, less those beside which another one has as much of everything."""
    most: tuple[Counts, ...]
    """Micro-batches in flight per stage of the rank, at each peak: several if none has the most of every stage."""
    stages: int
    """Stages of the whole pipeline."""
    share: float = 1.0
    """Share of the micro-batches that pass each of its stages: half in a bidirectional pipeline."""
    splits: bool = False
    """Whether the rank splits backward passes."""

    def __hash__(self) -> int:
        return hash((self.held, self.stages, self.most, len(self.peaks)))

    def losses(self, peak: RankPeak) -> float:
        """Returns the micro-batches of which the rank has logits at a peak."""
        return peak.in_flight[-1] if self.held[-1] == self.stages - 1 else 0.0


def flights(layout: Layout, micro_batches: int) -> tuple[Flight, ...]:
    """Returns the stages and in-flight micro-batches of each pipeline rank, with `micro_batches` per step.

    Raises JobError if their number does not fit the schedule, or if its file is none."""
    if layout.pp == 1:
        gradients, none = (WHOLE if micro_batches > 1 else NONE,), (0,)
        passes: tuple[tuple[Kind, bool], ...] = (("F", False), ("B", True))
        peaks = (RankPeak(kind, 0, last, gradients, (1.0,), (0.0,), none, none) for kind, last in passes)
        return (Flight((0,), tuple(peaks), ((1.0,),), 1),)
    name = layout.schedule
    if derived.is_file(name):
        return _flights(name, layout.pp, 0, 0, 0)
    entry = catalogue.entry_of(name)
    # Longer programs repeat themselves: they have the same peaks.
    enough = 3 * entry.period(layout.pp)
    if entry.all_in_flight:
        built = min(micro_batches, enough)
        ranks = _flights(name, layout.pp, built, layout.pp_chunks, 0)
        return tuple(_with_more(rank, micro_batches - built) for rank in ranks)
    if micro_batches > enough:
        micro_batches = enough + (micro_batches - enough) % (2 * layout.pp)  # groups of pp end alike
    return _flights(name, layout.pp, micro_batches, layout.pp_chunks, layout.pp_slices)


def _with_more(rank: Flight, more: int) -> Flight:
    """Returns the rank with so many more micro-batches of a schedule that has all of them in flight at once."""

    def grown(counts: Counts, place: int = -1) -> Counts:
        # A stage without any has had all of its backward passes, and that at `place` begins its last one.
        return tuple(n and n + more * (stage != place) for stage, n in enumerate(counts))

    peaks = (one._replace(in_flight=grown(one.in_flight, one.place if one.last else -1)) for one in rank.peaks)
    return rank._replace(peaks=tuple(peaks), most=tuple(map(grown, rank.most)))


@lru_cache(maxsize=4096)
def with_all_peaks(alike: tuple[Flight, ...]) -> Flight:
    """Returns the first of some ranks that hold the same, with the peaks of all: at its fullest moment it has as many
    micro-batches in flight as the fullest of them."""
    if len(alike) == 1:
        return alike[0]
    peaks = _fullest(chain.from_iterable(rank.peaks for rank in alike))
    return alike[0]._replace(peaks=peaks, most=_front(chain.from_iterable(rank.most for rank in alike)))


@lru_cache(maxsize=4096)
def without_fetched(rank: Flight) -> Flight:
    """Returns a rank whose stages fetch no blocks for each other: fewer of its peaks differ."""
    none = (0,) * len(rank.held)
    peaks = _fullest(one._replace(firsts=none, lasts=none) for one in rank.peaks)
    return rank._replace(peaks=peaks)


@lru_cache(maxsize=4096)
def _flights(name: str, pp: int, micro_batches: int, chunks: int, slices: int) -> tuple[Flight, ...]:
    schedule = derived.schedule_of(Layout(schedule=name, pp=pp, pp_chunks=chunks, pp_slices=slices), micro_batches)
    return tuple(_flight(schedule, rank) for rank in range(schedule.ranks))


def _flight(schedule: Schedule, rank: int) -> Flight:
    program, held = schedule.programs[rank], schedule.stages_on(rank)
    places, several = {stage: place for place, stage in enumerate(held)}, len(held)
    left = [0] * several
    """Passes that compute weight gradients, per stage."""
    for kind, stage, _, _ in program:
        left[places[stage]] += kind in ("B", "W")
    unread, waiting, gradients = [0] * several, [0] * several, [NONE] * several
    # A stage's last blocks fetch the first ones of the rank's next stage, which wait for their forward pass, whatever
    # comes before it; those that wait are fetched once.
    firsts, lasts = [0] * several, [0] * several
    # Tuples of the lists, which most passes leave as they are.
    states, counts, deferred, fetched = (0,) * several, (0,) * several, (0,) * several, (tuple(firsts), tuple(lasts))
    found = dict[tuple[Any, ...], None]()
    for kind, stage, _, _ in program:
        place, forward, finishes = places[stage], kind == "F", kind in ("B", "W")
        if forward:
            unread[place] += 1
            counts = tuple(unread)
        found[kind, place, finishes and left[place] == 1, states, counts, deferred, *fetched] = None
        if kind != "W":
            firsts[place] = lasts[place] = 0
            if forward and place + 1 < several:
                firsts[place + 1] = 1
            elif not forward and place:
                lasts[place - 1] = 1
            fetched = tuple(firsts), tuple(lasts)
            if not forward:
                unread[place] -= 1
                counts = tuple(unread)
        if kind in ("I", "W"):
            waiting[place] += 1 if kind == "I" else -1
            deferred = tuple(waiting)
        if finishes:
            left[place] -= 1
            if gradients[place] == NONE or not left[place]:
                gradients[place] = WHOLE if left[place] else SENT
                states = tuple(gradients)
    slices = schedule.slices
    peaks = [
        one._replace(
            in_flight=tuple(n / slices for n in one.in_flight), deferred=tuple(n / slices for n in one.deferred)
        )
        for one in _fullest(map(RankPeak._make, found))
    ]
    visits = sum(placement.count(rank) for placement in schedule.placements)
    return Flight(
        held=tuple(held),
        peaks=tuple(peaks),
        most=_front(one.live for one in peaks if one.kind == "F"),
        stages=schedule.stages,
        share=visits / len(held) / len(schedule.placements),
        splits=any(action.kind == "I" for action in program),
    )


def _fullest(peaks: Iterable[RankPeak]) -> tuple[RankPeak, ...]:
    """Returns the peaks of which no other one, of the same kind of pass of the same stage, has as much of everything.
    Of forward passes those before any backward pass are apart: messages to the next stages wait until then."""
    groups = dict[tuple[Kind, int, bool], dict[Counts, RankPeak]]()
    for one in peaks:
        sizes = *one.in_flight, *one.deferred, *one.gradients, *one.firsts, *one.lasts
        groups.setdefault((one.kind, one.place, one.last or (one.kind == "F" and one.begun)), {})[sizes] = one
    return tuple(group[sizes] for group in groups.values() for sizes in _front(group))


def _front(counts: Iterable[Counts]) -> tuple[Counts, ...]:
    """Returns the counts that no others exceed everywhere."""
    front = list[Counts]()
    for one in sorted(set(counts), reverse=True):  # a dominated one comes after the one that dominates it
        for other in reversed(front):  # most likely a neighbour
            if all(map(le, one, other)):
                break
        else:
            front.append(one)
    return tuple(front)
