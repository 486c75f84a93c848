"""Placements of stages on ranks."""

from __future__ import annotations


def round_robin(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Assigns stages round-robin `chunks` times: stage s on rank s mod P (Narayanan et al. 2021, section 2.2)."""
    return tuple(range(ranks)) * chunks


def v_shape(ranks: int) -> tuple[int, ...]:
    """Assigns two stages per rank, to the last rank and back: rank r holds stages r and 2P - 1 - r, so the last stage,
    which has the loss, is on the first rank (Qi et al. 2023, section 6)."""
    return (*range(ranks), *reversed(range(ranks)))
