"""Ring collectives: every rank sends only to its right neighbour, one chunk per step (Patarasuk & Yuan 2009).

They send the fewest bytes possible, at a latency that grows with the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.comm.algorithms.program import ChunkMessage, CollectiveProgram, CollectiveStep, chunked, step


def all_reduce(ranks: int, n: int) -> CollectiveProgram:
    """Builds a reduce-scatter and an all-gather: 2(P-1) steps, 2·D·(P-1)/P bytes sent per rank."""
    chunks = chunked(n, ranks)
    steps = reduce_scatter_steps(range(ranks), chunks) + all_gather_steps(range(ranks), chunks)
    return CollectiveProgram("ring all-reduce", ranks, (n,) * ranks, chunks, tuple(steps))


def reduce_scatter(ranks: int, n: int) -> CollectiveProgram:
    """Builds a reduce-scatter, chunk r to rank r: P-1 steps, D·(P-1)/P bytes. Other chunks stay half reduced."""
    chunks = chunked(n, ranks)
    return CollectiveProgram(
        "ring reduce-scatter", ranks, (n,) * ranks, chunks, tuple(reduce_scatter_steps(range(ranks), chunks))
    )


def all_gather(ranks: int, n: int) -> CollectiveProgram:
    """Builds an all-gather of chunk r from rank r: P-1 steps, D·(P-1)/P bytes."""
    chunks = chunked(n, ranks)
    return CollectiveProgram(
        "ring all-gather", ranks, (n,) * ranks, chunks, tuple(all_gather_steps(range(ranks), chunks))
    )


def reduce_scatter_steps(members: Sequence[int], chunks: Sequence[range]) -> list[CollectiveStep]:
    """Returns steps in which chunk c starts at member c+1 and is reduced at every member until it reaches member c."""
    return [_turn("reduce-scatter", members, chunks, turn + 1) for turn in range(len(members) - 1)]


def all_gather_steps(members: Sequence[int], chunks: Sequence[range]) -> list[CollectiveStep]:
    """Returns steps in which chunk c starts at member c and travels round to member c-1."""
    return [_turn("all-gather", members, chunks, turn) for turn in range(len(members) - 1)]


def _turn(phase: str, members: Sequence[int], chunks: Sequence[range], behind: int) -> CollectiveStep:
    """Returns the step in which member i sends chunk i - behind to its right neighbour."""
    count = len(members)
    return step(
        phase,
        (
            ChunkMessage(
                members[i],
                members[(i + 1) % count],
                chunks[(i - behind) % count],
                "reduce" if phase == "reduce-scatter" else "copy",
            )
            for i in range(count)
        ),
    )
