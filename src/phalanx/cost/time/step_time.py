"""The time of a step: micro-batches through the pipeline, the state's collectives, and the optimizer."""

from __future__ import annotations

from collections import Counter

from phalanx.cost.placed import Content, contents
from phalanx.cost.prediction import Parts
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.communication import boundary_seconds
from phalanx.cost.time.exposed import boundaries, bucket_messages, ends_of_blocks, step_state
from phalanx.cost.time.matrix_time import matrix_seconds
from phalanx.cost.time.pipeline import pipeline_seconds
from phalanx.cost.time.rank_time import RankTime, held_by, rank_time
from phalanx.cost.time.state_time import (
    ParameterCounts,
    duplicated_stages_seconds,
    fetch_seconds,
    interference,
    is_zero3,
    offloaded_work,
    optimizer_seconds,
    state_seconds,
    synchronization_seconds,
)
from phalanx.schedule import catalogue


def step_parts(spec: StepSpec) -> Parts:
    """Returns the seconds of one step by part; their sum is the step time."""
    layout, batch = spec.layout, spec.batch
    ranks = contents(spec)
    count = Counter(ranks)
    time_of = {content: rank_time(spec, content) for content in count}
    times = [time_of[content] for content in ranks]
    busiest = max(range(len(times)), key=lambda rank: times[rank].total)
    slowest, m = times[busiest], batch.accumulation
    mean = RankTime()
    for content, number in count.items():
        mean += time_of[content].scaled(number / len(times))
    whole = pipeline_seconds(layout, m, [time.total for time in times], mean.forward, mean.weights)
    held = max((held_by(spec, content) for content in count), key=lambda held: held.dense + held.experts)
    data, optimizer = _state(spec, ranks[busiest], held, slowest)
    # Those of the first block and outside the blocks, as in `ends_of_blocks`.
    fetched = 2 * fetch_seconds(spec, *held.sent(layout, "parameter")) / max(1, ranks[busiest].blocks)
    host = offloaded_work(spec, held, slowest.backward_seconds, optimizer)
    bidirectional = min(content.share for content in count) < 1
    exposed = {
        "tp": m * slowest.tp,
        "cp": m * slowest.cp,
        "ep": m * slowest.ep,
        "pp": _boundaries(spec) + (duplicated_stages_seconds(spec, held) if bidirectional else 0.0),
        "dp_shard" if layout.shard_ranks > 1 else "dp_replicate": m * slowest.shard + data,
    }
    exposed["dp_replicate"] = exposed.get("dp_replicate", 0.0) + synchronization_seconds(spec, held)
    return Parts(
        products=m * slowest.products,
        streams=m * slowest.streams,
        recompute=m * slowest.recompute,
        host=m * slowest.host,
        exposed={axis: spent for axis, spent in exposed.items() if spent},
        bubble=whole - m * slowest.total,
        optimizer=optimizer,
        copies=(sum(host.late) if host else 0.0) + fetched + m * slowest.copies,
        files=host.late_files if host else 0.0,
        forward=m * (slowest.forward_seconds - slowest.forward_communication),
    )


def _boundaries(spec: StepSpec) -> float:
    """Returns the exposed seconds of messages between stages."""
    layout = spec.layout
    if layout.pp == 1:
        return 0.0
    chunks = catalogue.chunks_of(layout.schedule, layout.pp_chunks)
    once = sum(boundary_seconds(spec, rank, rank + 1) for rank in range(layout.pp - 1)) / (layout.pp - 1)
    return boundaries(once, layout.pp, chunks, spec.batch.accumulation, overlaps=spec.framework.pp_overlaps)


def _state(spec: StepSpec, content: Content, held: ParameterCounts, slowest: RankTime) -> tuple[float, float]:
    """Returns the exposed seconds of gathering parameters and reducing gradients once per step, and the optimizer's."""
    layout, blocks = spec.layout, content.blocks
    optimizer = optimizer_seconds(spec, held) + matrix_seconds(spec, content)
    if is_zero3(layout):
        state = state_seconds(spec, held, max(1, blocks))
        return ends_of_blocks(state.gather, state.reduce, blocks), optimizer
    messages = bucket_messages(blocks)
    state = state_seconds(spec, held, messages)
    if not spec.framework.dp_overlaps:
        return state.gather + state.reduce, optimizer
    slowdown = interference(spec, held, messages)
    backward = slowest.total - slowest.forward
    return step_state(state.gather, state.reduce, slowest.forward, backward, blocks, slowdown), optimizer
