"""The second copy of ZeRO-3's parameters inside a node (hpZ: Wang et al. 2023, "ZeRO++", section 3.2): which ranks keep
it together.

`layout.hpz` neighbours of dp_shard × cp keep one copy. Experts that `ep` distributes are sharded over every ep-th of
these ranks, so hpz / ep of them keep a copy of the same experts.
"""

from __future__ import annotations

from phalanx.config.layout import Layout
from phalanx.nearest import divisors


def is_copied(layout: Layout) -> bool:
    """Returns whether ranks keep a second copy of the parameters."""
    return layout.hpz > 1 and layout.zero == 3 and layout.shard_ranks > 1


def near_ranks(layout: Layout, *, experts: bool = False) -> int:
    """Returns how many ranks keep one second copy together, of experts that ep distributes or of other parameters; 1
    without a copy."""
    return max(1, layout.hpz // layout.ep) if experts else layout.hpz


def legal_hpz(layout: Layout) -> list[int]:
    """Returns the values of `hpz` that fit the layout's ranks, 1 (no copy) first: they divide the ranks that shard the
    state and are fewer, and ep divides them."""
    ranks = layout.shard_ranks
    return [1, *(n for n in divisors(ranks) if 1 < n < ranks and n % layout.ep == 0)]
