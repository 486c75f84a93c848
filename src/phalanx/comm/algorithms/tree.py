"""Binomial-tree collectives: the number of finished ranks doubles per step (Thakur, Rabenseifner & Gropp 2005).

They take the fewest steps possible, each with the whole tensor: good for short messages.
"""

from __future__ import annotations

from phalanx.comm.algorithms.program import (
    ChunkMessage,
    CollectiveProgram,
    CollectiveStep,
    check_root,
    chunked,
    reversed_as_copies,
    step,
)


def all_reduce(ranks: int, n: int) -> CollectiveProgram:
    """Builds a reduce to rank 0 and a broadcast: 2·ceil(log2 P) steps."""
    steps = _reduce_steps(ranks, n, root=0)
    return _program("tree all-reduce", ranks, n, steps + reversed_as_copies("broadcast", steps))


def reduce(ranks: int, n: int, root: int = 0) -> CollectiveProgram:
    """Builds a reduce to `root`: ceil(log2 P) steps; every other rank sends D once and is left partially reduced."""
    return _program("tree reduce", ranks, n, _reduce_steps(ranks, n, root))


def broadcast(ranks: int, n: int, root: int = 0) -> CollectiveProgram:
    """Builds a broadcast from `root`: the reduction run backwards, ceil(log2 P) steps.

    In each step every rank that has the tensor sends all of it to one that does not.
    """
    return _program("tree broadcast", ranks, n, reversed_as_copies("broadcast", _reduce_steps(ranks, n, root)))


def _reduce_steps(ranks: int, n: int, root: int) -> list[CollectiveStep]:
    """Returns the steps, ranks counted from the root: in step k, rank r with lowest set bit k sends to r - 2^k."""
    check_root(root, ranks)
    whole = range(n)
    return [
        step(
            "reduce",
            (
                ChunkMessage((root + place) % ranks, (root + place - distance) % ranks, whole, "reduce")
                for place in range(distance, ranks, 2 * distance)
            ),
        )
        for distance in (1 << k for k in range((ranks - 1).bit_length()))
    ]


def _program(name: str, ranks: int, n: int, steps: list[CollectiveStep]) -> CollectiveProgram:
    return CollectiveProgram(name, ranks, (n,) * ranks, chunked(n, 1), tuple(steps))
