from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.kinds import KINDS, MOE_AND_MLA, build, tokens
from phalanx.blocks.attention import visible_pairs
from phalanx.blocks.kinds import block, block_kinds
from phalanx.blocks.operator import place_of
from phalanx.blocks.parameters import (
    attention_flops_per_sequence,
    attention_flops_per_token,
    block_flops_per_token,
    count_active,
    forward_flops_per_token,
    head_flops_per_token,
    train_flops_per_step,
    train_flops_per_token,
)
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE
from phalanx.config.presets import PRESETS
from phalanx.cost.prediction import hardware_flops_per_step
from phalanx.partition.tensor_slices import ring_positions

_ALL = KINDS | MOE_AND_MLA


@pytest.mark.parametrize("model", _ALL.values(), ids=_ALL.keys())
@pytest.mark.parametrize("seq_len", [12, 7])
def test_flops_equal_those_that_torch_counts(model: ModelConfig, seq_len: int):
    # torch counts the math kernel's multiplications; it has no count for the CPU's fused kernel, nor for its grouped
    # product, which in float64 is one product an expert.
    transformer, inputs = build(model, torch.float64), tokens(model, 3, seq_len)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = F.cross_entropy(transformer(inputs).flatten(0, 1), inputs.flatten())
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    counted = forward.get_total_flops()
    model = replace(model, seq_len=seq_len)
    assert forward_flops_per_token(model) * inputs.numel() == counted
    assert train_flops_per_step(model, sequences=3) == counted + backward.get_total_flops()


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
    attention = 3 * model.n_layers * attention_flops_per_token(model, 0)
    assert (train_flops_per_token(model) - attention) / 6 == pytest.approx(36.6e9, rel=0.01)
    assert attention_flops_per_token(model, 0) == 2 * 4096 * 128 * (192 + 128)


@given(seq_len=st.integers(1, 10_000), name=st.sampled_from(["gpt2", "llama2-70b", "mixtral-8x7b", "deepseek-v3"]))
def test_parts_add_up(seq_len: int, name: str):
    model = replace(PRESETS[name], n_layers=5, seq_len=seq_len)
    blocks = sum(block_flops_per_token(model, layer) for layer in range(5))
    full = forward_flops_per_token(model)
    assert full == blocks + head_flops_per_token(model)
    causal = forward_flops_per_token(model, "causal")
    assert full - causal == 5 * (attention_flops_per_token(model, 0) // 2)
    assert isinstance(full, int)


@given(st.integers(1, 40), st.integers(0, 50), st.sampled_from(["gpt2", "deepseek"]))
def test_a_window_leaves_the_pairs_that_one_can_count(seq_len: int, window: int, kind: str):
    """Full attention counts keys on both sides of a query, causal attention half of that."""
    model = replace(_ALL[kind], seq_len=seq_len, window=window)
    pairs = sum(abs(q - k) < window or not window for q in range(seq_len) for k in range(seq_len))
    each = 2 * model.n_heads * (model.head_size + model.v_head_size)
    assert attention_flops_per_sequence(model, 0) == pairs * each
    assert attention_flops_per_sequence(model, 0, "causal") == pairs * each // 2
    assert attention_flops_per_token(model, 0) == pairs * each // seq_len
    whole = replace(model, window=0)
    saved = (seq_len**2 - pairs) * each
    assert train_flops_per_step(whole, 7) - train_flops_per_step(model, 7) == 7 * 3 * model.n_layers * saved
    for recompute, times in (("none", 3), ("selective", 4), ("full", 4)):
        whole_step, step = (hardware_flops_per_step(m, Layout(recompute=recompute), 7) for m in (whole, model))
        assert whole_step - step == 7 * times * model.n_layers * saved


@given(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.integers(1, 5), st.integers(0, 70), st.booleans())
def test_the_busiest_rank_s_pairs(ring: int, ulysses: int, chunk: int, window: int, inner: bool):
    layout = Layout(cp=ring * ulysses, cp_ulysses=ulysses, cp_inner="ring" if inner else "ulysses")
    model = replace(_ALL["gpt2"], seq_len=2 * ring * ulysses * chunk, window=window)
    core = next(op.core for op in block(place_of(model, layout), block_kinds(model)[0]) if op.core)
    most = 0
    for position in range(ring):
        queries = [q for run in ring_positions(layout, model.seq_len, position) for q in run]
        seen = sum(q - window < k <= q or (not window and k <= q) for q in queries for k in range(model.seq_len))
        most = max(most, 2 * seen - len(queries))
    assert core.pairs == -(-most // ulysses)
    assert core.keys_per_query <= core.keys / core.steps


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 40))
def test_pairs_under_a_causal_mask(start: int, length: int, window: int):
    run = range(start, start + length)
    expected = sum(q - window < k <= q or (not window and k <= q) for q in run for k in range(run.stop))
    assert visible_pairs(run, window) == expected


def test_mistral_7b_by_hand():
    """Jiang et al. 2023, table 1: windows of 4,096 over 32,768 tokens leave a little less than a quarter of the full
    count, which has every query with every key."""
    mistral = replace(PRESETS["mixtral-8x7b"], moe=MoE(), window=4096)
    whole = attention_flops_per_token(replace(mistral, window=0), 0)
    assert attention_flops_per_token(mistral, 0) / whole == pytest.approx(1 - (7 / 8) ** 2, rel=1e-3)


def test_no_torch_in_the_cost_model():
    import subprocess
    import sys

    code = "import sys, phalanx.blocks.parameters, phalanx.config.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
