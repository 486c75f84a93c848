"""Exposed time: the duration of a step if devices, their hosts and the network work at the same time.

Every formula takes numbers or arrays: the planner bounds many layouts at once with the formulas that predict one
(plan/bounds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import log2
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.config.layout import Layout
from phalanx.cost.spec import Framework
from phalanx.partition.derived import is_file, schedule_of
from phalanx.schedule import catalogue
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.timing import Events, Timing, run, run_settled


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


def _has_array(first: Any, second: Any = None) -> bool:
    return isinstance(first, np.ndarray) or isinstance(second, np.ndarray)


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
    if _has_array(device, host):  # squares and roots are computed ten times as fast as powers
        return (((device**2) ** 2 + (host**2) ** 2) ** 0.5) ** 0.5
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
MOST_RUN = 256
"""Most micro-batches for which a program with messages is run without extrapolation."""
GRID = 32
"""Steps per micro-batch to which the shares of forward passes and of weight gradients are rounded, so that few programs
need to be run."""


class ComposedStep(NamedTuple):
    """The seconds of a step before its optimizer: numbers, or arrays with an element per layout."""

    busiest: Any
    """Row of the busiest rank."""
    passes: Any
    """Seconds of its micro-batches."""
    others: Any
    """Seconds of a micro-batch on another rank, on average: the unit of idle time."""
    forward: Any
    """Share of forward passes in a micro-batch, on average over ranks."""
    weights: Any
    """The same of weight gradients."""
    boundaries: Any
    """Exposed seconds of messages between stages."""
    state: Any
    """Exposed seconds of the state's collectives, once per step."""

    def seconds(self, idle: Any) -> Any:
        """Returns the sum, with so much idle time."""
        return self.passes + idle * self.others + self.boundaries + self.state


def compose(
    work: NDArray[np.float64],
    count: NDArray[Any],
    blocks: NDArray[Any],
    micro_batches: Any,
    once: Any,
    sent: Callable[[Any, bool], tuple[Any, Any, Any]],
    gathers: Any,
    layout: Layout,
    framework: Framework,
) -> ComposedStep:
    """Returns the step of a pipeline of `layout.pp` ranks. Of different ranks there are `count`, with so many `blocks`:
    a row each. Layouts, if there are several, are columns, and `layout` stands for the fields they share.

    Args:
        work: seconds of a micro-batch (RankTime.passes), by rank: forward and backward on the device, both for the
            host, and gradients of weights.
        once: seconds of a message from a stage to the next.
        sent: returns the seconds of gathering the state of a rank in so many messages, those of reducing it, and the
            interference of these with products; for ZeRO-3, or otherwise.
        gathers: whether ZeRO-3 gathers parameters in every pass, so that only the ends are exposed besides.
    """
    forward, backward, host_forward, host_backward, weights = work
    each = pass_seconds(forward, host_forward) + pass_seconds(backward, host_backward)
    busiest = each.argmax(0)
    place = (busiest, *np.indices(busiest.shape))
    slowest, whole, blocks = each[place], (count * each).sum(0), blocks[busiest]
    ahead = forward[place]
    around = late = 0.0
    if np.any(gathers):
        around = ends_of_blocks(*sent(np.maximum(1, blocks), True)[:2], blocks)
    if not np.all(gathers):
        gather, reduce, slowdown = sent(bucket_messages(blocks), False)
        overlaps = framework.dp_overlaps
        beside = 0.0 if framework.broadcasts else gather
        late = step_state(beside, reduce, ahead, slowest - ahead, blocks, slowdown, overlaps=overlaps) + gather - beside
    chunks, overlaps = catalogue.chunks_of(layout.schedule, layout.pp_chunks), framework.pp_overlaps
    return ComposedStep(
        busiest,
        micro_batches * slowest,
        (whole - slowest) / max(1, layout.pp - 1),
        (count * forward).sum(0) / whole,
        (count * weights).sum(0) / whole,
        boundaries(once, layout.pp, chunks, micro_batches, overlaps=overlaps) if layout.pp > 1 else 0.0,
        np.where(gathers, around, late),
    )


