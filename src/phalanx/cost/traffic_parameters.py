"""The parameters of a rank as its traffic sees them, and how often each passes in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple

from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import Shapes, is_narrow, weight_of
from phalanx.blocks.residual import is_target, needs_sum
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.held import LayerKind, layer_kinds
from phalanx.errors import JobError
from phalanx.partition.derived import Format, is_file, schedule_of, sent_as, stage_shapes, written, written_stages
from phalanx.partition.matrices import ShardRanges, row_ranges
from phalanx.partition.tensor_slices import first_rank_tiles
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
    renewed: int = 0
    """Those of them that follow a B or I which no other has followed: the others find no gradient that did not wait."""
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
    renews, fresh = True, set[int]()
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
            fresh.add(stage)
        if kind in ("B", "W"):
            here.ends += 1
            here.renewed += stage in fresh
            fresh.discard(stage)
        if kind != "W":
            renewals += renews
            renews = kind != "F"
            sends += 0 <= reader < schedule.stages and schedule.rank_of(reader, micro) != rank
    return RankPasses(passes, sends, renewals, schedule.steps)


Group = Literal["block", "experts", "tile", "last tile", "rows", "around"]
"""The unit that FSDP gathers (parallel/fsdp.py): a block; its experts if ep distributes them; one tile of a large
matrix, the last one of a block where nothing after it saves a tensor; a tile of the embedding, whose rows its gradient
does not need; the other parameters outside the blocks."""


class HeldParameter(NamedTuple):
    """A parameter, or a tile of one, as a tensor and expert rank holds it."""

    name: str
    """Name in the plain model, for equal layers that in the first."""
    shape: tuple[int, ...]
    users: tuple[int, ...]
    """Stages on this rank that compute with it."""
    holders: tuple[int, ...]
    """Pipeline ranks that hold it."""
    copies: int
    """Neighbouring tensor ranks that hold the same: all if it is not cut."""
    cut: bool
    """Whether tensor ranks hold parts of it."""
    summed: bool
    """Whether tensor ranks that hold the whole of it sum their gradients."""
    group: Group
    frozen: bool = False
    """Whether training leaves it as it is: it has no gradient to send."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def expert(self) -> bool:
        return is_expert(self.name)

    def sent_as(self, model: ModelConfig, format: Format, unit: int) -> Format:
        """Returns the format in which it is gathered; in fp8 matrices whose sizes are multiples of `unit`."""
        if format == "fp8" and not (is_narrow(model, self.name) and not any(size % unit for size in self.shape[-2:])):
            return "none"
        return sent_as(self.shape, format)

    def ranges(self, ranks: int) -> ShardRanges:
        """Returns the elements of FSDP2's shard on each of `ranks`: it shards rows, those of all experts' matrices
        together."""
        rows = prod(self.shape[:2]) if len(self.shape) == 3 else self.shape[0]
        return row_ranges(rows, self.size, ranks)


class LayerRun(NamedTuple):
    """Consecutive equal layers, with the parameters of each of them. The parameters outside the blocks are a run of
    one, without layers."""

    layers: range
    held: tuple[HeldParameter, ...]
    full: bool = False
    """Whether these layers are fully recomputed."""

    @property
    def times(self) -> int:
        return len(self.layers) or 1


def held_parameters(
    model: ModelConfig, layout: Layout, vocab: int | None, plan: PipelineWork, pp: int
) -> tuple[LayerRun, ...]:
    """Returns the parameters of a pipeline rank, in the order of the module tree."""
    only = Layout(
        tp=layout.tp,
        sp=layout.sp,
        ep=layout.ep,
        etp=layout.etp,
        tiles=layout.tiles,
        tile=layout.tile,
        recompute=layout.recompute,
        recompute_cut=layout.recompute_cut,
    )
    return _held_by(model, only, vocab, plan.cut, plan.placements, tuple(plan.work[pp].passes))


@cache
def _held_by(
    model: ModelConfig,
    layout: Layout,
    vocab: int | None,
    cut: tuple[range, ...],
    placements: tuple[tuple[int, ...], ...],
    stages: tuple[int, ...],
) -> tuple[LayerRun, ...]:
    def holders(everywhere: list[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(placement[stage] for placement in placements for stage in everywhere))

    of_layer = {layer: stage for stage in stages for layer in cut[stage]}
    kinds = layer_kinds(model, written(layout))
    run_at = {run.start: run for stage in stages for run in _uniform_runs(kinds, cut[stage])}
    last = len(cut) - 1
    ends = {"embed": [0, last] if model.embeds_at_end and last else [0], "positions": [0], "layer_inputs": [0]}
    runs: list[LayerRun] = []
    for owner, named in _by_owner(stage_shapes(model, [cut[stage] for stage in stages], vocab)):
        part, *rest = owner.split(".")
        layer = int(rest[0]) if part == "blocks" else None
        if layer is not None and layer not in run_at:
            continue
        everywhere = ends.get(part, [last]) if layer is None else [of_layer[layer]]
        users = tuple(stage for stage in stages if stage in everywhere)
        layers = range(0) if layer is None else run_at[layer]
        held = tuple(_parts(named, model, layout, users, holders(everywhere)))
        if layers and runs and runs[-1].layers == layers:
            held = runs.pop().held + held
        runs.append(LayerRun(layers, held, layer is not None and kinds[layer].recompute == "full"))
    return tuple(runs)


def _uniform_runs(kinds: Sequence[LayerKind], layers: range) -> Iterator[range]:
    """Yields the runs of layers of one kind."""
    for _, run in groupby(layers, lambda layer: kinds[layer]):
        equal = tuple(run)
        yield range(equal[0], equal[-1] + 1)


def _by_owner(shapes: Shapes) -> Iterator[tuple[str, Shapes]]:
    """Yields the parameters of each module in turn."""
    for owner, names in groupby(shapes, lambda name: name.rpartition(".")[0]):
        yield owner, {name: shapes[name] for name in names}


def _parts(
    named: Shapes, model: ModelConfig, layout: Layout, users: tuple[int, ...], holders: tuple[int, ...]
) -> Iterator[HeldParameter]:
    """Yields one module's parameters, or those of its tiles, one after the other."""
    for name, number, mine in first_rank_tiles(named, layout, model):
        dealt_out = is_expert(name) and layout.ep > 1
        shape = (mine.shape[0] // layout.ep_shard, *mine.shape[1:]) if dealt_out else mine.shape
        group, weight = _group(name, layout, number, model), weight_of(model, name).folded(layout.folds)
        cut, summed = weight.cuts_matrices and layout.tp > 1, weight.is_summed(layout.sp)
        yield HeldParameter(name, shape, users, holders, mine.copies, cut, summed, group, weight.frozen)


def _group(name: str, layout: Layout, number: int | None, model: ModelConfig) -> Group:
    if not name.startswith("blocks."):
        return "around" if number is None else "rows" if name == "embed.weight" else "tile"
    if number is not None:
        # An adapter computes after its matrix's tiles.
        after = needs_sum(model) or is_target(model.lora, "feed_forward", "mlp.down")
        ends = number == layout.tiles - 1 and ".mlp.down." in name and not after
        return "last tile" if ends else "tile"
    return "experts" if is_expert(name) and layout.ep > 1 else "block"
