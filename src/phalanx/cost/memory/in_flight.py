"""The micro-batches that a pipeline rank has in flight, read off the schedule's own program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from phalanx.config.layout import Layout
from phalanx.partition.pipeline import is_file, schedule_of
from phalanx.schedule import catalogue
from phalanx.schedule.schedule import Schedule


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


def flights(layout: Layout, micro_batches: int) -> tuple[Flight, ...]:
    """Returns the stages and in-flight micro-batches of each pipeline rank, with `micro_batches` per step.

    Raises JobError if their number does not fit the schedule, or if its file is none."""
    if layout.pp == 1:
        return (Flight((0,), ((1.0,),), 1),)
    name = layout.schedule
    if is_file(name):
        return _flights(name, layout.pp, 0, 0, 0)
    entry = catalogue.entry_of(name)
    # Longer programs repeat themselves: no more are in flight.
    enough = 2 * entry.period(layout.pp)
    if entry.all_in_flight:
        ranks = _flights(name, layout.pp, min(micro_batches, enough), layout.pp_chunks, 0)
        return tuple(
            rank._replace(most=((float(micro_batches),) * len(rank.held),), losses=float(micro_batches))
            for rank in ranks
        )
    if micro_batches > enough:
        micro_batches = enough + (micro_batches - enough) % (2 * layout.pp)  # groups of pp end alike
    return _flights(name, layout.pp, micro_batches, layout.pp_chunks, layout.pp_slices)


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
    return len(one.held) == len(other.held) and all(any(_within(b, a) for a in one.most) for b in other.most)


@lru_cache(maxsize=4096)
def _flights(name: str, pp: int, micro_batches: int, chunks: int, slices: int) -> tuple[Flight, ...]:
    schedule = schedule_of(Layout(schedule=name, pp=pp, pp_chunks=chunks, pp_slices=slices), micro_batches)
    return tuple(_flight(schedule, rank) for rank in range(schedule.ranks))


def _flight(schedule: Schedule, rank: int) -> Flight:
    held = schedule.stages_on(rank)
    places = {stage: place for place, stage in enumerate(held)}
    now, peaks, more = [0] * len(held), set[tuple[int, ...]](), False
    logits = most_logits = 0
    for kind, stage, _, _ in schedule.programs[rank]:
        if stage == schedule.stages - 1:
            logits += (kind == "F") - (kind in ("B", "I"))
            most_logits = max(most_logits, logits)
        if kind == "F":
            now[places[stage]] += 1
            more = True
        elif kind != "I":
            if more:  # a peak: the next action frees one
                peaks.add(tuple(now))
            now[places[stage]] -= 1
            more = False
    front = list[tuple[int, ...]]()
    for one in sorted(peaks, reverse=True):  # a dominated peak comes after the one that dominates it
        if not any(_within(one, other) for other in front):
            front.append(one)
    visits = sum(placement.count(rank) for placement in schedule.placements)
    return Flight(
        held=tuple(held),
        most=tuple(tuple(n / schedule.slices for n in one) for one in front),
        stages=schedule.stages,
        share=visits / len(held) / len(schedule.placements),
        losses=most_logits / schedule.slices,
    )


def _within(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(n <= m for n, m in zip(one, other, strict=True))
