"""The parameters that a rank holds, for its traffic: layers that are alike once, and what is spread over which axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple

from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import Shapes, weight_of
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.held import LayerKind, layer_kinds
from phalanx.cost.traffic.passes import PipelineWork
from phalanx.partition.recompute import written
from phalanx.partition.stages import stage_shapes
from phalanx.partition.tensor_slices import slice_of, tile

Group = Literal["block", "experts", "tile", "last tile", "around"]
"""What FSDP makes whole together (parallel/fsdp.py): a block, or of it the experts that ranks deal out, or one tile of
a large matrix; and what lies around the blocks."""


class HeldParameter(NamedTuple):
    """A parameter, or a tile of one, as a tensor and expert rank holds it."""

    name: str
    """In the plain model, that of the first of the layers that are alike."""
    shape: tuple[int, ...]
    users: tuple[int, ...]
    """Stages on this rank that compute with it."""
    holders: tuple[int, ...]
    """Pipeline ranks that hold it."""
    copies: int
    """Neighbouring tensor ranks that hold the same: all, where it is not cut."""
    cut: bool
    """Whether tensor ranks hold parts of it."""
    summed: bool
    """Whether tensor ranks that hold the whole of it add up their gradients."""
    group: Group

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def expert(self) -> bool:
        return is_expert(self.name)

    def share(self, ranks: int) -> int:
        """Elements of the share that FSDP2 gives each of `ranks`, padding included: it deals out rows, of all experts'
        matrices together."""
        rows = self._rows
        return -(-rows // ranks) * (self.size // rows)

    def dealt(self, ranks: int, rank: int) -> int:
        """Elements of such a share that exist."""
        return max(0, min(self.share(ranks), self.size - self.share(ranks) * rank))

    @property
    def _rows(self) -> int:
        return prod(self.shape[:2]) if len(self.shape) == 3 else self.shape[0]


class LayerRun(NamedTuple):
    """Layers that are alike, one after the other, with what each of them has. What lies around the blocks is a run of
    one, without layers."""

    layers: range
    held: tuple[HeldParameter, ...]
    full: bool = False
    """Whether these layers are computed again as a whole."""

    @property
    def times(self) -> int:
        return len(self.layers) or 1


def held_parameters(
    model: ModelConfig, layout: Layout, vocab: int | None, plan: PipelineWork, pp: int
) -> tuple[LayerRun, ...]:
    """What a pipeline rank holds, in the order of the module tree."""
    only = Layout(
        tp=layout.tp,
        sp=layout.sp,
        ep=layout.ep,
        tiles=layout.tiles,
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
        return tuple(dict.fromkeys(line[stage] for line in placements for stage in everywhere))

    of_layer = {layer: stage for stage in stages for layer in cut[stage]}
    kinds = layer_kinds(model, written(layout))
    alike = {run.start: run for stage in stages for run in _alike(kinds, cut[stage])}
    last = len(cut) - 1
    ends = {"embed": [0, last] if model.tied and last else [0], "positions": [0]}
    found: list[LayerRun] = []
    for owner, named in _by_owner(stage_shapes(model, [cut[stage] for stage in stages], vocab)):
        part, *rest = owner.split(".")
        layer = int(rest[0]) if part == "blocks" else None
        if layer is not None and layer not in alike:
            continue
        everywhere = ends.get(part, [last]) if layer is None else [of_layer[layer]]
        users = tuple(stage for stage in stages if stage in everywhere)
        layers = range(0) if layer is None else alike[layer]
        held = tuple(_parts(named, model, layout, users, holders(everywhere)))
        if layers and found and found[-1].layers == layers:
            held = found.pop().held + held
        found.append(LayerRun(layers, held, layer is not None and kinds[layer].recompute == "full"))
    return tuple(found)


def _alike(kinds: Sequence[LayerKind], layers: range) -> Iterator[range]:
    """Runs of layers of one kind."""
    for _, run in groupby(layers, lambda layer: kinds[layer]):
        same = tuple(run)
        yield range(same[0], same[-1] + 1)


def _by_owner(shapes: Shapes) -> Iterator[tuple[str, Shapes]]:
    """Parameters of each module in turn."""
    for owner, names in groupby(shapes, lambda name: name.rpartition(".")[0]):
        yield owner, {name: shapes[name] for name in names}


def _parts(
    named: Shapes, model: ModelConfig, layout: Layout, users: tuple[int, ...], holders: tuple[int, ...]
) -> Iterator[HeldParameter]:
    """One module's parameters, or those of its tiles, one after the other."""
    tiles = {name: tile(name, shape, layout.tiles, model) for name, shape in named.items()}
    for number in range(max(map(len, tiles.values()))):
        for name, parts in tiles.items():
            if number < len(parts):
                mine = slice_of(name, parts[number].shape, model, layout.tp, 0)
                dealt_out = is_expert(name) and layout.ep > 1
                shape = (mine.shape[0] // layout.ep, *mine.shape[1:]) if dealt_out else mine.shape
                group = _group(name, layout, number)
                summed = weight_of(model, name).is_summed(layout.sp)
                yield HeldParameter(name, shape, users, holders, mine.copies, mine.dim is not None, summed, group)


def _group(name: str, layout: Layout, number: int) -> Group:
    if not name.startswith("blocks."):
        return "around"
    if ".mlp." in name and layout.tiles > 1:
        return "last tile" if ".down." in name and number == layout.tiles - 1 else "tile"
    return "experts" if is_expert(name) and layout.ep > 1 else "block"
