"""The micro-batches that a pipeline rank has in flight, read off the schedule's own program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from phalanx.config.layout import Layout
from phalanx.partition.pipeline import is_file, schedule_of
from phalanx.schedule import catalogue
from phalanx.schedule.schedule import Schedule


class Deferring(NamedTuple):
    """Micro-batches of one pipeline rank just before a backward pass or after a forward one, per stage of the rank,
    where some wait for their weight gradients."""

    in_flight: tuple[float, ...]
    """Those whose gradients of inputs are not computed yet."""
    deferred: tuple[float, ...]
    """Those of which only weight gradients are left to compute."""


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
    deferred: tuple[float, ...] = ()
    """Most micro-batches per stage that wait for their weight gradients alone; empty if backward passes are whole."""
    unread: tuple[tuple[float, ...], ...] = ()
    """As `most`, but only those whose backward pass has not begun; empty if backward passes are whole."""
    later: tuple[tuple[float, ...], ...] = ()
    """As `most`, just before backward passes of micro-batches for which every stage of the rank has gradients already;
    empty without any."""
    later_losses: float = 1.0
    """As `losses`, at these moments."""
    deferring: tuple[Deferring, ...] = ()
    """Micro-batches in flight at peaks of a rank that splits its backward passes; empty for others."""

    @property
    def joined(self) -> tuple[tuple[float, ...], ...]:
        """`deferring`, with both counts of each moment in one tuple."""
        return tuple(one.in_flight + one.deferred for one in self.deferring)


def flights(layout: Layout, micro_batches: int) -> tuple[Flight, ...]:
    """Returns the stages and in-flight micro-batches of each pipeline rank, with `micro_batches` per step.

    Raises JobError if their number does not fit the schedule, or if its file is none."""
    if layout.pp == 1:
        return (Flight((0,), ((1.0,),), 1),)
    name = layout.schedule
    if is_file(name):
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
        deferring=tuple(Deferring(grown(one.in_flight), one.deferred) for one in rank.deferring),
    )


@lru_cache(maxsize=4096)
def covering(every: tuple[Flight, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns for each rank the earlier ranks with as many stages, and at least as many micro-batches in flight."""
    found = list[set[int]]()
    for rank, one in enumerate(every):
        fuller = set[int]()
        for other in reversed(range(rank)):
            if other not in fuller and _covers(every[other], one):
                fuller |= {other, *found[other]}  # ranks that cover it cover this one too
        found.append(fuller)
    return tuple(tuple(sorted(fuller)) for fuller in found)


def _covers(one: Flight, other: Flight) -> bool:
    if len(one.held) != len(other.held):
        return False
    fronts = (one.most, other.most), (one.later, other.later), (one.joined, other.joined)
    return all(any(_within(b, a) for a in ones) for ones, others in fronts for b in others)


@lru_cache(maxsize=4096)
def _flights(name: str, pp: int, micro_batches: int, chunks: int, slices: int) -> tuple[Flight, ...]:
    schedule = schedule_of(Layout(schedule=name, pp=pp, pp_chunks=chunks, pp_slices=slices), micro_batches)
    return tuple(_flight(schedule, rank) for rank in range(schedule.ranks))


def _flight(schedule: Schedule, rank: int) -> Flight:
    held = schedule.stages_on(rank)
    places = {stage: place for place, stage in enumerate(held)}
    now, waiting, most_waiting = [0] * len(held), [0] * len(held), [0] * len(held)
    later, deferring, back = set[tuple[int, ...]](), set[tuple[int, ...]](), set[int]()
    logits = most_logits = later_logits = 0
    before = ""
    for kind, stage, _, _ in schedule.programs[rank]:
        if kind in ("B", "I"):
            if len(back) == len(held):
                later.add(tuple(now))
                later_logits = max(later_logits, logits)
            back.add(stage)
        if kind in ("B", "I") or before == "F":
            deferring.add((*(n - left for n, left in zip(now, waiting, strict=True)), *waiting))
        before = kind
        if stage == schedule.stages - 1:
            logits += (kind == "F") - (kind in ("B", "I"))
            most_logits = max(most_logits, logits)
        place = places[stage]
        now[place] += (kind == "F") - (kind in ("B", "W"))
        waiting[place] += (kind == "I") - (kind == "W")
        most_waiting[place] = max(most_waiting[place], waiting[place])
    visits = sum(placement.count(rank) for placement in schedule.placements)
    splits, slices = any(most_waiting), schedule.slices
    return Flight(
        held=tuple(held),
        most=_peaks(schedule, rank, ("B", "W")),
        stages=schedule.stages,
        share=visits / len(held) / len(schedule.placements),
        losses=most_logits / slices,
        deferred=tuple(n / slices for n in most_waiting) if splits else (),
        unread=_peaks(schedule, rank, ("B", "I")) if splits else (),
        later=_front(later, slices),
        later_losses=later_logits / slices,
        deferring=tuple(
            Deferring(one[: len(held)], one[len(held) :]) for one in _front(deferring if splits else (), slices)
        ),
    )


def _peaks(schedule: Schedule, rank: int, ends: tuple[str, ...]) -> tuple[tuple[float, ...], ...]:
    """Returns the micro-batches per stage of a rank, at each peak, between a forward action and one that `ends` it."""
    held = schedule.stages_on(rank)
    places = {stage: place for place, stage in enumerate(held)}
    now, peaks, more = [0] * len(held), set[tuple[int, ...]](), False
    for kind, stage, _, _ in schedule.programs[rank]:
        place = places[stage]
        if kind == "F":
            now[place] += 1
            more = True
        elif kind in ends:
            if more:  # a peak: the next action frees one
                peaks.add(tuple(now))
            now[place] -= 1
            more = False
    return _front(peaks, schedule.slices)


def _front(counts: Iterable[tuple[int, ...]], slices: int) -> tuple[tuple[float, ...], ...]:
    """Returns the counts that no others exceed everywhere, in micro-batches."""
    front = list[tuple[int, ...]]()
    for one in sorted(counts, reverse=True):  # a dominated one comes after the one that dominates it
        if not any(_within(one, other) for other in front):
            front.append(one)
    return tuple(tuple(n / slices for n in one) for one in front)


def _within(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(n <= m for n, m in zip(one, other, strict=True))
