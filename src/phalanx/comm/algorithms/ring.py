"""Ring collectives: every rank sends to its right neighbour only, one chunk a step (Patarasuk & Yuan 2009).

They send the fewest bytes possible, at a latency that grows with the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.comm.algorithms.plan import ChunkMessage, CollectiveProgram, CollectiveStep, chunked, step


def all_reduce(ranks: int, n: int) -> CollectiveProgram:
    """Reduce-scatter, then all-gather: 2(P-1) steps, 2·D·(P-1)/P bytes sent by each rank."""
    chunks = chunked(n, ranks)
    steps = reduce_scatter_steps(range(ranks), chunks) + all_gather_steps(range(ranks), chunks)
    return CollectiveProgram("ring all-reduce", ranks, (n,) * ranks, chunks, tuple(steps))


def reduce_scatter(ranks: int, n: int) -> CollectiveProgram:
    """Chunk r of the result on rank r: P-1 steps, D·(P-1)/P bytes. The other chunks are left half reduced."""
    chunks = chunked(n, ranks)
    return CollectiveProgram(
        "ring reduce-scatter", ranks, (n,) * ranks, chunks, tuple(reduce_scatter_steps(range(ranks), chunks))
    )


def all_gather(ranks: int, n: int) -> CollectiveProgram:
    """Chunk r of rank r on every rank: P-1 steps, D·(P-1)/P bytes."""
    chunks = chunked(n, ranks)
    return CollectiveProgram(
        "ring all-gather", ranks, (n,) * ranks, chunks, tuple(all_gather_steps(range(ranks), chunks))
    )


def reduce_scatter_steps(members: Sequence[int], chunks: Sequence[range]) -> list[CollectiveStep]:
    """Chunk c sets out from member c+1 and collects a share at every member until it arrives at member c."""
    return [_turn("reduce-scatter", members, chunks, turn + 1) for turn in range(len(members) - 1)]


def all_gather_steps(members: Sequence[int], chunks: Sequence[range]) -> list[CollectiveStep]:
    """Chunk c sets out from member c and goes round to member c-1."""
    return [_turn("all-gather", members, chunks, turn) for turn in range(len(members) - 1)]


def _turn(phase: str, members: Sequence[int], chunks: Sequence[range], behind: int) -> CollectiveStep:
    """Member i sends chunk i - behind to its right neighbour."""
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
