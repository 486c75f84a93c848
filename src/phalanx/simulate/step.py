"""Simulates one training step event by event: the schedule's program with the cost model's time of each stage, messages
between stages, the state's collectives beside the passes, and the optimizer.

One pipeline represents all, because replicas are equal; if one is slower, all wait for it. Within a pass the cost model
already combines computation, collectives of its axes and the host (cost/rank_time.py). The simulation adds the
order in time of passes, messages and the state's collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil
from typing import Any

from phalanx.config.layout import Layout
from phalanx.cost import step_state
from phalanx.cost.communication import boundary_seconds
from phalanx.cost.exposed import bucket_messages
from phalanx.cost.held import ParameterCounts, content_of, stages_of_case, table
from phalanx.cost.rank_time import RankTime, held_by, rank_time
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.partition.derived import gathers_parameters, is_file, schedule_of
from phalanx.schedule import catalogue
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.timing import Events, bubble_fraction, run
from phalanx.simulate.timeline import Span, Timeline

AXES = ("tp", "cp", "ep", "dp")
"""Axes whose links can be slow; dp stands for the collectives of the state, over dp_shard and dp_replicate."""


@dataclass(frozen=True)
class Disturbance:
    """Slow devices and links of one replica; the other replicas wait for it once per step."""

    slow: tuple[tuple[int, float], ...] = ()
    """Pipeline ranks with the factor on the time of their passes."""
    links: tuple[tuple[tuple[int, int], float], ...] = ()
    """Pairs of pipeline ranks with the factor on messages between them, both ways."""
    axes: tuple[tuple[str, float], ...] = ()
    """Axes of the mesh with the factor on the time of their collectives."""

    def device(self, rank: int) -> float:
        """Returns the factor on the passes of a pipeline rank."""
        return dict(self.slow).get(rank, 1.0)

    def axis(self, name: str) -> float:
        """Returns the factor on the collectives of an axis."""
        return dict(self.axes).get(name, 1.0)

    def p2p_seconds(self, spec: StepSpec, schedule: Schedule) -> dict[tuple[int, int], float]:
        """Returns the seconds of a message by sender and receiver, for all pairs of pipeline ranks that communicate."""
        slow = {frozenset(pair): factor for pair, factor in self.links}
        return {
            pair: boundary_seconds(spec, *pair) / schedule.slices * slow.get(frozenset(pair), 1.0)
            for pair in schedule.pairs
        }


def check(disturbance: Disturbance, spec: StepSpec) -> None:
    """Raises JobError with every rank and axis that the spec does not have."""
    if problems := list(_problems(disturbance, spec)):
        raise JobError(problems)


def _problems(disturbance: Disturbance, spec: StepSpec) -> Iterator[str]:
    pp = spec.layout.pp
    ranks = "the pipeline has rank 0 alone" if pp == 1 else f"pipeline ranks are 0 to {pp - 1}"
    for rank, factor in disturbance.slow:
        if not 0 <= rank < pp:
            yield f"--straggler {rank}={factor:g}: {ranks}"
    for (one, other), factor in disturbance.links:
        if not (0 <= one < pp and 0 <= other < pp) or one == other:
            yield f"--slow-link {one}-{other}={factor:g}: {ranks}; a link joins two of them"
    for axis, factor in disturbance.axes:
        if axis not in AXES:
            yield f"--slow-link {axis}={factor:g}: axes are {', '.join(AXES)}; between pipeline ranks: 2-3={factor:g}"
        elif (spec.layout.data_ranks * spec.layout.cp if axis == "dp" else getattr(spec.layout, axis)) == 1:
            yield f"--slow-link {axis}={factor:g}: the layout has one rank along {axis}"
    given = [(f"--straggler {rank}", factor) for rank, factor in disturbance.slow]
    given += [(f"--slow-link {one}-{other}", factor) for (one, other), factor in disturbance.links]
    given += [(f"--slow-link {axis}", factor) for axis, factor in disturbance.axes]
    yield from (
        f"{option} is given twice" for option, number in Counter(each for each, _ in given).items() if number > 1
    )
    for option, factor in given:
        if factor <= 0:
            yield f"{option}={factor:g}: the factor must be more than 0; 2 is twice as slow"


@dataclass(frozen=True)
class RankSeconds:
    """The times of one pipeline rank. Lists by stage have an entry per stage of the pipeline, 0 for other ranks'."""

    durations: Mapping[str, tuple[float, ...]]
    """Seconds of a pass by kind and stage; of a slice its share."""
    exposed: Mapping[str, tuple[float, ...]]
    """Exposed communication among these seconds."""
    gather: Mapping[int, float]
    """Seconds of the all-gather of each stage's parameters during the first passes; empty without one."""
    reduce: Mapping[int, float]
    """Seconds of the reduction of each stage's gradients."""
    blocks: Mapping[int, float]
    """Blocks of each stage, which are gathered and reduced one after the other."""
    duplicated_stages: float
    """Seconds of the reduction of duplicated stages' gradients, after all these."""
    optimizer: float
    """Seconds of the optimizer, with exposed copies between device and host, and of state in files."""
    host: step_state.HostWork | None
    """The host's part of the step, if the optimizer is offloaded."""
    late_gather: float
    """Seconds of the all-gather of parameters after the optimizer, which nothing overlaps."""
    interference_factor: float
    """Seconds that passes lose per second of an overlapping collective."""
    reduces_after: bool
    """Whether gradients are reduced after the last pass, without overlap."""

    @property
    def floors(self) -> dict[int, float]:
        """Returns, per stage, the earliest begin of its first pass: its first block's parameters must have arrived, and
        the last block's before the pass ends."""
        found: dict[int, float] = {}
        for span in self.gathers():
            part, forward = 1 / max(1.0, self.blocks[span.stage]), self.durations["F"][span.stage]
            found[span.stage] = max(span.start + span.seconds * part, span.end - forward * (1 - part))
        return found

    def gathers(self) -> Iterator[Span]:
        """Yields the all-gathers of the stages' parameters, one after the other from the beginning of the step."""
        start = 0.0
        for stage, seconds in sorted(self.gather.items()):
            if seconds:
                yield Span(start, seconds, "gather", stage)
                start += seconds


