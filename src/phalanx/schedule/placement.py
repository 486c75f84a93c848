"""Which rank holds which stage."""

from __future__ import annotations


def round_robin(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stages go round the ranks `chunks` times: stage s on rank s mod P (Narayanan et al. 2021, section 2.2)."""
    return tuple(range(ranks)) * chunks


def v_shape(ranks: int) -> tuple[int, ...]:
    """Two stages a rank, to the last rank and back again: rank r holds stages r and 2P - 1 - r, so that the last stage,
    where the loss is, lies with the first (Qi et al. 2023, section 6)."""
    return (*range(ranks), *reversed(range(ranks)))