def on_grid(share: float) -> float:
    """Returns a share of a micro-batch in whole steps of the grid."""
    return round(share * GRID) / GRID


def geometric(share: float) -> float:
    """Returns a share of a micro-batch in steps of some percent, so that few programs need to be run; 0 for less than a
    thousandth."""
    return 2 ** (round(GRID * log2(share)) / GRID) if share > 1e-3 else 0.0


class Hops(NamedTuple):
    """The time of messages between pipeline ranks, in times of one micro-batch through one rank."""

    near: float = 0.0
    """Time of a message between ranks of a node."""
    far: float = 0.0
    together: int = 1
    """Consecutive pipeline ranks in one node."""
    blocks: bool = False
    """Whether the sender waits for the message."""

    def between(self, one: int, other: int) -> float:
        """Returns the time of a message from a pipeline rank to another."""
        return self.near if one // self.together == other // self.together else self.far


FREE = Hops()


def idle(layout: Layout, micro_batches: int, forward: float = 0.25, weights: float = 0.375, hops: Hops = FREE) -> float:
    """Returns the time of a step beyond the busiest rank's work, in times of one micro-batch through one rank (both
    passes), for equal ranks: p - 1 for 1F1B and free messages.

    `forward` and `weights` are the shares of forward passes and of weight gradients in it."""
    if layout.pp == 1:
        return 0.0
    if is_file(layout.schedule):
        shape = layout.schedule, layout.pp, micro_batches, layout.pp_chunks, layout.pp_slices
        return _run(*shape, forward, weights, hops)
    entry = catalogue.entry_of(layout.schedule)
    if hops == FREE and entry.idle_is_exact(layout.pp, micro_batches):
        chunks = catalogue.chunks_of(layout.schedule, layout.pp_chunks)
        return float(entry.idle(layout.pp, micro_batches, chunks, forward))
    if layout.pp > WIDEST:
        # Scaled from the same schedule with fewer ranks and as many micro-batches per rank.
        narrow = replace(layout, pp=WIDEST)
        fewer = max(1, round(micro_batches * WIDEST / layout.pp))
        return idle(narrow, fewer, forward, weights, hops) * (layout.pp - 1) / (WIDEST - 1)
    # Groups of pp micro-batches end alike: the remainder counts.
    period = 2 * layout.pp
    more = period + period + micro_batches % period
    shape, rest = (layout.schedule, layout.pp), (layout.pp_chunks, layout.pp_slices, forward, weights, hops)
    # Over slow links a program settles late: it is run as it is.
    if micro_batches <= more or (hops != FREE and micro_batches <= MOST_RUN):
        return _run(*shape, _legal(layout, micro_batches), *rest)
    least, most = (_run(*shape, _legal(layout, number), *rest) for number in (more - period, more))
    return most + (most - least) * (micro_batches - more) / period


NEGLIGIBLE = 0.01
"""Share of a step up to which messages between stages, one after the other, are not worth running the schedule."""


def messages_share(layout: Layout, micro_batches: Any, mean: Any, hop: Any) -> Any:
    """Returns the seconds of the messages between stages, of `hop` seconds each, one after the other, over those of the
    micro-batches, of `mean` seconds each on a rank."""
    chunks = catalogue.chunks_of(layout.schedule, layout.pp_chunks)
    return 2 * (micro_batches * chunks + layout.pp) * hop / (micro_batches * mean)


def window_seconds(
    layout: Layout, micro_batches: int, mean: float, forward: float, weights: float, hops: Hops
) -> float:
    """Returns the seconds of a schedule's micro-batches on equal ranks, which need `mean` seconds for each, with
    messages of the seconds in `hops`: those for which ranks wait because only so many are in flight are among them."""
    rounded = hops._replace(near=geometric(hops.near / mean), far=geometric(hops.far / mean))
    return (micro_batches + idle(layout, micro_batches, forward, weights, rounded)) * mean


UNEVEN = 1.05
"""Time of the slowest rank over the others' mean from which a schedule's program is run with the time of each stage, if
it splits backward passes (a slow rank hides their bubbles), or over slow links."""


