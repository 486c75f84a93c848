"""What a model lacks for a layout: layers for its stages, experts to deal out."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import MoE
from phalanx.errors import JobError
from phalanx.partition.pipeline import schedule_of
from phalanx.partition.recompute import parse
from phalanx.partition.stages import parse_cut
from phalanx.schedule.schedule import Schedule
from phalanx.verify.small import like

EXPERTS = MoE(n_experts=8, top_k=2, n_shared=1, aux_loss=0.01, z_loss=0.001, bias_balanced=True)
"""What a model without experts gets: everything that a router does is at work."""


def deep_enough(job: Job, layout: Layout) -> Job:
    """The job with a model for a layout's stages: as many layers as `recompute_cut` or `pp_cut` has, else at least one
    for each stage.

    Where the layout is not legal it is the job itself."""
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
    """The job with experts in its model where the layout deals some out and the model has none.

    They are narrow, and their width divides by the same numbers of ranks as that of the MLP. Without the load-balancing
    loss where sequences travel in slices, which it does not go with."""
    model = job.model
    if layout.ep == 1 or model.moe.n_experts:
        return job
    moe = replace(EXPERTS, d_ff=like(model.ff_size, min(model.ff_size, max(8, model.d_model // 2)), max(8, layout.tp)))
    try:
        if layout.pp > 1 and _schedule(layout).slices > 1:
            moe = replace(moe, aux_loss=0.0)
    except JobError:
        pass  # the layout is not legal, with experts or without
    return replace(job, model=replace(model, moe=moe))


def _schedule(layout: Layout) -> Schedule:
    """A pipeline's schedule, whose stages do not depend on how many micro-batches it is for. Raises JobError where it
    is none."""
    return schedule_of(layout, max(layout.pp, layout.accumulation))
