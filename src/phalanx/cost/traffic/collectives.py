"""Bytes that a collective sends, by the formulas of its bandwidth-optimal algorithm."""

from __future__ import annotations

from phalanx.blocks.operator import Collective


def sent_bytes(collective: Collective, payload: float, ranks: int) -> float:
    """Returns the bytes that each of `ranks` ranks sends for a collective over a tensor of `payload` bytes.

    `payload` is the whole tensor: an all-gather's output, a reduce-scatter's input. An all-reduce is a reduce-scatter
    and an all-gather: 2 D (P-1)/P (Thakur et al. 2005, sections 4.2 and 4.5); a broadcast counts as a scatter and an
    all-gather, on average over the ranks. `send` is one message, counted by its sender.
    """
    if collective == "send":
        return payload
    passes = 2 if collective in ("all_reduce", "broadcast") else 1
    return passes * payload * (ranks - 1) / ranks