def is_uneven(schedule: str, slowest: Any, others: Any) -> Any:
    """Returns whether `uneven_seconds` counts for ranks of so many seconds: a truth value, or one for each element."""
    entry = catalogue.SCHEDULES.get(schedule)
    return (slowest > UNEVEN * others) & (entry is not None and entry.splits)


def uneven_seconds(
    layout: Layout, micro_batches: int, stages: Sequence[tuple[float, float, float]], slowest: float, hops: Hops = FREE
) -> float:
    """Returns the seconds in which a schedule is run whose `stages` need so many seconds for a micro-batch: forward,
    backward, and gradients of weights; the slowest rank needs `slowest` for all of its own. Messages take the seconds
    of `hops`."""

    def seconds(number: int) -> float:
        events, more = _settled(layout, _legal(layout, number), costs_of, hops)
        schedule, costs = events.schedule, costs_of(events.schedule)
        last = ((began[-1], program[-1]) for began, program in zip(events.starts, schedule.programs, strict=True))
        end = max(began + costs[action.kind][action.stage] for began, action in last)
        return (end + more) / schedule.steps

    def costs_of(schedule: Schedule) -> dict[str, tuple[float, ...]]:
        forward, backward, weights = (
            tuple(one / schedule.slices for one in each) for each in zip(*stages, strict=True)
        )
        inputs = tuple(both - one for both, one in zip(backward, weights, strict=True))
        return {"F": forward, "B": backward, "I": inputs, "W": weights}

    period = 2 * layout.pp
    more = period + period + micro_batches % period
    if micro_batches <= more or (hops != FREE and micro_batches <= MOST_RUN):
        return seconds(micro_batches)
    # The first micro-batches in flight may hide which rank is slowest.
    most = seconds(more)
    return most + max((most - seconds(more - period)) / period, slowest) * (micro_batches - more)


def _legal(layout: Layout, micro_batches: int) -> int:
    """Returns the number itself, or the nearest above that the schedule accepts."""
    for number in range(micro_batches, micro_batches + 2 * layout.pp + 1):
        if not catalogue.problems(layout.schedule, layout.pp, number, layout.pp_chunks, layout.pp_slices):
            return number
    return micro_batches


@lru_cache(4096)
def _run(
    name: str, pp: int, micro_batches: int, chunks: int, slices: int, forward: float, weights: float, hops: Hops
) -> float:
    layout = Layout(pp=pp, schedule=name, pp_chunks=chunks, pp_slices=slices)
    inputs = 1 - forward - weights

    def costs_of(schedule: Schedule) -> dict[str, tuple[float, ...]]:
        each = max(map(schedule.forward_passes, range(pp))) / schedule.micro_batches
        costs = {"F": forward / each, "B": (1 - forward) / each, "I": inputs / each, "W": weights / each}
        return {kind: (cost,) * schedule.stages for kind, cost in costs.items()}

    events, more = _settled(layout, micro_batches, costs_of, hops)
    schedule = events.schedule
    timing = Timing(schedule, {kind: cost[0] for kind, cost in costs_of(schedule).items()}, events.starts)
    work = max(map(timing.work, range(pp))) * (micro_batches * schedule.steps / schedule.micro_batches if more else 1)
    return max(0.0, timing.duration + more - work) / schedule.steps


def _settled(
    layout: Layout, micro_batches: int, costs_of: Callable[[Schedule], Mapping[str, Sequence[float]]], hops: Hops
) -> tuple[Events, float]:
    """Returns what `run_settled` does for a layout's schedule, with the same costs on all ranks."""

    def run_one(schedule: Schedule) -> Events:
        messages = {pair: hops.between(*pair) / schedule.slices for pair in schedule.pairs} if hops != FREE else None
        return run(schedule, (costs_of(schedule),) * schedule.ranks, messages, blocking=hops.blocks)

    period = 0 if is_file(layout.schedule) else catalogue.entry_of(layout.schedule).period(layout.pp)
    return run_settled(partial(schedule_of, layout), micro_batches, period, run_one)
