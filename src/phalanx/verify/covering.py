"""A small set of layouts in which every two features meet: what `phalanx verify` composes.

Bugs of composition are nearly always between two parts. All combinations of the features below are thousands; a greedy
choice of those that bring most pairs together for the first time (Cohen et al. 1997, the AETG system, section 4) is a
few dozen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from phalanx.job import layout_line
from phalanx.job.layout import Layout

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
    ("recompute=selective", "recompute=full"),
    ("loss_chunk=24",),
)
"""Of each row a layout has one entry or none."""

Choice = tuple[int, int]
"""A row of FEATURES, and the entry in it."""


@dataclass(frozen=True)
class _Combination:
    layout: Layout
    pairs: frozenset[tuple[Choice, Choice]]


@cache
def pairs(max_ranks: int) -> tuple[Layout, ...]:
    """Layouts of at most `max_ranks` ranks in which every two entries of different rows meet that can."""
    combinations = _combinations(max_ranks)
    missing = frozenset[tuple[Choice, Choice]]().union(*(combination.pairs for combination in combinations))
    found = []
    while missing:
        # Of several that bring as many together the one with fewer ranks is quicker.
        best = max(combinations, key=lambda each: (len(each.pairs & missing), -each.layout.world))
        found.append(best.layout)
        missing -= best.pairs
        combinations = [each for each in combinations if each.pairs & missing]
    return tuple(found)


def _combinations(max_ranks: int) -> list[_Combination]:
    found = []
    for entries in itertools.product(*(range(-1, len(row)) for row in FEATURES)):
        chosen = [(row, entry) for row, entry in enumerate(entries) if entry >= 0]
        layout = _layout(chosen)
        if layout.world <= max_ranks and layout.shard_ranks % layout.ep == 0:
            found.append(_Combination(layout, frozenset(itertools.combinations(chosen, 2))))
    return found


def _layout(chosen: Sequence[Choice]) -> Layout:
    line = ",".join(FEATURES[row][entry] for row, entry in chosen)
    return layout_line.parse(line) if line else Layout()
