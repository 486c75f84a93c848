"""Hierarchical all-reduce: inside groups of ranks with fast links, between the groups, inside again.

HSDP and two-dimensional rings communicate this way (Mikami et al. 2018, "2D-Torus all-reduce").
"""

from __future__ import annotations

from phalanx.comm.algorithms import ring
from phalanx.comm.algorithms.program import CollectiveProgram, CollectiveStep, chunked, joined, side_by_side


def all_reduce(ranks: int, n: int, group: int) -> CollectiveProgram:
    """Builds a ring reduce-scatter per group, rings across groups over each shard, and a ring all-gather per group.

    The groups are the ranks 0 ... group-1, group ... 2·group-1 and so on. 2(group-1) + 2(P/group-1) steps. A rank sends
    2·D·(P-1)/P bytes as in one ring, but only 2·(D/group)·(G-1)/G of them leave its group, with G = P/group.

    Raises ValueError if the number of ranks is not a multiple of `group`.
    """
    if group < 1 or ranks % group:
        divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise ValueError(f"{ranks} ranks do not divide into groups of {group}; possible sizes: {divisors}")
    groups = ranks // group
    chunks = chunked(n, ranks)
    pieces = [chunks[place * groups : (place + 1) * groups] for place in range(group)]
    shards = [joined(piece) for piece in pieces]
    inside = [range(first, first + group) for first in range(0, ranks, group)]
    between = [range(place, ranks, group) for place in range(group)]
    steps = [
        *_named("inside", side_by_side([ring.reduce_scatter_steps(members, shards) for members in inside])),
        *_named(
            "between",
            side_by_side(
                [
                    ring.reduce_scatter_steps(members, piece) + ring.all_gather_steps(members, piece)
                    for members, piece in zip(between, pieces, strict=True)
                ]
            ),
        ),
        *_named("inside", side_by_side([ring.all_gather_steps(members, shards) for members in inside])),
    ]
    return CollectiveProgram(f"hierarchical all-reduce, groups of {group}", ranks, (n,) * ranks, chunks, tuple(steps))


def _named(where: str, steps: list[CollectiveStep]) -> list[CollectiveStep]:
    return [CollectiveStep(f"{each.phase} {where}", each.messages) for each in steps]
