"""The matrices that Muon takes, and their FLOPs."""

from __future__ import annotations

import pytest

from phalanx.optimizers.entry import is_hidden_matrix, matrix_elements, newton_schulz_flops


def test_hidden_matrices_are_those_of_blocks():
    assert is_hidden_matrix("blocks.0.attn.wq.weight", (8, 8))
    assert is_hidden_matrix("blocks.0.moe.router.weight", (4, 8))
    assert is_hidden_matrix("blocks.0.moe.experts.up.weight", (4, 8, 8))
    assert not is_hidden_matrix("blocks.0.moe.experts.up.bias", (4, 8))
    assert not is_hidden_matrix("embed.weight", (50, 8))
    assert not is_hidden_matrix("head.weight", (50, 8))
    assert not is_hidden_matrix("positions.weight", (50, 8))
    assert not is_hidden_matrix("blocks.0.attn_norm.weight", (8,))


def test_an_experts_matrix_is_one_of_the_stack():
    assert matrix_elements("blocks.0.moe.experts.up.weight", (4, 8, 6), (2, 4, 6)) == 24
    assert matrix_elements("blocks.0.moe.experts.up.bias", (4, 8), (2, 8)) == 0


@pytest.mark.parametrize("shape", [(4096, 14336), (14336, 4096)])
def test_flops_are_those_of_three_products_in_five_iterations(shape):
    assert newton_schulz_flops(*shape) == 5 * (4 * 4096**2 * 14336 + 2 * 4096**3)
