"""The part of every parameter that a tensor-parallel rank holds, by arithmetic on names and shapes alone.

Matrices that read the residual stream are cut by rows (their outputs), those that write to it by columns (their
inputs), so that a block needs no communication between the two (Shoeybi et al. 2019, section 3). The matrices of
experts, stacked along a leading dimension, are cut in the same way. In latent attention (DeepSeek-V2, section 2.1) the
matrices that make heads are cut into equal numbers of whole heads; the compressing matrices and their norms serve all
heads and stay whole. The vocabulary is cut by rows and padded to equal parts. Every parameter in no list is whole on
every rank. Expert parallelism distributes whole experts, in equal runs, independently of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.config.model import ModelConfig

ROWS = (
    *("attn.wq.weight", "attn.wq.bias", "attn.wq_b.weight", "attn.wq_b.bias", "attn.wkv_b.weight", "attn.wkv_b.bias"),
    *("mlp.up.weight", "mlp.up.bias", "mlp.gate.weight", "mlp.gate.bias"),
    *("moe.shared.up.weight", "moe.shared.up.bias", "moe.shared.gate.weight", "moe.shared.gate.bias"),
)
KEY_VALUE_ROWS = ("attn.wk.weight", "attn.wk.bias", "attn.wv.weight", "attn.wv.bias")
COLUMNS = ("attn.wo.weight", "mlp.down.weight", "moe.shared.down.weight")
EXPERT_ROWS = ("moe.experts.up.weight", "moe.experts.up.bias", "moe.experts.gate.weight", "moe.experts.gate.bias")
EXPERT_COLUMNS = ("moe.experts.down.weight",)
TILED_ROWS = ("mlp.up.weight", "mlp.up.bias", "mlp.gate.weight", "mlp.gate.bias")
TILED_COLUMNS = ("mlp.down.weight",)
VOCABULARY_ROWS = ("embed.weight", "head.weight")
WITHIN = (
    *("attn.wq_a.weight", "attn.wq_a.bias", "attn.q_norm.weight", "attn.q_norm.bias"),
    *("attn.wkv_a.weight", "attn.wkv_a.bias", "attn.kv_norm.weight", "attn.kv_norm.bias"),
    *("moe.router.weight", "moe.experts.down.bias", "moe.shared.down.bias"),
)
"""Parameters that are whole on every rank but lie between cut ones: each rank finds its own part of their gradients."""
BALANCING = "router.bias"
"""How the names of balancing biases end: every rank that computes a router finds the whole of their gradients."""
MEETING = 256
"""Bytes that each replica says when replicas that work apart meet: one for the request to stop, then text."""


@dataclass(frozen=True)
class TensorSlice:
    """The part of a parameter that one tensor rank holds."""

    whole: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int | None = None
    """The dimension that is cut; None where every rank holds all of it."""
    start: int = 0
    """First row (column) held, in the whole."""
    size: int = 0
    """Rows (columns) held, padding included."""
    copies: int = 1
    """How many neighbouring tensor ranks hold the same part."""
    first: bool = True
    """Whether this rank is the first of those: the one that counts in norms."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this part."""
        return tuple(self.size if dim == self.dim else n for dim, n in enumerate(self.whole))

    @property
    def real(self) -> int:
        """Rows (columns) of this part that exist in the whole parameter; the rest is padding."""
        assert self.dim is not None, "only a cut dimension is padded"
        return max(0, min(self.size, self.whole[self.dim] - self.start))


def piece(name: str, whole: tuple[int, ...], model: ModelConfig, tp: int, rank: int) -> TensorSlice:
    """Returns the part of the parameter `name` that tensor rank `rank` of `tp` holds. If there are fewer key/value
    heads than tensor ranks, several ranks hold each. The layout must be legal: tp divides the heads and the widths of
    MLP and experts, and of key/value heads and tp one divides the other."""
    if tp == 1:
        return TensorSlice(whole)
    if name.endswith(VOCABULARY_ROWS):
        size = padded_vocabulary(whole[0], tp) // tp
        return TensorSlice(whole, 0, rank * size, size)
    if name.endswith(KEY_VALUE_ROWS) and model.kv_heads < tp:
        copies = tp // model.kv_heads
        return TensorSlice(whole, 0, rank // copies * model.head_size, model.head_size, copies, rank % copies == 0)
    for dim, names in enumerate((ROWS + KEY_VALUE_ROWS, COLUMNS + EXPERT_ROWS, EXPERT_COLUMNS)):
        if name.endswith(names):
            size = whole[dim] // tp
            return TensorSlice(whole, dim, rank * size, size)
    return TensorSlice(whole, copies=tp, first=rank == 0)


def is_expert(name: str) -> bool:
    """Returns whether the parameter `name` belongs to routed experts, stacked along its leading dimension."""
    return "moe.experts." in name


def experts_of(n_experts: int, ep: int, rank: int) -> range:
    """Returns the routed experts of rank `rank` of `ep` expert-parallel ranks: equal runs in order. ep must divide the
    experts."""
    each = n_experts // ep
    return range(rank * each, (rank + 1) * each)


def tile(name: str, whole: tuple[int, ...], tiles: int) -> tuple[TensorSlice, ...]:
    """Returns the part of the parameter `name` in each of `tiles` tiles of the MLP. A parameter that is not cut has one
    part, the whole; the bias of the matrix cut by columns belongs to its first tile. `tiles` must divide the MLP's
    width."""
    if tiles == 1 or not name.endswith(TILED_ROWS + TILED_COLUMNS):
        return (TensorSlice(whole),)
    dim = 0 if name.endswith(TILED_ROWS) else 1
    size = whole[dim] // tiles
    return tuple(TensorSlice(whole, dim, number * size, size) for number in range(tiles))


def groups(sizes: Sequence[int], least: float) -> list[list[int]]:
    """Groups parameters of `sizes` bytes, by their indices and in order, so that each group but the last has at least
    `least` bytes."""
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
    """Returns the rows of an embedding or head over all tensor ranks: the vocabulary, rounded up to a multiple of
    tp."""
    return -(-vocab // tp) * tp
