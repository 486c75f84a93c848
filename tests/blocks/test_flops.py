from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.kinds import KINDS, MOE_AND_MLA, build, tokens
from phalanx.blocks.flops import (
    attention_flops_per_token,
    block_flops_per_token,
    forward_flops_per_token,
    head_flops_per_token,
    train_flops_per_step,
    train_flops_per_token,
)
from phalanx.blocks.parameters import count_active
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.model.loss import cross_entropy_sum

_ALL = KINDS | MOE_AND_MLA


@pytest.mark.parametrize("model", _ALL.values(), ids=_ALL.keys())
@pytest.mark.parametrize("seq_len", [12, 7])
def test_flops_equal_those_that_torch_counts(model: ModelConfig, seq_len: int):
    # torch counts the math kernel's multiplications; it has no count for the CPU's fused kernel, nor for its grouped
    # product, which in float64 is one product an expert.
    transformer, inputs = build(model, torch.float64), tokens(model, 3, seq_len)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = cross_entropy_sum(transformer(inputs), inputs)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    counted = forward.get_total_flops()
    assert forward_flops_per_token(model, seq_len=seq_len) * inputs.numel() == counted
    assert train_flops_per_step(model, sequences=3, seq_len=seq_len) == counted + backward.get_total_flops()


def test_gpt2_by_hand():
    """12 blocks of 12 d² weights and 4 T d for attention; the head 2 V d."""
    model, d = PRESETS["gpt2"], 768
    assert forward_flops_per_token(model) == 12 * (2 * 12 * d * d + 4 * 1024 * d) + 2 * 50257 * d
    assert forward_flops_per_token(model, attention="causal") == 12 * (2 * 12 * d * d + 2 * 1024 * d) + 2 * 50257 * d
    assert train_flops_per_token(model) == 3 * forward_flops_per_token(model)


def test_palm_formula():
    """6 N + 12 L H Q T, with N without the norms and without the input embedding, as torchtitan takes it."""
    model = PRESETS["llama3-8b"]
    norms = (2 * model.n_layers + 1) * model.d_model
    n = count_active(model) - model.vocab_size * model.d_model - norms
    expected = 6 * n + 12 * model.n_layers * model.n_heads * model.head_size * model.seq_len
    assert train_flops_per_token(model) == expected


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("megatron")])
def test_megatron_formula(name: str):
    """Narayanan et al. 2021, equation 3: 96 B s l h² (1 + s/(6h) + V/(16 l h)). Its blocks run forward twice, for
    recomputation; without that they cost three quarters."""
    model = PRESETS[name]
    layers, h, s, vocab = model.n_layers, model.d_model, model.seq_len, model.vocab_size
    blocks = 72 * layers * h * h * (1 + s / (6 * h))
    assert train_flops_per_token(model) == pytest.approx(blocks + 6 * vocab * h, rel=1e-12)


def test_experts_count_only_where_a_token_goes():
    model = PRESETS["mixtral-8x7b"]
    dense = replace(model, moe=replace(model.moe, n_experts=0))
    router, expert = 8 * 4096, 3 * 4096 * 14336
    extra = block_flops_per_token(model, 0) - block_flops_per_token(dense, 0)
    assert extra == 2 * (router + expert)  # two experts instead of one MLP


def test_deepseek_v3_does_six_flops_for_each_active_weight():
    """37 B active parameters (arXiv 2412.19437), the embedding's look-up not among them."""
    model = PRESETS["deepseek-v3"]
    attention = 3 * model.n_layers * attention_flops_per_token(model)
    assert (train_flops_per_token(model) - attention) / 6 == pytest.approx(36.6e9, rel=0.01)
    assert attention_flops_per_token(model) == 2 * 4096 * 128 * (192 + 128)


@given(seq_len=st.integers(1, 10_000), name=st.sampled_from(["gpt2", "llama2-70b", "mixtral-8x7b", "deepseek-v3"]))
def test_parts_add_up(seq_len: int, name: str):
    model = replace(PRESETS[name], n_layers=5)
    blocks = sum(block_flops_per_token(model, layer, seq_len) for layer in range(5))
    full = forward_flops_per_token(model, seq_len=seq_len)
    assert full == blocks + head_flops_per_token(model)
    causal = forward_flops_per_token(model, seq_len=seq_len, attention="causal")
    assert full - causal == 5 * attention_flops_per_token(model, seq_len, "causal")
    assert isinstance(full, int)


def test_no_torch_in_the_cost_model():
    import subprocess
    import sys

    code = "import sys, phalanx.blocks.flops, phalanx.config.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
