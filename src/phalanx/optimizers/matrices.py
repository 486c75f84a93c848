"""The matrices that Muon orthogonalises, and what that computes.

Muon (Jordan et al. 2024) is for the matrices inside of blocks; embeddings, the head, norms and biases are AdamW's. Each
expert has matrices of its own, stacked in one parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from phalanx.blocks.operator import is_expert

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of an iteration X ← a X + (b A + c A²) X with A = X Xᵀ (Jordan et al. 2024): singular values
come near 1 fast, and stay between 0.7 and 1.2."""
ITERATIONS = 5


def is_hidden_matrix(name: str, whole: Sequence[int]) -> bool:
    """Returns whether a parameter of this whole shape is a matrix inside a block, or the matrices of its experts."""
    stacked = len(whole) == 3 and is_expert(name)
    return name.startswith("blocks.") and name.endswith(".weight") and (len(whole) == 2 or stacked)


def matrix_elements(name: str, whole: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the elements that a rank computes with of one matrix of a parameter, of which it has a part of this
    `shape`; 0 if the parameter is none of the hidden matrices."""
    return prod(shape[-2:]) if is_hidden_matrix(name, whole) else 0


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Returns the FLOPs of orthogonalising one matrix: in each iteration A, A² and the product with X, the narrow side
    first."""
    return ITERATIONS * sum(2 * m * n * k for m, n, k in newton_schulz_products(rows, columns))


def newton_schulz_products(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the three products of an iteration, (m × k) by (k × n) each, as (m, n, k)."""
    narrow, wide = sorted((rows, columns))
    return (narrow, narrow, wide), (narrow, narrow, narrow), (narrow, wide, narrow)
