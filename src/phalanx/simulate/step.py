"""Simulates one training step event by event: the schedule's program with the cost model's time of each stage, messages
between stages, the state's collectives beside the passes, and the optimizer.

One pipeline represents all, because replicas are equal; if one is slower, all wait for it. Within a pass the cost model
already combines computation, collectives of its axes and the host (cost/time/rank_time.py). The simulation adds the
order in time of passes, messages and the state's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

from phalanx.config.layout import Layout
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.partition.pipeline import is_file, schedule_of
from phalanx.schedule import catalogue
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.timing import Events, bubble_fraction, run
from phalanx.simulate.disturbance import Disturbance
from phalanx.simulate.stage_seconds import RankSeconds, rank_seconds
from phalanx.simulate.timeline import Span, Timeline

SETTLED_PERIODS, SETTLED_MICRO_BATCHES = 3, 64
"""Fewest micro-batches per direction, for each pipeline rank and in all, after which most schedules are periodic."""
EXTRAPOLATION_TOLERANCE = 1e-3
"""Relative difference up to which the two extrapolations count as equal."""


def simulate(spec: StepSpec, disturbance: Disturbance | None = None) -> Timeline:
    """Returns every span of the step. Raises JobError for layouts without such a step (`refusals`), or if the schedule
    does not match the number of micro-batches."""
    if problems := list(refusals(spec)):
        raise JobError(problems)
    return _Step(spec, _schedule(spec, spec.batch.accumulation), disturbance or Disturbance()).timeline()


def step_seconds(spec: StepSpec, disturbance: Disturbance | None = None) -> float:
    """Returns the seconds of a step, without its spans. For many micro-batches it is extrapolated from fewer, because
    schedules are periodic (the tests bound the difference). Raises as `simulate` does."""
    if problems := list(refusals(spec)):
        raise JobError(problems)
    disturbance = disturbance or Disturbance()
    m, pp, name = spec.batch.accumulation, spec.layout.pp, spec.layout.schedule
    # A schedule from a file states its number of micro-batches.
    period = 0 if is_file(name) else catalogue.SCHEDULES[name].period(pp)
    settled = period * max(SETTLED_PERIODS, ceil(SETTLED_MICRO_BATCHES / pp))
    while 0 < 2 * settled < m:
        fewer = settled + m % period
        if any(catalogue.problems(name, pp, n, spec.layout.pp_chunks) for n in (fewer - period, fewer)):
            break  # a schedule that takes this m, but not every m of its period
        least, most = _extrapolated(spec, disturbance, period, fewer)
        if most <= least * (1 + EXTRAPOLATION_TOLERANCE):
            return (least + most) / 2
        settled *= 2
    return _Step(spec, _schedule(spec, m), disturbance).seconds()


def _extrapolated(spec: StepSpec, disturbance: Disturbance, period: int, micro_batches: int) -> tuple[float, float]:
    """Returns a lower and an upper estimate of a step from `micro_batches` of them and a `period` fewer: every rank
    continues at its rate, or at the rate of its own work. They differ while the first micro-batches in flight hide that
    a rank is slower than the one that sets the pace."""
    shorter, longer = (_Step(spec, _schedule(spec, n), disturbance) for n in (micro_batches - period, micro_batches))
    more, least, most = (spec.batch.accumulation - micro_batches) / period, 0.0, 0.0
    for rank, (early, late) in enumerate(zip(shorter.ready, longer.ready, strict=True)):
        growth, work_growth = late - early, longer.work(rank) - shorter.work(rank)
        least, most = max(least, late + more * growth), max(most, late + more * max(growth, work_growth))
    return (least + longer.after) / longer.schedule.steps, (most + longer.after) / longer.schedule.steps


def refusals(spec: StepSpec) -> Iterator[str]:
    """Yields the fields of a layout that cannot be simulated, with the reason."""
    layout = spec.layout
    if layout.sync != "bsp":
        yield (
            f"layout.sync: {layout.sync} replicas do not synchronise in every step, so steps differ; to simulate one "
            "replica: sync=bsp with dp_replicate=1"
        )
    if layout.data_parallel == "threads":
        yield "layout.data_parallel: threads share one interpreter, which no cost model knows; data_parallel=ddp"


def _schedule(spec: StepSpec, micro_batches: int) -> Schedule:
    layout = spec.layout
    if layout.pp == 1:
        return catalogue.build(Layout.schedule, 1, micro_batches)
    return schedule_of(layout, micro_batches)


class _Step:
    """One simulation: the costs of its ranks, the events, and what follows the last pass."""

    def __init__(self, spec: StepSpec, schedule: Schedule, disturbance: Disturbance):
        self.spec, self.schedule = spec, schedule
        self.ranks: list[RankSeconds] = [
            rank_seconds(spec, schedule, rank, disturbance) for rank in range(schedule.ranks)
        ]
        self.p2p_seconds = disturbance.p2p_seconds(spec, schedule)
        self.directions = list(map(schedule.direction, range(schedule.micro_batches)))
        blocks = not spec.framework.pp_overlaps
        floors = [
            [first.get(stage, 0.0) for stage in range(schedule.stages)] for first in (r.floors for r in self.ranks)
        ]
        durations = [one.durations for one in self.ranks]
        self.events: Events = run(schedule, durations, self.p2p_seconds, floors, blocks)
        self.reduced = [list(self._reduce(rank)) for rank in range(schedule.ranks)]
        self.ready = [self._ready(rank) for rank in range(schedule.ranks)]
        # Clipping needs the norm of all gradients, so every optimizer waits for the last gradient.
        self.all_ready = max(self.ready)
        self.after = max(one.optimizer + one.late_gather for one in self.ranks)

    def seconds(self) -> float:
        """Returns the seconds from the first pass to the end of the last optimizer, per step."""
        return (self.all_ready + self.after) / self.schedule.steps

    def work(self, rank: int) -> float:
        """Returns the seconds of a rank's passes, and of the messages for which it waits."""
        durations, program = self.ranks[rank].durations, self.schedule.programs[rank]
        passes = sum(durations[action.kind][action.stage] for action in program)
        if self.spec.framework.pp_overlaps:
            return passes
        receivers = self._receivers(rank)
        sent = (receivers.get((kind, stage, self.directions[micro])) for kind, stage, micro, _ in program)
        return passes + sum(self.p2p_seconds[rank, other] for other in sent if other is not None)

    def timeline(self) -> Timeline:
        ranks = range(self.schedule.ranks)
        whole = self.seconds() * self.schedule.steps
        device = tuple(tuple(self._device(rank)) for rank in ranks)
        network = tuple(tuple(sorted(self._network(rank))) for rank in ranks)
        host = tuple(tuple(sorted(self._host(rank))) for rank in ranks) if self.ranks[0].host else ()
        return Timeline(self.schedule, device, network, whole, host)

    def _ends(self, rank: int) -> float:
        """Returns the end of the rank's last pass."""
        last = self.schedule.programs[rank][-1]
        return self.events.starts[rank][-1] + self.ranks[rank].durations[last.kind][last.stage]

    def _ready(self, rank: int) -> float:
        """Returns when the rank's gradients are reduced. Overlapping collectives slow the passes and what follows."""
        costs, begins, ends = self.ranks[rank], self.events.starts[rank][0], self._ends(rank)
        collectives = (*costs.gathers(), *self.reduced[rank])
        beside = sum(max(0.0, min(span.end, ends) - max(span.start, begins)) for span in collectives)
        return max([ends, *(span.end for span in self.reduced[rank])]) + costs.interference_factor * beside

    def _reduce(self, rank: int) -> Iterator[Span]:
        """Yields the reductions of each stage's gradients, from the first block's of the last micro-batch on, one stage
        after the other; at the end those of duplicated stages."""
        costs, free = self.ranks[rank], 0.0
        for stage, (begins, ends) in sorted(self._last_passes(rank).items(), key=lambda item: item[1]):
            seconds = costs.reduce[stage]
            if not seconds:
                continue
            if costs.reduces_after:
                start = max(free, self._ends(rank))
                free = start + seconds
            else:
                part = 1 / max(2.0, costs.blocks[stage])
                start = max(free, begins + (ends - begins) * part)
                # The last block's gradients are complete when the pass ends.
                free = max(start + seconds, ends + seconds * part)
                start = free - seconds
            yield Span(start, seconds, "reduce", stage)
        if costs.duplicated_stages:
            yield Span(max(free, self._ends(rank)), costs.duplicated_stages, "reduce")

    def _last_passes(self, rank: int) -> dict[int, tuple[float, float]]:
        """Returns, for each stage of a rank, the begin and the end of the pass that completes its gradients."""
        found: dict[int, tuple[float, float]] = {}
        durations, stages = self.ranks[rank].durations, len(self.ranks[rank].reduce)
        program, starts = self.schedule.programs[rank], self.events.starts[rank]
        for action, start in zip(reversed(program), reversed(starts), strict=True):
            if action.kind in ("B", "W") and action.stage not in found:
                found[action.stage] = (start, start + durations[action.kind][action.stage])
            if len(found) == stages:
                break
        return found

    def _device(self, rank: int) -> Iterator[Span]:
        durations, exposed = self.ranks[rank].durations, self.ranks[rank].exposed
        for action, start in zip(self.schedule.programs[rank], self.events.starts[rank], strict=True):
            kind, stage, micro, part = action
            yield _span((start, durations[kind][stage], kind, stage, micro, part, exposed[kind][stage], -1))
        if self.ranks[rank].host is None:
            yield Span(self.all_ready, self.ranks[rank].optimizer, "optimizer")

    def _host(self, rank: int) -> Iterator[Span]:
        """Yields the copies and the update of an offloaded optimizer, which needs the norm of all gradients first."""
        work = self.ranks[rank].host
        assert work is not None, "the optimizer is offloaded on all ranks or none"
        backward, update = self.ready[rank] - work.backward, self.all_ready + work.late[0]
        yield from (Span(backward + start, seconds, "down") for start, seconds in work.copies_down())
        yield Span(update, work.updating, "update")
        yield from (Span(update + start, seconds, "up") for start, seconds in work.copies_up())

    def _network(self, rank: int) -> Iterator[Span]:
        costs, program = self.ranks[rank], self.schedule.programs[rank]
        yield from costs.gathers()
        receivers = self._receivers(rank)
        for action, arrival in zip(program, self.events.arrivals_of(rank), strict=True):
            kind, stage, micro, part = action
            if (other := receivers.get((kind, stage, self.directions[micro]))) is not None:
                seconds = self.p2p_seconds[rank, other]
                yield _span((arrival - seconds, seconds, "send", stage, micro, part, 0.0, other))
        yield from self.reduced[rank]
        if costs.late_gather:
            yield Span(self.all_ready + costs.optimizer, costs.late_gather, "gather")

    def _receivers(self, rank: int) -> dict[tuple[str, int, int], int]:
        """Returns the rank to which the result of a pass is sent, by its kind, stage and direction."""
        found: dict[tuple[str, int, int], int] = {}
        for direction, placement in enumerate(self.schedule.placements):
            for stage, at in enumerate(placement):
                for kind, to in (("F", stage + 1), ("B", stage - 1), ("I", stage - 1)):
                    if at == rank and 0 <= to < len(placement) and self.p2p_seconds.get((rank, placement[to])):
                        found[kind, stage, direction] = placement[to]
        return found


