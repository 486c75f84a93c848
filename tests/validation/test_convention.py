from __future__ import annotations

import pytest

from phalanx.config.clusters import ACCELERATORS
from phalanx.validation.row import convention_of, flops_per_step, gpt, peak_tflops, shapes
from phalanx.validation.row_layout import Cells

B, S, L, H, V = 32, 2048, 24, 2304, 51200
GPT = gpt(L, H, 24, V, S)


def test_hardware_flops_are_narayanans_equation():
    # Narayanan et al. 2021, equation 3.
    expected = 96 * B * S * L * H**2 * (1 + S / (6 * H) + V / (16 * L * H))
    assert flops_per_step("hardware", GPT, B) == pytest.approx(expected, rel=1e-12)


def test_hardware_matrices_are_its_first_factor():
    assert flops_per_step("hardware_matrices", GPT, B) == 96 * B * S * L * H**2


def test_model_flops_are_korthikantis():
    # Korthikanti et al. 2022, equation 7: 72 B L s h² (1 + s/6h + v/12hL).
    expected = 72 * B * S * L * H**2 * (1 + S / (6 * H) + V / (12 * L * H))
    assert flops_per_step("full", GPT, B) == pytest.approx(expected, rel=1e-12)


def test_causal_counts_half_of_the_attention():
    attention = 72 * B * S * L * H**2 * S / (6 * H)
    assert flops_per_step("full", GPT, B) - flops_per_step("causal", GPT, B) == pytest.approx(attention / 2)


def test_parameters_are_six_a_token_and_the_attention():
    shape = shapes()["mpt7b"]
    # llm-foundry, scripts/train/benchmarking: 6 N + 12 L h s a token.
    expected = 4 * 2048 * (6 * 6.657e9 + 12 * 32 * 4096 * 2048)
    assert flops_per_step("parameters", shape, 4) == pytest.approx(expected, rel=1e-3)


def test_eight_takes_the_parameters_as_printed():
    assert flops_per_step("hardware_eight", GPT, B, 1.7e9) == 8 * 1.7e9 * B * S
    assert flops_per_step("hardware_eight", GPT, B) == pytest.approx(8 * 1.652e9 * B * S, rel=1e-3)


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ("bigscience chronicles, an under-reporting calculator", "hardware_matrices"),
        ("bigscience chronicles, narayanan formula", "hardware"),
        ("nvidia megatron-bridge docs", "causal"),
        ("mosaicml/llm-foundry", "parameters"),
        ("nvidia/dgxc-benchmarking readme (2025-03)", "full"),
        ("nvidia/dgxc-benchmarking readme (2025-08)", "causal"),
        ("nothing that is known", "full"),
    ],
)
def test_sources_have_their_own(told, counts):
    assert convention_of(Cells({"source": told})).counts == counts


def test_mfu_of_eight_bits_is_against_what_the_source_takes():
    h100, gb200, v100 = (ACCELERATORS[name] for name in ("h100-80gb", "gb200", "v100-32gb"))
    dgxc = convention_of(Cells({"source": "nvidia/dgxc-benchmarking"}))
    assert peak_tflops(dgxc, h100, "fp8") == pytest.approx(1979, rel=1e-3)
    assert peak_tflops(dgxc, h100, "bf16") == 989
    assert peak_tflops(dgxc, gb200, "fp8") == 4900
    assert peak_tflops(convention_of(Cells({"source": "megatron-bridge"})), h100, "fp8") == 989
    assert peak_tflops(convention_of(Cells({})), v100, "fp16") == 125
