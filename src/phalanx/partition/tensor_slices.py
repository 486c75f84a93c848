"""The slice of every parameter that a tensor-parallel rank holds: a view of the weights of phalanx.blocks.

Matrices that read the residual stream are cut by rows (their outputs), those that write to it by columns (their
inputs), so that a block needs no communication between the two (Shoeybi et al. 2019, section 3). The matrices of
experts, stacked along a leading dimension, are cut in the same way. In latent attention (DeepSeek-V2, section 2.1) the
matrices that make heads are cut into equal numbers of whole heads; the compressing matrices and their norms serve all
heads and stay whole. The vocabulary is cut by rows and padded to equal slices. All other parameters are whole on every
rank. Expert parallelism distributes whole experts, in equal runs, independently of tensor parallelism; where tensor
ranks are ranks of ep (etp=1), their slices are runs of whole experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from phalanx.blocks.attention import LEAST_RUN, window_run, zigzag_runs
from phalanx.blocks.kinds import ATTENTION, block_kinds, chosen_kinds
from phalanx.blocks.operator import Weight, is_expert
from phalanx.blocks.parameters import Shapes, weight_of
from phalanx.blocks.residual import VOCABULARY
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.derived import slices_of

STOP_MESSAGE_BYTES = 256
"""Bytes that each independent replica sends when replicas synchronise: one for the request to stop, then text."""
PUSH_BYTES, REPLY_BYTES = 7 * 8, 2 * 8
"""Bytes beside a gradient that a replica pushes to a parameter server, and beside the parameters of the answer."""


@dataclass(frozen=True)
class TensorSlice:
    """The slice of a parameter that one tensor rank holds."""

    whole: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int | None = None
    """Dimension that is cut; None if every rank holds the whole parameter."""
    start: int = 0
    """First row (column) of the slice in the whole parameter."""
    size: int = 0
    """Rows (columns) of the slice, padding included."""
    copies: int = 1
    """Number of neighbouring tensor ranks that hold the same slice."""
    first: bool = True
    """Whether this rank is the first of those, which counts in norms."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(self.size if dim == self.dim else n for dim, n in enumerate(self.whole))

    @property
    def cuts_matrices(self) -> bool:
        """True if ranks hold parts of the matrices, not whole ones of a stack of experts."""
        return self.dim is not None and self.dim >= len(self.whole) - 2

    @property
    def real(self) -> int:
        """Rows (columns) of the slice that exist in the whole parameter; the rest is padding."""
        assert self.dim is not None, "only a cut dimension is padded"
        return max(0, min(self.size, self.whole[self.dim] - self.start))

    @property
    def padding(self) -> bool:
        """True if some of the rows (columns) do not exist in the whole parameter."""
        return self.dim is not None and self.real < self.size

    def in_blocks(self, block: int) -> TensorSlice:
        """Returns the slice of a tensor with one element for each `block` elements of a row (last dimension)."""
        whole = (*self.whole[:-1], self.whole[-1] // block)
        if self.dim != len(whole) - 1:
            return replace(self, whole=whole)
        return replace(self, whole=whole, start=self.start // block, size=self.size // block)


def slice_of(
    name: str, whole: tuple[int, ...], model: ModelConfig, tp: int, rank: int, *, folds: bool = False
) -> TensorSlice:
    """Returns the slice of the parameter `name` that tensor rank `rank` of `tp` holds, whole experts if the layout
    `folds`. Key/value heads fewer than tensor ranks are held by several ranks each. The layout must be legal: heads and
    the widths of MLP and experts divide by tp, and of key/value heads and tp one divides the other."""
    if tp == 1:
        return TensorSlice(whole)
    weight = weight_of(model, name).folded(folds)._replace(shape=whole)
    if weight.dim is None:
        return TensorSlice(whole, copies=tp, first=rank == 0)
    size = weight.part(tp)
    copies = 1 if weight.padded else max(1, tp * size // whole[weight.dim])
    return TensorSlice(whole, weight.dim, rank // copies * size, size, copies, rank % copies == 0)


def experts_of(n_experts: int, ep: int, rank: int) -> range:
    """Returns the routed experts of rank `rank` of `ep` ranks: equal runs in order. ep must divide the experts."""
    each = n_experts // ep
    return range(rank * each, (rank + 1) * each)


def experts_at(n_experts: int, layout: Layout, rank: int) -> range:
    """Returns the routed experts of a layout's rank `rank` of ep: with tensor ranks among them, which change fastest,
    a part of the run of experts that its tensor rank has."""
    if layout.folds:
        shard, tensor = divmod(rank, layout.tp)
        rank = tensor * layout.ep_shard + shard
    return experts_of(n_experts, layout.ep, rank)


def in_order_of_ranks(n_experts: int, layout: Layout, experts: Any) -> Any:
    """Returns the numbers of some `experts` in the order of the ranks of ep: a tensor rank among them has a run of
    experts, of which each rank along dp_shard × cp has a run in turn."""
    each, tp = n_experts // layout.ep, layout.tp if layout.folds else 1
    of_tensor_rank, within = experts // (n_experts // tp), experts % (n_experts // tp)
    return (within // each * tp + of_tensor_rank) * each + within % each


def in_buckets(sizes: Sequence[int], least: float) -> list[list[int]]:
    """Groups parameters of `sizes` bytes in order into buckets of indices; all but the last have >= `least` bytes."""
    found: list[list[int]] = [[]]
    size = 0
    for place, more in enumerate(sizes):
        if size >= least:
            found.append([])
            size = 0
        found[-1].append(place)
        size += more
    return found


def padded_vocabulary(vocab: int, tp: int) -> int:
    """Returns the rows of an embedding or head on all tensor ranks together: the vocabulary, padded to equal parts."""
    return VOCABULARY._replace(shape=(vocab, 1)).part(tp) * tp


ENDS = {"embed.weight": "embedding", "head.weight": "head"}
"""The names by which `layout.tile` means the matrices of the vocabulary."""


def layers_of(name: str) -> str:
    """Returns the name by which `layout.tile` means the layer of a parameter, which has its name in a block."""
    if name in ENDS:
        return ENDS[name]
    if is_expert(name):
        return "experts"
    return "attention" if name.startswith("attn.") else "mlp"


def is_tiled(weight: Weight, layout: Layout) -> bool:
    """Returns whether a layout runs a weight in tiles."""
    return layout.tiles > 1 and weight.tiled and layers_of(weight.name) in layout.tiled_layers


def head_tiles(model: ModelConfig, layout: Layout) -> int:
    """Returns the number of tiles of the head, each of which has its own logits; 1: all logits exist at once."""
    return layout.tiles if not model.tied and is_tiled(weight_of(model, "head.weight"), layout) else 1


def too_few_rows(rows: int, tiles: int) -> str:
    """Returns why the rows of the vocabulary that a tensor rank holds do not go into so many tiles; empty if they
    do."""
    if rows >= tiles:
        return ""
    return (
        f"a tensor rank's {rows} rows of the vocabulary cannot fill tiles {tiles}; nearest legal: tiles={rows}, or a "
        "tile without embedding and head"
    )


def in_tiles(
    slices: Mapping[str, Sequence[TensorSlice]], layout: Layout, model: ModelConfig
) -> Iterator[tuple[str, int | None, tuple[TensorSlice, ...]]]:
    """Yields name, tile and slices of every parameter, given by what each tensor rank holds of it, in the order of the
    module tree: of a module that runs in tiles first what no tile has (tile None), then tile after tile. The layout
    must be legal: what a rank holds divides by the tiles, or has a row of the vocabulary for each."""
    for _, names in groupby(slices, lambda name: name.rpartition(".")[0]):
        tiled = list[str]()
        for name in names:
            if is_tiled(weight_of(model, name), layout):
                tiled.append(name)
            else:
                yield name, None, tuple(slices[name])
        for number in range(layout.tiles if tiled else 0):
            for name in tiled:
                dim = weight_of(model, name).dim
                yield name, number, tuple(_tile(held, dim, layout.tiles, number) for held in slices[name])


def first_rank_tiles(
    shapes: Shapes, layout: Layout, model: ModelConfig
) -> Iterator[tuple[str, int | None, TensorSlice]]:
    """Yields what the first tensor rank, which holds at least as much as any other, has of parameters of these whole
    `shapes`: name, tile and slice, as `in_tiles`."""
    slices = {name: (slice_of(name, whole, model, layout.tp, 0, folds=layout.folds),) for name, whole in shapes.items()}
    for name, number, (part,) in in_tiles(slices, layout, model):
        yield name, number, part


def _tile(held: TensorSlice, dim: int | None, tiles: int, number: int) -> TensorSlice:
    """Returns tile `number` of what a rank holds."""
    assert dim is not None, "only what tensor ranks cut runs in tiles"
    start, stop = (held.shape[dim] * end // tiles for end in (number, number + 1))
    return replace(held, dim=dim, start=held.start + start, size=stop - start)


def rank_positions(layout: Layout, seq_len: int, rank: int, slices: int = 1) -> list[range]:
    """Returns the positions that context-parallel rank `rank` holds, as ranges in storage order. Sequences that are
    pipelined in `slices` equal parts are distributed part by part. The layout must be legal."""
    tokens = seq_len // slices
    runs = rank_share(layout, ring_positions(layout, tokens, cp_coordinates(layout, rank)[0]), rank)
    return [range(run.start + part * tokens, run.stop + part * tokens) for part in range(slices) for run in runs]


def cp_coordinates(layout: Layout, rank: int) -> tuple[int, int]:
    """Returns the rank's position in the ring, and its position among the ranks that exchange heads."""
    inner, outer = (
        (layout.cp_ulysses, layout.ring) if layout.cp_inner == "ulysses" else (layout.ring, layout.cp_ulysses)
    )
    far, near = rank // inner % outer, rank % inner
    return (far, near) if layout.cp_inner == "ulysses" else (near, far)


def ring_positions(layout: Layout, tokens: int, place: int) -> list[range]:
    """Returns the positions that the ranks at one ring position hold together, of a sequence of `tokens` tokens."""
    return zigzag_runs(tokens, layout.ring, place)


def window_blocks(queries: range, keys: range, window: int) -> Iterator[tuple[range, range]]:
    """Yields blocks of queries and keys, by position, that hold all pairs that a causal mask and a window leave of
    `queries` and `keys`: runs of queries, each with the keys that some of them see.

    One block suffices where the window reaches over all."""
    queries = range(max(queries.start, keys.start), min(queries.stop, keys.stop - 1 + window))
    length = window if queries.stop - keys.start <= window else window_run(window, LEAST_RUN)
    for start in range(queries.start, queries.stop, length):
        run = range(start, min(start + length, queries.stop))
        seen = range(max(keys.start, run.start - window + 1), min(keys.stop, run.stop))
        if seen:
            yield run, seen


def rank_share(layout: Layout, runs: Sequence[range], rank: int) -> list[range]:
    """Returns the equal share of a context-parallel rank in the tokens of its ring position."""
    share = sum(map(len, runs)) // layout.cp_ulysses
    start, found = cp_coordinates(layout, rank)[1] * share, []
    for run in runs:
        part = run[max(0, start) : max(0, start + share)]
        start -= len(run)
        if part:
            found.append(part)
    return found


def cut_by_position(model: ModelConfig, layout: Layout) -> str:
    """Returns why documents do not decide which tokens context-parallel ranks hold; empty if they do."""
    if layout.cp == 1 or layout.cp_balance == "position":
        return "nothing to balance"
    if slices_of(layout) > 1:
        return "slices of sequences are pipelined one after the other, each cut by position; schedule=1f1b does not"
    if model.moe.capacity:
        return "experts with a capacity count whole sequences by position; model.moe.capacity=0 does not"
    if any(ATTENTION[name].gathers for name in chosen_kinds(model, "attention")):
        return "sparse attention chooses among keys by position; model.sparse.top_k=0 does not"
    if any(ATTENTION[kind.attention].by_heads for kind in block_kinds(model)):
        return "recurrent layers exchange whole sequences by position; model.attention=attention does not"
    return ""
