"""What a rank of a pipeline does in a step, counted: its passes through each stage, and its messages.

Without a pipeline it is the same with one stage. Of a schedule without a flush it is a step's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.partition.pipeline import is_file, schedule_of
from phalanx.partition.stages import written_stages
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.simple import naive


@dataclass
class Passes:
    """One rank's passes through one of its stages. Slices of sequences count each."""

    forward: int = 0
    backward: int = 0
    """B, or I where the backward pass is in halves."""
    ends: int = 0
    """B, or W: after each the weights' gradients of a micro-batch are there."""
    last_forward: int = -1
    """Place in the program."""
    last_backward: int = -1


@dataclass(frozen=True)
class RankPasses:
    """What one rank of a pipeline does."""

    passes: dict[int, Passes] = field(default_factory=dict)
    """By stage, those that it holds in their order."""
    sends: int = 0
    """Messages, each of what travels between two stages of a micro-batch, or of a slice of one."""
    renewals: int = 0
    """Passes that begin after a backward pass, or as the first: where a backward pass gives up what lies around the
    blocks, that often it is gathered."""
    steps: int = 1
    """Optimizer steps that all this is for."""


@dataclass(frozen=True)
class PipelineWork:
    """The stages of a pipeline, and the work of every rank."""

    cut: tuple[range, ...]
    """The layers of each stage."""
    placements: tuple[tuple[int, ...], ...]
    """The ranks of the stages, one line a direction."""
    work: tuple[RankPasses, ...]
    slices: int = 1


def pipeline_work(layout: Layout, n_layers: int, micro_batches: int, stages: Sequence[range] | None) -> PipelineWork:
    """The pipeline of a layout. `stages` are the layers of each of its stages; None: `layout.pp_cut`'s.

    Raises JobError where a pipeline's stages are neither given nor written, and as schedule_of does."""
    key = Layout(pp=layout.pp, schedule=layout.schedule, pp_chunks=layout.pp_chunks, pp_slices=layout.pp_slices)
    if layout.pp == 1:
        key, stages = Layout(), [range(n_layers)]
    # A file may change.
    plan = (_worked if is_file(key.schedule) else _worked_before)(key, micro_batches)
    if stages is None:
        if not layout.pp_cut:
            raise JobError(f"pp {layout.pp}: traffic depends on the layers of each stage; set layout.pp_cut")
        stages = written_stages(layout.pp_cut, len(plan.placements[0]), n_layers)
    return replace(plan, cut=tuple(stages))


def _worked(layout: Layout, micro_batches: int) -> PipelineWork:
    """The same without the layers."""
    schedule = naive(1, micro_batches) if layout.pp == 1 else schedule_of(layout, micro_batches)
    work = tuple(_work(schedule, rank) for rank in range(schedule.ranks))
    return PipelineWork((), schedule.placements, work, schedule.slices)


_worked_before = cache(_worked)


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
