"""Collectives whose messages go straight from owner to user, one after the other."""

from __future__ import annotations

from phalanx.comm.algorithms.program import (
    ChunkMessage,
    CollectiveProgram,
    check_root,
    chunked,
    reversed_as_copies,
    step,
)


def naive_all_reduce(ranks: int, n: int) -> CollectiveProgram:
    """Builds an all-reduce through rank 0: 2(P-1) steps of D each; rank 0's traffic is 2·D·(P-1)."""
    check_root(0, ranks)
    inward = [step("to rank 0", [ChunkMessage(rank, 0, range(n), "reduce")]) for rank in range(1, ranks)]
    outward = [step("from rank 0", [ChunkMessage(0, rank, range(n), "copy")]) for rank in range(1, ranks)]
    return CollectiveProgram("naive all-reduce", ranks, (n,) * ranks, chunked(n, 1), tuple(inward + outward))


def scatter(ranks: int, n: int, root: int = 0) -> CollectiveProgram:
    """Builds a scatter, which puts chunk r of `root` on rank r: P-1 steps; the root sends D less its own chunk."""
    check_root(root, ranks)
    chunks = chunked(n, ranks)
    steps = [
        step("scatter", [ChunkMessage(root, rank, chunks[rank], "copy")])
        for rank in ((root + place) % ranks for place in range(1, ranks))
    ]
    return CollectiveProgram("scatter", ranks, (n,) * ranks, chunks, tuple(steps))


def gather(ranks: int, n: int, root: int = 0) -> CollectiveProgram:
    """Builds a gather, which puts chunk r of rank r on `root`: the scatter run backwards."""
    outward = scatter(ranks, n, root)
    inward = reversed_as_copies("gather", outward.steps)
    return CollectiveProgram("gather", ranks, outward.sizes, outward.chunks, tuple(inward))


def all_to_all(ranks: int, n: int) -> CollectiveProgram:
    """Builds an all-to-all, which puts chunk j of rank r on rank j as part r: P-1 pairwise steps, D·(P-1)/P bytes.

    The buffer of rank r holds the `n` elements of its input and then its result: P parts as long as chunk r. The part
    that a rank gets from itself is in place from the start.
    """
    chunks = chunked(n, ranks)
    steps = [
        step(
            "pairwise exchange",
            (
                ChunkMessage(rank, to, chunks[to], "copy", shift=n + rank * len(chunks[to]) - chunks[to].start)
                for rank, to in ((rank, (rank + distance) % ranks) for rank in range(ranks))
            ),
        )
        for distance in range(1, ranks)
    ]
    return CollectiveProgram(
        "pairwise all-to-all", ranks, tuple(n + ranks * len(chunk) for chunk in chunks), chunks, tuple(steps)
    )