_span: Callable[[tuple[Any, ...]], Span] = partial(tuple.__new__, Span)
"""Creates a span from the tuple of all its fields: a large step has half a million of them."""


def rank_figures(timeline: Timeline) -> list[Mapping[str, float]]:
    """Returns for each pipeline rank the busy, exposed-communication and idle seconds, those in which it waits for its
    host, and the peak in-flight micro-batches, counted per stage."""
    found: list[Mapping[str, float]] = []
    for rank in range(timeline.schedule.ranks):
        shares = timeline.shares(rank)
        found.append(
            {
                "busy_s": shares.busy,
                "communication_s": shares.communication,
                "idle_s": shares.idle,
                "host_s": shares.host,
                "peak_in_flight": timeline.schedule.peak_live_activations(rank) / timeline.schedule.slices,
            }
        )
    return found


@dataclass(frozen=True)
class Figures:
    """The figures of a simulation."""

    step_time_s: float
    bubble: float
    """The pipeline bubble (schedule/timing.py); the busiest rank is the one that is idle least."""
    ranks: list[Mapping[str, float]]


def figures(timeline: Timeline) -> Figures:
    ranks = rank_figures(timeline)
    idle = min(rank["idle_s"] for rank in ranks)
    step = timeline.seconds / timeline.schedule.steps
    return Figures(step, bubble_fraction(idle, timeline.seconds), ranks)
