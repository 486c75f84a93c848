"""Exposed time: the duration of a step if devices, their hosts and the network work at the same time.

Every formula takes numbers or arrays: the planner bounds many layouts at once with the formulas that predict one
(plan/bounds.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from phalanx.config.layout import Layout
from phalanx.partition.derived import is_file, schedule_of
from phalanx.schedule import catalogue
from phalanx.schedule.timing import time


def larger(first: Any, second: Any) -> Any:
    """Returns the larger of two numbers, or of each pair of elements."""
    return np.maximum(first, second) if _has_array(first, second) else max(first, second)


def smaller(first: Any, second: Any) -> Any:
    """Returns the smaller of two numbers, or of each pair of elements."""
    return np.minimum(first, second) if _has_array(first, second) else min(first, second)


def rounded(number: Any) -> Any:
    """Returns the nearest whole number of a number, or of each element; halves go to even ones."""
    return np.round(number) if _has_array(number) else round(number)


def quotient(dividend: Any, divisor: Any) -> Any:
    """Returns one number divided by another, or element by element; 0 where the divisor is 0."""
    if not _has_array(dividend, divisor):
        return dividend / divisor if divisor else 0.0
    return np.divide(dividend, divisor, out=np.zeros(np.broadcast(dividend, divisor).shape), where=divisor != 0)


def _has_array(*numbers: Any) -> bool:
    return any(isinstance(number, np.ndarray) for number in numbers)


OVERLAP_EXPONENT = 4.0
"""Exponent of the power mean of a pass's times on device and host: 1 is their sum, infinity their maximum."""

BLOCKS_PER_MESSAGE = 4
"""Blocks whose gradients form one message if they are reduced once per step."""


def bucket_messages(blocks: Any) -> Any:
    """Returns the number of messages for the state of `blocks` blocks if it is sent once per step."""
    return larger(1, rounded(blocks / BLOCKS_PER_MESSAGE))


def pass_seconds(device: Any, host: Any) -> Any:
    """Returns the seconds of a pass that takes `device` seconds on the device and `host` seconds to launch. The host
    runs ahead of long kernels and falls behind short ones: between the maximum of both and their sum."""
    return (device**OVERLAP_EXPONENT + host**OVERLAP_EXPONENT) ** (1 / OVERLAP_EXPONENT)


def added(traffic: Any, work: Any, slowdown: Any) -> Any:
    """Returns the seconds that `traffic` seconds of messages add to the `work` that they overlap: the excess of the
    messages, and `slowdown` times the overlap."""
    return larger(0.0, traffic - work) + slowdown * smaller(traffic, work)


def block_state(
    gather: Any,
    regather: Any,
    reduce: Any,
    forward: Any,
    backward: Any,
    slowdown: Any,
    accumulation: Any,
    *,
    reshard: bool,
    local: bool,
    overlaps: bool,
) -> tuple[Any, Any]:
    """Returns the seconds that ZeRO-3 adds to a block's forward and backward pass, on average over micro-batches: its
    parameters are gathered in `gather` seconds, again in `regather` if they are resharded after the forward pass, and
    its gradients reduced in `reduce`, once per step if they accumulate `local`."""
    there = regather + (gather - regather) / accumulation if reshard else gather / accumulation
    back = regather * reshard + (reduce / accumulation if local else reduce)
    if not overlaps:
        return there, back
    return added(there, forward, slowdown), added(back, backward, slowdown)


def step_state(
    gather: Any, reduce: Any, forward: Any, backward: Any, blocks: Any, slowdown: Any, *, overlaps: bool
) -> Any:
    """Returns the seconds that gathering parameters and reducing gradients once per step add to one micro-batch's
    passes, which overlap all but the last bucket and the first block's parameters."""
    if not overlaps:
        return gather + reduce
    inside = 1 - 1 / larger(2, blocks)
    hidden, before = backward * inside, forward * inside
    late = larger(0.0, reduce - hidden) + larger(0.0, gather - before)
    beside = smaller(reduce, hidden) + smaller(gather, before)
    return larger(late, (gather + reduce) * (1 - inside)) + slowdown * beside


def ends_of_blocks(gather: Any, reduce: Any, blocks: Any) -> Any:
    """Returns the seconds that ZeRO-3 adds outside the blocks, once per step: the parameters of the first block and
    outside the blocks arrive before any computation."""
    return 2 * (gather + reduce) / larger(1, blocks)


def boundaries(once: Any, pp: int, chunks: int, micro_batches: Any, *, overlaps: bool) -> Any:
    """Returns the exposed seconds of messages between stages, of `once` seconds each: those of warm-up and drain, and
    without overlap those of every micro-batch."""
    ramps = 2 * (pp - 1) * once
    return ramps if overlaps else ramps + 2 * chunks * micro_batches * once


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
