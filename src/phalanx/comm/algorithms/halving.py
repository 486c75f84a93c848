"""Recursive halving and doubling all-reduce (Rabenseifner; Thakur, Rabenseifner & Gropp 2005).

It sends as many bytes as the ring in a number of steps that grows with the logarithm of the ranks.
"""

from __future__ import annotations

from phalanx.comm.algorithms.program import (
    ChunkMessage,
    CollectiveProgram,
    CollectiveStep,
    chunked,
    joined,
    reversed_as_copies,
    step,
)


def all_reduce(ranks: int, n: int) -> CollectiveProgram:
    """Builds a halving reduce-scatter, then a doubling all-gather: 2·log2 P steps, 2·D·(P-1)/P bytes, P a power of two.

    The ranks above the largest power of two Q first fold into ranks 0 ... P-Q-1 and get the result at the end: two more
    steps of D each.
    """
    power = 1 << (ranks.bit_length() - 1) if ranks > 0 else 0
    chunks = chunked(n, power)
    extra = range(power, ranks)
    fold = [step("fold", (ChunkMessage(rank, rank - power, range(n), "reduce") for rank in extra))] if extra else []
    halving = [_exchange(power, chunks, k) for k in range(power.bit_length() - 1)]
    back = reversed_as_copies("doubling all-gather", halving) + reversed_as_copies("unfold", fold)
    return CollectiveProgram("halving-doubling all-reduce", ranks, (n,) * ranks, chunks, tuple(fold + halving + back))


def _exchange(power: int, chunks: tuple[range, ...], k: int) -> CollectiveStep:
    """Builds one exchange: ranks 2^k apart hold the same window of chunks; each keeps the half selected by its bit k.

    The nearest ranks exchange the longest messages.
    """
    messages = []
    for rank in range(power):
        start, length = 0, power
        for bit in range(k + 1):
            length //= 2
            # The bits below k chose this rank's window; in the last round, the half that its partner keeps.
            owner = rank if bit < k else rank ^ (1 << k)
            start += length * (owner >> bit & 1)
        messages.append(ChunkMessage(rank, rank ^ (1 << k), joined(chunks[start : start + length]), "reduce"))
    return step("halving reduce-scatter", messages)
