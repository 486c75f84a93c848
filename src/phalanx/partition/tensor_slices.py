"""The slice of every parameter that a tensor-parallel rank holds: a view of the weights of phalanx.blocks.

Matrices that read the residual stream are cut by rows (their outputs), those that write to it by columns (their
inputs), so that a block needs no communication between the two (Shoeybi et al. 2019, section 3). The matrices of
experts, stacked along a leading dimension, are cut in the same way. In latent attention (DeepSeek-V2, section 2.1) the
matrices that make heads are cut into equal numbers of whole heads; the compressing matrices and their norms serve all
heads and stay whole. The vocabulary is cut by rows and padded to equal slices. All other parameters are whole on every
rank. Expert parallelism distributes whole experts, in equal runs, independently of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.blocks.ends import VOCABULARY
from phalanx.blocks.parameters import weight_of
from phalanx.config.model import ModelConfig

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


def slice_of(name: str, whole: tuple[int, ...], model: ModelConfig, tp: int, rank: int) -> TensorSlice:
    """Returns the slice of the parameter `name` that tensor rank `rank` of `tp` holds. Key/value heads fewer than
    tensor ranks are held by several ranks each. The layout must be legal: heads and the widths of MLP and experts
    divide by tp, and of key/value heads and tp one divides the other."""
    if tp == 1:
        return TensorSlice(whole)
    weight = weight_of(model, name)._replace(shape=whole)
    if weight.dim is None:
        return TensorSlice(whole, copies=tp, first=rank == 0)
    size = weight.part(tp)
    copies = 1 if weight.padded else max(1, tp * size // whole[weight.dim])
    return TensorSlice(whole, weight.dim, rank // copies * size, size, copies, rank % copies == 0)


def experts_of(n_experts: int, ep: int, rank: int) -> range:
    """Returns the routed experts of rank `rank` of `ep` ranks: equal runs in order. ep must divide the experts."""
    each = n_experts // ep
    return range(rank * each, (rank + 1) * each)


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
