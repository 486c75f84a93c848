"""Micro-batches in flight on each rank of a pipeline, at the moments of a step that its memory depends on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from operator import le, sub
from typing import Any, NamedTuple

from phalanx.config.layout import Layout
from phalanx.partition import derived
from phalanx.schedule import catalogue
from phalanx.schedule.schedule import Schedule


class Deferring(NamedTuple):
    """Micro-batches of one pipeline rank just before a backward pass or after a forward one, per stage of the rank,
    where some wait for their weight gradients."""

    in_flight: tuple[float, ...]
    """Those whose gradients of inputs are not computed yet."""
    deferred: tuple[float, ...]
    """Those of which only weight gradients are left to compute."""


class FetchedAhead(NamedTuple):
    """Blocks that FSDP2 has fetched ahead and that have not computed yet when a stage of a rank begins a pass."""

    backward: bool
    place: int
    """The stage's, among those of the rank."""
    firsts: frozenset[int]
    """Places of stages of which the first blocks are there: the stage before has fetched them in a forward pass."""
    lasts: frozenset[int]
    """Places of stages of which the last blocks are there: the stage after has fetched them in a backward pass."""

    def is_part_of(self, other: FetchedAhead) -> bool:
        """Returns whether all of it is there in `other`, too, which is of the same passes."""
        return self.firsts <= other.firsts and self.lasts <= other.lasts


class Flight(NamedTuple):
    """The stages and in-flight micro-batches of one pipeline rank."""

    held: tuple[int, ...]
    """The stages of the rank."""
    most: tuple[tuple[float, ...], ...]
    """Micro-batches in flight per stage of the rank, at each peak: several peaks if none has the most of every stage. A
    slice of a sequence counts as its share."""
    stages: int
    """Stages of the whole pipeline."""
    share: float = 1.0
    """Share of the micro-batches that pass each of its stages: half in a bidirectional pipeline."""
    losses: float = 1.0
    """Most micro-batches of which the rank with the last stage has logits at once."""
    unread: tuple[tuple[float, ...], ...] = ()
    """As `most`, but only those whose backward pass has not begun; empty if backward passes are whole."""
    later: tuple[tuple[float, ...], ...] = ()
    """As `most`, just before backward passes of micro-batches for which every stage of the rank has gradients already;
    empty without any."""
    later_losses: float = 1.0
    """As `losses`, at these moments."""
    deferring: tuple[Deferring, ...] = ()
    """Micro-batches in flight at peaks of a rank that splits its backward passes; empty for others."""
    final: tuple[tuple[float, ...], ...] = ()
    """Micro-batches in flight per stage when each stage of the rank begins its last backward pass."""
    ahead: tuple[FetchedAhead, ...] = ()
    """What ZeRO-3 has fetched ahead for stages of the rank when their passes begin, less what another pass of the same
    stage has as a part; empty for a rank with one stage."""

    @property
    def joined(self) -> tuple[tuple[float, ...], ...]:
        """`deferring`, with both counts of each moment in one tuple."""
        return tuple(one.in_flight + one.deferred for one in self.deferring)


def flights(layout: Layout, micro_batches: int) -> tuple[Flight, ...]:
    """Returns the stages and in-flight micro-batches of each pipeline rank, with `micro_batches` per step.

    Raises JobError if their number does not fit the schedule, or if its file is none."""
    if layout.pp == 1:
        return (Flight((0,), ((1.0,),), 1, final=((1.0,),)),)
    name = layout.schedule
    if derived.is_file(name):
        return _flights(name, layout.pp, 0, 0, 0)
    entry = catalogue.entry_of(name)
    # Longer programs repeat themselves: no more are in flight. What `later` lacks then is not asked for: while the most
    # are in flight, all stages have gradients.
    enough = 2 * entry.period(layout.pp)
    if entry.all_in_flight:
        built = min(micro_batches, enough)
        ranks = _flights(name, layout.pp, built, layout.pp_chunks, 0)
        return tuple(_with_more(rank, micro_batches - built) for rank in ranks)
    if micro_batches > enough:
        micro_batches = enough + (micro_batches - enough) % (2 * layout.pp)  # groups of pp end alike
    return _flights(name, layout.pp, micro_batches, layout.pp_chunks, layout.pp_slices)


def _with_more(rank: Flight, more: int) -> Flight:
    """Returns the rank with so many more micro-batches of a schedule that has all of them in flight at once."""

    def grown(counts: Iterable[float]) -> tuple[float, ...]:
        return tuple(n and n + more for n in counts)  # a stage without any has had all of its backward passes

    return rank._replace(
        most=tuple(map(grown, rank.most)),
        unread=tuple(map(grown, rank.unread)),
        losses=rank.losses and rank.losses + more,
        later=tuple(map(grown, rank.later)),
        later_losses=rank.later_losses and rank.later_losses + more,
        final=tuple(
            (*grown(one[:place]), one[place], *grown(one[place + 1 :])) for place, one in enumerate(rank.final)
        ),
        deferring=tuple(Deferring(grown(one.in_flight), one.deferred) for one in rank.deferring),
    )


@lru_cache(maxsize=4096)
def with_all_peaks(alike: tuple[Flight, ...]) -> Flight:
    """Returns the first of some ranks that hold the same, with the peaks of all: at its fullest moment it has as many
    micro-batches in flight as the fullest of them."""
    peaks: dict[str, Any] = {
        name: _front({counts for rank in alike for counts in getattr(rank, name)}, 1)
        for name in ("most", "unread", "later", "joined")
    }
    losses = {name: max(getattr(rank, name) for rank in alike) for name in ("losses", "later_losses")}
    final = tuple(
        tuple(map(max, zip(*counts, strict=True))) for counts in zip(*(one.final for one in alike), strict=True)
    )
    ahead = _not_parts({fetched for rank in alike for fetched in rank.ahead})
    return alike[0]._replace(deferring=_deferring(peaks.pop("joined")), final=final, ahead=ahead, **peaks, **losses)


