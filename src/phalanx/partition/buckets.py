"""The places of parameters in flat buckets: the optimizer's granularity decides where a rank's share may end."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.optimizers.entry import BLOCK, Granularity, Shape, matrix_elements
from phalanx.partition.matrices import BucketCut, bucket_cut, equal_cut


def granular_cut(
    granularity: Granularity, sizes: Sequence[int], named: Sequence[tuple[str, Shape]], ranks: int
) -> BucketCut:
    """Returns the places of the parameters of a bucket in shares of `ranks` ranks. `sizes` are the elements of which a
    rank has a replica, `named` the parameters' names and the shapes with which a rank computes."""
    if granularity == "element" or ranks == 1:
        return equal_cut(sizes, ranks)
    if granularity == "block":
        return _aligned_cut(sizes, ranks)
    return bucket_cut(tuple(sizes), tuple(matrix_elements(name, shape, shape) for name, shape in named), ranks)


def _aligned_cut(sizes: Sequence[int], ranks: int) -> BucketCut:
    """Returns parameters that begin at multiples of BLOCK elements, in shares of such multiples."""
    blocks = equal_cut([-(-size // BLOCK) for size in sizes], ranks)
    return BucketCut(tuple(start * BLOCK for start in blocks.starts), blocks.each * BLOCK)
