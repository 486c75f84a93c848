"""The seconds of a pipeline rank's passes, state collectives and optimizer, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from phalanx.cost.placed import Content, content_of, stages_of_case
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.exposed import bucket_messages
from phalanx.cost.time.offload_time import HostWork
from phalanx.cost.time.rank_time import RankTime, held_by, rank_time
from phalanx.cost.time.state_time import (
    ParameterCounts,
    StateSeconds,
    duplicated_stages_seconds,
    interference,
    is_zero3,
    offloaded_work,
    optimizer_seconds,
    state_seconds,
)
from phalanx.schedule.schedule import Schedule
from phalanx.simulate.disturbance import Disturbance
from phalanx.simulate.timeline import Span


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
    host: HostWork | None
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
    state = {stage: _state(spec, contents[stage], disturbance) for stage in local_stages}
    zero3, overlaps = is_zero3(spec.layout), spec.framework.dp_overlaps
    whole = ParameterCounts(
        *map(sum, zip(*(astuple(held_by(spec, contents[stage])) for stage in local_stages), strict=True))
    )
    optimizer = optimizer_seconds(spec, whole)
    host = offloaded_work(spec, whole, sum(durations["B"]), optimizer)
    late = sum(host.late) + host.late_files if host else 0.0
    optimizer = optimizer + late if host else optimizer * disturbance.device(rank)
    messages = bucket_messages(sum(contents[stage].blocks for stage in local_stages))
    after, duplicated = not overlaps and not zero3, _has_duplicated_stages(schedule, local_stages)
    return RankSeconds(
        durations={kind: tuple(seconds) for kind, seconds in durations.items()},
        exposed={kind: tuple(seconds) for kind, seconds in exposed.items()},
        gather={} if after else {stage: seconds.gather for stage, seconds in state.items()},
        reduce={stage: seconds.reduce for stage, seconds in state.items()},
        blocks={stage: 1.0 if zero3 else contents[stage].blocks for stage in local_stages},
        duplicated_stages=duplicated_stages_seconds(spec, whole) if duplicated else 0.0,
        optimizer=optimizer,
        host=host,
        late_gather=sum(seconds.gather for seconds in state.values()) if after else 0.0,
        interference_factor=0.0 if zero3 else interference(spec, whole, messages),
        reduces_after=after or zero3,
    )


def _has_duplicated_stages(schedule: Schedule, local_stages: list[int]) -> bool:
    """Returns whether other ranks have copies of these stages."""
    return any(len({placement[stage] for placement in schedule.placements}) > 1 for stage in local_stages)


@lru_cache(20_000)
def stage_time(spec: StepSpec, content: Content) -> RankTime:
    """Returns the time of a micro-batch in a stage."""
    return rank_time(spec, content)


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


def _state(spec: StepSpec, content: Content, disturbance: Disturbance) -> StateSeconds:
    """Returns the seconds of a stage's state collectives, once per step; with zero=3 those of its non-block parameters,
    because the others are in the passes."""
    parameters, factor = held_by(spec, content), disturbance.axis("dp")
    if is_zero3(spec.layout):
        found = state_seconds(spec, parameters, max(1, content.blocks))
        once = (found.gather + found.reduce) / max(1, content.blocks)
        return StateSeconds(once * factor, reduce=once * factor)
    found = state_seconds(spec, parameters, bucket_messages(content.blocks))
    return StateSeconds(found.gather * factor, reduce=found.reduce * factor)
