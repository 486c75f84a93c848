"""Counts of a pipeline rank's work in a step: its passes through each stage, and its messages.

Without a pipeline there is one stage. For a schedule without a flush it is the share of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.partition.pipeline import is_file, schedule_of
from phalanx.partition.stages import written_stages
from phalanx.schedule.generators import naive
from phalanx.schedule.schedule import Schedule


@dataclass
class Passes:
    """One rank's passes through one of its stages; slices of sequences count individually."""

    forward: int = 0
    backward: int = 0
    """Number of B, or of I if the backward pass is split."""
    ends: int = 0
    """Number of B, or of W: each completes the weight gradients of a micro-batch."""
    last_forward: int = -1
    """Index of the last forward pass in the program."""
    last_backward: int = -1


@dataclass(frozen=True)
class RankPasses:
    """The work of one pipeline rank."""

    passes: dict[int, Passes] = field(default_factory=dict)
    """Passes by stage, in the order of the rank's stages."""
    sends: int = 0
    """Messages, each the hidden states of a micro-batch, or of a slice of one, between two stages."""
    renewals: int = 0
    """Passes other than W that follow a backward pass or come first: the number of times that parameters outside the
    blocks are gathered if a backward pass reshards them."""
    steps: int = 1
    """Optimizer steps in the program."""


@dataclass(frozen=True)
class PipelineWork:
    """The stages of a pipeline, and the work of every rank."""

    cut: tuple[range, ...]
    """The layers of each stage."""
    placements: tuple[tuple[int, ...], ...]
    """The ranks of the stages, one row per direction."""
    work: tuple[RankPasses, ...]
    slices: int = 1


def pipeline_work(layout: Layout, n_layers: int, micro_batches: int, stages: Sequence[range] | None) -> PipelineWork:
    """Returns the pipeline of a layout. `stages` are the layers of each of its stages; None: those of `layout.pp_cut`.

    Raises JobError if a pipeline's stages are neither given nor written, and as schedule_of does."""
    key = Layout(pp=layout.pp, schedule=layout.schedule, pp_chunks=layout.pp_chunks, pp_slices=layout.pp_slices)
    if layout.pp == 1:
        key, stages = Layout(), [range(n_layers)]
    # A schedule's file may change between calls, so its work is not cached.
    plan = (_work_of if is_file(key.schedule) else _cached_work)(key, micro_batches)
    if stages is None:
        if not layout.pp_cut:
            raise JobError(f"pp {layout.pp}: traffic depends on the layers of each stage; set layout.pp_cut")
        stages = written_stages(layout.pp_cut, len(plan.placements[0]), n_layers)
    return replace(plan, cut=tuple(stages))


def _work_of(layout: Layout, micro_batches: int) -> PipelineWork:
    """Returns the work of a pipeline without the layers of its stages."""
    schedule = naive(1, micro_batches) if layout.pp == 1 else schedule_of(layout, micro_batches)
    work = tuple(_work(schedule, rank) for rank in range(schedule.ranks))
    return PipelineWork((), schedule.placements, work, schedule.slices)


_cached_work = cache(_work_of)


def _work(schedule: Schedule, rank: int) -> RankPasses:
    passes = {stage: Passes() for stage in schedule.stages_on(rank)}
    sends = renewals = 0
    renews = True
    for place, action in enumerate(schedule.programs[rank]):
        kind, stage, micro, _ = action
        here = passes[stage]
        if kind == "F":
            here.forward += 1
            here.last_forward = place
            reader = stage + 1
        else:
            reader = stage - 1
        if kind in ("B", "I"):
            here.backward += 1
            here.last_backward = place
        here.ends += kind in ("B", "W")
        if kind != "W":
            renewals += renews
            renews = kind != "F"
            sends += 0 <= reader < schedule.stages and schedule.rank_of(reader, micro) != rank
    return RankPasses(passes, sends, renewals, schedule.steps)