def _deferring(joined: Iterable[tuple[float, ...]]) -> tuple[Deferring, ...]:
    """Returns moments from both of their counts in one tuple."""
    return tuple(Deferring(one[: len(one) // 2], one[len(one) // 2 :]) for one in joined)


@lru_cache(maxsize=4096)
def _flights(name: str, pp: int, micro_batches: int, chunks: int, slices: int) -> tuple[Flight, ...]:
    schedule = derived.schedule_of(Layout(schedule=name, pp=pp, pp_chunks=chunks, pp_slices=slices), micro_batches)
    return tuple(_flight(schedule, rank) for rank in range(schedule.ranks))


def _flight(schedule: Schedule, rank: int) -> Flight:
    program, held = schedule.programs[rank], schedule.stages_on(rank)
    places = {stage: place for place, stage in enumerate(held)}
    # Micro-batches per stage: in flight, until B or I, and between I and W.
    now, unread, waiting = ([0] * len(held) for _ in range(3))
    most, most_unread = set[tuple[int, ...]](), set[tuple[int, ...]]()
    later, deferring, back = set[tuple[int, ...]](), set[tuple[int, ...]](), set[int]()
    logits = most_logits = later_logits = 0
    last, splits = schedule.stages - 1, any(action[0] == "I" for action in program)
    final = dict[int, tuple[int, ...]]()
    # Whether a forward action came last, and since the last one that frees an activation.
    after = grown = grown_unread = False
    for kind, stage, _, _ in program:
        place = places[stage]
        if kind in ("B", "I"):
            final[stage] = tuple(now)
            if len(back) == len(held):
                later.add(tuple(now))
                later_logits = max(later_logits, logits)
            else:
                back.add(stage)
            if grown_unread:  # a peak: this action frees one
                most_unread.add(tuple(unread))
            unread[place] -= 1
            grown_unread = False
            logits -= stage == last
        if splits and (after or kind in ("B", "I")):
            deferring.add((*map(sub, now, waiting), *waiting))
        after = kind == "F"
        if after:
            if stage == last:
                logits += 1
                most_logits = max(most_logits, logits)
            now[place] += 1
            unread[place] += 1
            grown = grown_unread = True
        elif kind == "I":
            waiting[place] += 1
        else:
            if grown:
                most.add(tuple(now))
            grown = False
            now[place] -= 1
            waiting[place] -= kind == "W"
    visits = sum(placement.count(rank) for placement in schedule.placements)
    slices = schedule.slices
    return Flight(
        held=tuple(held),
        most=_front(most, slices),
        stages=schedule.stages,
        share=visits / len(held) / len(schedule.placements),
        losses=most_logits / slices,
        unread=_front(most_unread, slices) if splits else (),
        later=_front(later, slices),
        later_losses=later_logits / slices,
        final=tuple(tuple(n / slices for n in final[stage]) for stage in held),
        deferring=_deferring(_front(deferring, slices)),
        ahead=_fetched_ahead(schedule, rank) if len(held) > 1 else (),
    )


def _fetched_ahead(schedule: Schedule, rank: int) -> tuple[FetchedAhead, ...]:
    """Returns Flight.ahead. A stage's last blocks fetch the first ones of the rank's next stage, which wait for their
    forward pass, whatever comes before it; those that wait are fetched once."""
    places = {stage: place for place, stage in enumerate(schedule.stages_on(rank))}
    # Sets of places are the bits of a number: a program has thousands of passes and few such sets.
    firsts, lasts, most = 0, 0, len(places)
    found = set[tuple[bool, int, int, int]]()
    for kind, stage, _, _ in schedule.programs[rank]:
        if kind != "W":
            place, backward = places[stage], kind != "F"
            found.add((backward, place, firsts, lasts))
            firsts &= ~(1 << place)
            lasts &= ~(1 << place)
            if backward and place:
                lasts |= 1 << place - 1
            elif not backward and place + 1 < most:
                firsts |= 1 << place + 1

    def among(bits: int) -> frozenset[int]:
        return frozenset(place for place in range(most) if bits >> place & 1)

    return _not_parts({FetchedAhead(back, at, among(firsts), among(lasts)) for back, at, firsts, lasts in found})


def _not_parts(found: set[FetchedAhead]) -> tuple[FetchedAhead, ...]:
    """Returns those that are no part of others."""
    kept = dict[tuple[bool, int], list[FetchedAhead]]()
    for one in sorted(found, key=lambda each: len(each.firsts) + len(each.lasts), reverse=True):
        alike = kept.setdefault((one.backward, one.place), [])
        if not any(map(one.is_part_of, alike)):
            alike.append(one)
    return tuple(chain(*kept.values()))


def _front(counts: Iterable[tuple[float, ...]], slices: int) -> tuple[tuple[float, ...], ...]:
    """Returns the counts that no others exceed everywhere, in micro-batches."""
    front = list[tuple[float, ...]]()
    for one in sorted(counts, reverse=True):  # a dominated one comes after the one that dominates it
        for other in reversed(front):  # most likely a neighbour
            if all(map(le, one, other)):
                break
        else:
            front.append(one)
    return tuple(tuple(n / slices for n in one) for one in front)