def rank_seconds(spec: StepSpec, schedule: Schedule, rank: int, disturbance: Disturbance) -> RankSeconds:
    """Returns the times of a pipeline rank."""
    stages = stages_of_case(spec, schedule.stages)
    local_stages = schedule.stages_on(rank)
    contents = {stage: content_of(spec, stages, [stage]) for stage in local_stages}
    factor = disturbance.device(rank) / schedule.slices
    empty = [0.0] * schedule.stages
    durations = {kind: list(empty) for kind in "FBIW"}
    exposed = {kind: list(empty) for kind in "FBIW"}
    for stage in local_stages:
        time = _disturbed(stage_time(spec, contents[stage]), disturbance)
        passes = {
            "F": time.forward_seconds,
            "B": time.backward_seconds,
            "I": time.backward_seconds - time.weights,
            "W": time.weights,
        }
        # Communication is spread over both passes in proportion; the gradients of weights have none.
        share = time.communication / (time.total - time.weights) if time.total > time.weights else 0.0
        for kind, seconds in passes.items():
            durations[kind][stage] = seconds * factor
            exposed[kind][stage] = share * (seconds - (time.weights if kind == "B" else 0)) / schedule.slices
        exposed["W"][stage] = 0.0
    content = content_of(spec, stages, local_stages)
    state = {}
    for stage in local_stages:
        held = held_by(spec, contents[stage])
        if spec.model.embeds_at_end and stage == schedule.stages - 1 > 0 and content.embedding:
            # It computes with the first stage's embedding, which is on the same rank.
            copied = table(spec.model, spec.layout.tp)
            trained = 0 if spec.model.freezes else copied
            held = held._replace(dense=held.dense - copied, trained_dense=held.trained_dense - trained)
        state[stage] = _state(spec, held, contents[stage].blocks, disturbance)
    zero3, overlaps = gathers_parameters(spec.layout), spec.framework.dp_overlaps
    whole = held_by(spec, content)
    optimizer = step_state.optimizer_seconds(spec, whole, content)
    host = step_state.offloaded_work(spec, whole, sum(durations["B"]), optimizer)
    late = sum(host.late) + host.late_files if host else 0.0
    optimizer = optimizer + late if host else optimizer * disturbance.device(rank)
    messages = bucket_messages(content.blocks)
    after, duplicated = (
        not overlaps and not zero3,
        any(len({placement[stage] for placement in schedule.placements}) > 1 for stage in local_stages),
    )
    return RankSeconds(
        durations={kind: tuple(seconds) for kind, seconds in durations.items()},
        exposed={kind: tuple(seconds) for kind, seconds in exposed.items()},
        gather={} if after else {stage: seconds.gather for stage, seconds in state.items()},
        reduce={stage: seconds.reduce for stage, seconds in state.items()},
        blocks={stage: 1.0 if zero3 else contents[stage].blocks for stage in local_stages},
        duplicated_stages=step_state.duplicated_stages_seconds(spec, whole) if duplicated else 0.0,
        optimizer=optimizer,
        host=host,
        late_gather=sum(seconds.gather for seconds in state.values()) if after else 0.0,
        interference_factor=0.0 if zero3 else step_state.interference(spec, whole, messages),
        reduces_after=after or zero3,
    )


