"""The parameters that a rank holds, for its traffic: equal layers once, with the axes that each is sharded over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple

from phalanx.blocks.lora import is_target
from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import Shapes, weight_of
from phalanx.blocks.residual import needs_sum
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.held import LayerKind, layer_kinds
from phalanx.cost.traffic.passes import PipelineWork
from phalanx.partition.matrices import ShardRanges, row_ranges
from phalanx.partition.recompute import written
from phalanx.partition.stages import stage_shapes
from phalanx.partition.tiles import first_rank_tiles

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
    ends = {"embed": [0, last] if model.tied and last else [0], "positions": [0]}
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
        shape = (mine.shape[0] // layout.ep, *mine.shape[1:]) if dealt_out else mine.shape
        group, weight = _group(name, layout, number, model), weight_of(model, name)
        cut, summed = weight.dim is not None and layout.tp > 1, weight.is_summed(layout.sp)
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
