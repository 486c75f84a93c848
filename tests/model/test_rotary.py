from __future__ import annotations

import cmath
from dataclasses import replace

import pytest
import torch

from model.kinds import KINDS
from model.test_transformer import reference_frequency
from phalanx.config.model import ModelConfig, RopeScaling
from phalanx.config.presets import PRESETS
from phalanx.model.layers import rotary_frequencies, rotary_table, rotate

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "llama 3.1", "linear scaling"])
def test_rotation_multiplies_pairs_half_a_head_apart_by_a_unit_complex_number(name: str):
    model = KINDS[name]
    x = torch.randn(1, 5, 3, model.head_size, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 1000, 100_000])
    turned = rotate(x, rotary_table(model, positions, x.dtype))
    half = model.head_size // 2
    for row, position in enumerate(positions.tolist()):
        for head in range(3):
            for pair in range(half):
                before = complex(x[0, row, head, pair].item(), x[0, row, head, pair + half].item())
                after = before * cmath.exp(1j * position * reference_frequency(model, pair))
                assert turned[0, row, head, pair].item() == pytest.approx(after.real, abs=1e-9)
                assert turned[0, row, head, pair + half].item() == pytest.approx(after.imag, abs=1e-9)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-405b"])
def test_frequencies_of_llama_3(name: str):
    model = PRESETS[name]
    expected = [reference_frequency(model, pair) for pair in range(model.head_size // 2)]
    torch.testing.assert_close(rotary_frequencies(model, CPU), torch.tensor(expected, dtype=torch.float64))


def test_llama_3_scaling_keeps_fast_pairs_and_stretches_slow_ones():
    plain = PRESETS["llama3-8b"]
    stretched = replace(plain, rope_scaling=RopeScaling(factor=8.0))
    ratio = rotary_frequencies(plain, CPU) / rotary_frequencies(stretched, CPU)
    torch.testing.assert_close(ratio[:28], torch.ones(28, dtype=torch.float64))
    torch.testing.assert_close(ratio[-28:], torch.full((28,), 8.0, dtype=torch.float64))
    assert (ratio.diff() >= -1e-12).all()


def test_the_table_is_precise_even_for_bfloat16_activations():
    model = ModelConfig(positions="rope")
    positions = torch.tensor([131_071])
    table = rotary_table(model, positions, torch.bfloat16)
    assert table.dtype == torch.float32
    exact = rotary_table(model, positions, torch.float64)
    torch.testing.assert_close(table.double(), exact, rtol=0, atol=1e-7)
    assert rotate(torch.ones(1, 1, 4, model.head_size, dtype=torch.bfloat16), table).dtype == torch.bfloat16
