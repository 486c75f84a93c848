"""A small set of layouts in which every two features meet, for `phalanx verify`.

Composition bugs nearly always involve two features. All combinations of the features below are thousands; a greedy
choice of those that cover most new pairs (Cohen et al. 1997, the AETG system, section 4) is a few dozen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from phalanx.config import layout_line
from phalanx.config.layout import Layout

FEATURES = (
    ("dp_replicate=2",),
    ("dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3"),
    ("cp=2", "cp=2,cp_ulysses=2", "cp=4,cp_ulysses=2"),
    ("tp=2", "tp=2,sp=true"),
    (
        *("pp=2", "pp=2,schedule=interleaved_1f1b", "pp=2,schedule=zb_h1", "pp=2,schedule=zb_v"),
        *("pp=2,schedule=dualpipe", "pp=2,schedule=terapipe,pp_slices=2"),
    ),
    ("ep=2", "ep=4"),
    ("recompute=products", "recompute=selective", "recompute=full"),
    ("loss_chunk=24",),
)
"""The features; a layout has at most one entry of each row."""
ENTRIES = tuple(itertools.chain(*FEATURES))


@dataclass(frozen=True)
class _Combination:
    layout: Layout
    pairs: int
    """The pairs of entries that meet in it, as a bit set with one bit per pair."""


def pairs(max_ranks: int, legal: Callable[[Layout], bool] = lambda _: True) -> tuple[Layout, ...]:
    """Returns layouts of at most `max_ranks` ranks that cover every pair of entries of different rows that any `legal`
    layout can have."""
    allowed, missing, found = cache(legal), -1, list[Layout]()
    left = _combinations(max_ranks)
    while left:
        # Among equally many new pairs, fewer ranks are faster.
        ordered = sorted(left, key=lambda each: (-(each.pairs & missing).bit_count(), each.layout.world))
        best = next((each for each in ordered if allowed(each.layout)), None)
        if best is None:
            break
        found.append(best.layout)
        missing &= ~best.pairs
        left = [each for each in left if each.pairs & missing]
    return tuple(found)


@cache
def _combinations(max_ranks: int) -> list[_Combination]:
    found = []
    for entries in itertools.product(*(("", *row) for row in FEATURES)):
        chosen = [entry for entry in entries if entry]
        layout = Layout(**{name: value for entry in chosen for name, value in _settings(entry).items()})
        if layout.world <= max_ranks and layout.shard_ranks % layout.ep == 0:
            found.append(_Combination(layout, sum(_bit(*pair) for pair in itertools.combinations(chosen, 2))))
    return found


@cache
def _settings(entry: str) -> dict[str, Any]:
    changed = asdict(layout_line.parse(entry))
    return {name: value for name, value in changed.items() if value != getattr(Layout(), name)}


@cache
def _bit(first: str, second: str) -> int:
    return 1 << (ENTRIES.index(first) * len(ENTRIES) + ENTRIES.index(second))