stage_time = lru_cache(20_000)(rank_time)
"""The time of a micro-batch in a stage."""


def _disturbed(time: RankTime, disturbance: Disturbance) -> RankTime:
    """Returns the time with the collectives of slow axes: each pass grows by its share of their extra time."""
    if not disturbance.axes:
        return time
    more = {
        field: getattr(time, field) * disturbance.axis(axis)
        for field, axis in (("tp", "tp"), ("cp", "cp"), ("ep", "ep"), ("shard", "dp"))
    }
    slow = replace(time, **more)
    return replace(slow, forward=time.forward * slow.device / time.device)


def _state(spec: StepSpec, held: ParameterCounts, blocks: int, disturbance: Disturbance) -> step_state.StateSeconds:
    """Returns the seconds of a stage's state collectives, once per step; with zero=3 those of its non-block parameters,
    because the others are in the passes."""
    messages = max(1, blocks) if gathers_parameters(spec.layout) else bucket_messages(blocks)
    found = step_state.state_seconds(spec, held, messages)
    factor = disturbance.axis("dp")
    if gathers_parameters(spec.layout):
        once = (found.gather + found.reduce) / messages
        return step_state.StateSeconds(once * factor, reduce=once * factor)
    return step_state.StateSeconds(found.gather * factor, reduce=found.reduce * factor)


SETTLED_PERIODS, SETTLED_MICRO_BATCHES = 3, 64
"""Fewest micro-batches per direction, for each pipeline rank and in all, after which most schedules are periodic."""
EXTRAPOLATION_TOLERANCE = 1e-3
"""Relative difference up to which the two extrapolations count as equal."""


def simulate(spec: StepSpec, disturbance: Disturbance | None = None) -> Timeline:
    """Returns every span of the step. Raises JobError for layouts without such a step (`refusals`), or if the schedule
    does not match the number of micro-batches."""
    if problems := list(refusals(spec)):
        raise JobError(problems)
    disturbance, schedule = disturbance or Disturbance(), _schedule(spec, spec.batch.accumulation)
    return _Step(spec, schedule, disturbance, _ranks(spec, schedule, disturbance)).timeline()


