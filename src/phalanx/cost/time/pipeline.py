"""Seconds of a pipeline: its slowest rank's work, and the idle time of warm-up and drain.

The idle time is the schedule's closed form (phalanx.schedule.entry), or else that of its own program
(phalanx.schedule.timing), run with few micro-batches: beyond a few per rank it is constant, or grows linearly with
their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from phalanx.config.layout import Layout
from phalanx.partition.pipeline import is_file, schedule_of
from phalanx.schedule import catalogue
from phalanx.schedule.timing import time

WIDEST = 16
"""Most pipeline ranks for which the program is run; beyond, idle time grows with p - 1."""
GRID = 32
"""Steps per micro-batch to which the shares of forward passes and of weight gradients are rounded, so that few programs
need to be run."""


def pipeline_seconds(
    layout: Layout, micro_batches: int, work: Sequence[float], forward: float, weights: float
) -> float:
    """Returns the seconds of a step of the pipeline, without messages.

    `work` is each rank's time per micro-batch, all its stages and both passes; `forward` and `weights` are its parts,
    on average over ranks, in forward passes and in weight gradients. If one rank is the slowest the others' warm-up and
    drain count with their own times: exact for 1F1B (tests/cost/test_pipeline_time.py)."""
    slowest = max(work)
    if len(work) == 1:
        return micro_batches * slowest
    others = (sum(work) - slowest) / (len(work) - 1)
    mean = sum(work) / len(work)
    first = round(forward / mean * GRID) / GRID
    second = round(weights / mean * GRID) / GRID
    return micro_batches * slowest + idle(layout, micro_batches, first, second) * others


def idle(layout: Layout, micro_batches: int, forward: float = 0.25, weights: float = 0.375) -> float:
    """Returns the time of a step beyond the busiest rank's work, in times of one micro-batch through one rank (both
    passes), for equal ranks and free messages: p - 1 for 1F1B.

    `forward` and `weights` are the shares of forward passes and of weight gradients in it."""
    if layout.pp == 1:
        return 0.0
    if is_file(layout.schedule):
        return _run(layout.schedule, layout.pp, micro_batches, layout.pp_chunks, layout.pp_slices, forward, weights)
    entry = catalogue.entry_of(layout.schedule)
    if entry.idle_is_exact(layout.pp, micro_batches):
        chunks = catalogue.chunks_of(layout.schedule, layout.pp_chunks)
        return float(entry.idle(layout.pp, micro_batches, chunks, forward))
    if layout.pp > WIDEST:
        # Scaled from the same schedule with fewer ranks and as many micro-batches per rank.
        narrow = replace(layout, pp=WIDEST)
        fewer = max(1, round(micro_batches * WIDEST / layout.pp))
        return idle(narrow, fewer, forward, weights) * (layout.pp - 1) / (WIDEST - 1)
    # Groups of pp micro-batches end alike: the remainder counts.
    period = 2 * layout.pp
    more = period + period + micro_batches % period
    shape, rest = (layout.schedule, layout.pp), (layout.pp_chunks, layout.pp_slices, forward, weights)
    if micro_batches <= more:
        return _run(*shape, _legal(layout, micro_batches), *rest)
    least, most = (_run(*shape, _legal(layout, number), *rest) for number in (more - period, more))
    return most + (most - least) * (micro_batches - more) / period


def _legal(layout: Layout, micro_batches: int) -> int:
    """Returns the number itself, or the nearest above that the schedule accepts."""
    for number in range(micro_batches, micro_batches + 2 * layout.pp + 1):
        if not catalogue.problems(layout.schedule, layout.pp, number, layout.pp_chunks, layout.pp_slices):
            return number
    return micro_batches


@lru_cache(4096)
def _run(name: str, pp: int, micro_batches: int, chunks: int, slices: int, forward: float, weights: float) -> float:
    layout = Layout(pp=pp, schedule=name, pp_chunks=chunks, pp_slices=slices)
    schedule = schedule_of(layout, micro_batches)
    actions = [len([1 for kind, *_ in program if kind == "F"]) for program in schedule.programs]
    each = max(actions) / schedule.micro_batches
    inputs = 1 - forward - weights
    costs = {"F": forward / each, "B": (1 - forward) / each, "I": inputs / each, "W": weights / each}
    return max(0.0, time(schedule, costs).bubble_time) / schedule.steps
