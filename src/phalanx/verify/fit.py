"""Adapts a model to a layout: layers for its stages, experts for expert parallelism."""

from __future__ import annotations

from dataclasses import replace

from phalanx.blocks.kinds import alike
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import MoE
from phalanx.errors import JobError
from phalanx.partition.derived import parse, parse_cut, schedule_of
from phalanx.schedule.schedule import Schedule

EXPERTS = MoE(n_experts=8, top_k=2, n_shared=1, aux_loss=0.01, z_loss=0.001, bias_balanced=True)
"""The experts added to a model without any: they exercise every part of a router."""


def deep_enough(job: Job, layout: Layout) -> Job:
    """Returns the job with a model for a layout's stages: as many layers as `recompute_cut` or `pp_cut` has, else at
    least one per stage.

    If the layout is not legal, the job is returned unchanged."""
    if layout.pp == 1 and not layout.recompute_cut:
        return job
    try:
        if layout.recompute_cut:
            layers = sum(run.layers for run in parse(layout.recompute_cut))
        elif layout.pp_cut:
            layers = sum(parse_cut(layout.pp_cut))
        else:
            layers = max(job.model.n_layers, _schedule(layout).stages)
    except JobError:
        return job
    return replace(job, model=replace(job.model, n_layers=layers))


def with_experts(job: Job, layout: Layout) -> Job:
    """Returns the job with experts in its model if the layout uses expert parallelism and the model has none.

    They are narrow, and their width is divisible by the same numbers of ranks as that of the MLP. They have no
    load-balancing loss if the layout slices sequences, which excludes it."""
    model = job.model
    if layout.ep == 1 or model.moe.n_experts:
        return job
    moe = replace(EXPERTS, d_ff=alike(model.ff_size, min(model.ff_size, max(8, model.d_model // 2)), max(8, layout.tp)))
    try:
        if layout.pp > 1 and _schedule(layout).slices > 1:
            moe = replace(moe, aux_loss=0.0)
    except JobError:
        pass  # the layout is not legal, with experts or without
    return replace(job, model=replace(model, moe=moe))


def _schedule(layout: Layout) -> Schedule:
    """Returns a pipeline's schedule, whose stages do not depend on the number of micro-batches. Raises JobError if
    there is none."""
    return schedule_of(layout, max(layout.pp, layout.accumulation))