def step_seconds(spec: StepSpec, disturbance: Disturbance | None = None) -> float:
    """Returns the seconds of a step, without its spans. For many micro-batches it is extrapolated from fewer, because
    schedules are periodic (the tests bound the difference). Raises as `simulate` does."""
    if problems := list(refusals(spec)):
        raise JobError(problems)
    disturbance = disturbance or Disturbance()
    m, pp, name = spec.batch.accumulation, spec.layout.pp, spec.layout.schedule
    ranks: list[RankSeconds] = []
    # A schedule from a file states its number of micro-batches.
    period = 0 if is_file(name) else catalogue.SCHEDULES[name].period(pp)
    settled = period * max(SETTLED_PERIODS, ceil(SETTLED_MICRO_BATCHES / pp))
    while 0 < 2 * settled < m:
        fewer = settled + m % period
        if any(catalogue.problems(name, pp, n, spec.layout.pp_chunks) for n in (fewer - period, fewer)):
            break  # a schedule that takes this m, but not every m of its period
        # The times of a rank do not depend on the number of micro-batches of the program.
        ranks = ranks or _ranks(spec, _schedule(spec, fewer), disturbance)
        least, most = _extrapolated(spec, disturbance, ranks, period, fewer)
        if most <= least * (1 + EXTRAPOLATION_TOLERANCE):
            return (least + most) / 2
        settled *= 2
    schedule = _schedule(spec, m)
    return _Step(spec, schedule, disturbance, ranks or _ranks(spec, schedule, disturbance)).seconds()


def _extrapolated(
    spec: StepSpec, disturbance: Disturbance, ranks: list[RankSeconds], period: int, micro_batches: int
) -> tuple[float, float]:
    """Returns a lower and an upper estimate of a step from `micro_batches` of them and a `period` fewer: every rank
    continues at its rate, or at the rate of its own work. They differ while the first micro-batches in flight hide that
    a rank is slower than the one that sets the pace."""
    longer = _Step(spec, _schedule(spec, micro_batches), disturbance, ranks)
    more, least, most = (spec.batch.accumulation - micro_batches) / period, 0.0, 0.0
    if (growth := longer.events.growth(period)) is not None:
        whole = longer.seconds() + more * growth
        return whole, whole
    shorter = _Step(spec, _schedule(spec, micro_batches - period), disturbance, ranks)
    for rank, (early, late) in enumerate(zip(shorter.ready, longer.ready, strict=True)):
        growth, work_growth = late - early, longer.work(rank, period)
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
    elif layout.independent_replicas > 1:
        yield f"layout.axes: replicas along {layout.replica_axis} do not synchronise in every step, so steps differ"
    if layout.data_parallel == "threads":
        yield "layout.data_parallel: threads share one interpreter, which no cost model knows; data_parallel=ddp"


def _schedule(spec: StepSpec, micro_batches: int) -> Schedule:
    layout = spec.layout
    if layout.pp == 1:
        return catalogue.build(Layout.schedule, 1, micro_batches)
    return schedule_of(layout, micro_batches)


def _ranks(spec: StepSpec, schedule: Schedule, disturbance: Disturbance) -> list[RankSeconds]:
    return [rank_seconds(spec, schedule, rank, disturbance) for rank in range(schedule.ranks)]


class _Step:
    """One simulation: the costs of its ranks, the events, and what follows the last pass."""

    def __init__(self, spec: StepSpec, schedule: Schedule, disturbance: Disturbance, ranks: list[RankSeconds]):
        self.spec, self.schedule, self.ranks = spec, schedule, ranks
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

    def work(self, rank: int, micro_batches: int) -> float:
        """Returns the seconds of a rank's passes of some micro-batches per step, equal shares of them in each
        direction, and of the messages for which it waits."""
        durations, placements = self.ranks[rank].durations, self.schedule.placements
        held = [stage for placement in placements for stage, at in enumerate(placement) if at == rank]
        once = sum(durations["F"][stage] + durations["B"][stage] for stage in held)
        if not self.spec.framework.pp_overlaps:
            receivers = self._receivers(rank).items()
            once += sum(self.p2p_seconds[rank, other] for (kind, *_), other in receivers if kind != "I")
        return once * micro_batches * self.schedule.slices * self.schedule.steps / len(placements)

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
