"""What a block keeps, operator by operator: by hand, and by its relations between layouts. Real blocks are measured in
tests/train/test_predicted_memory.py and test_memory.py."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost.activation_bytes import activation_bytes
from phalanx.blocks.kinds import BlockKind
from phalanx.blocks.operator import MemoryProfile, place_of
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.config.presets import PRESETS
from phalanx.cost.block_memory import saved
from phalanx.cost.frameworks import PROFILES
from phalanx.cost.held import LayerKind

MEGATRON_2021, MEGATRON_CORE, PHALANX, TORCHTITAN, TORCHTITAN_COMPILED, XLA = (
    PROFILES["megatron-2021"],
    PROFILES["megatron-core"],
    PROFILES["phalanx"],
    PROFILES["torchtitan"],
    PROFILES["torchtitan-compiled"],
    PROFILES["xla"],
)

GPT = ModelConfig(n_layers=2, d_model=64, n_heads=8, seq_len=32, dropout=0.1)
LLAMA = replace(PRESETS["llama3-8b"], seq_len=8192)
MIXTRAL = replace(PRESETS["mixtral-8x7b"], seq_len=4096)
DEEPSEEK = replace(PRESETS["deepseek-v3"], seq_len=4096)
SP: dict[str, Any] = {"sp": True, "sp_regather": True}
ALONE = Layout()


def parts(
    model: ModelConfig, layout: Layout = ALONE, memory_profile: MemoryProfile = PHALANX, experts: bool = False
) -> dict[str, float]:
    """Bytes of a token that each operator keeps."""
    kind = BlockKind("latent" if model.mla.kv_rank else "heads", "experts" if experts else "dense")
    return dict(saved(place_of(model, layout, profile=memory_profile), LayerKind(kind, layout.recompute)))


@given(
    s=st.sampled_from([64, 1024, 2048]),
    b=st.integers(1, 8),
    a=st.sampled_from([8, 16, 96]),
    size=st.sampled_from([8, 64, 128]),
    t=st.sampled_from([1, 2, 4, 8]),
)
def test_the_five_rows_of_korthikanti(s, b, a, size, t):
    """Reducing Activation Recomputation in Large Transformer Models, 2022, table 2."""
    h = a * size
    model, scores = ModelConfig(n_layers=1, d_model=h, n_heads=a, seq_len=s, dropout=0.1), 5 * a * s / h
    rows = {
        Layout(): 34 + scores,
        Layout(tp=t): 10 + 24 / t + scores / t,
        Layout(tp=t, **SP): (34 + scores) / t,
        Layout(tp=t, **SP, recompute="selective"): 34 / t,
        Layout(recompute="full"): 2,
    }
    for layout, row in rows.items():
        assert activation_bytes(model, layout, b) == pytest.approx(s * b * h * row, abs=1)
        # Megatron's always gathers inputs again.
        there = replace(layout, sp_regather=False)
        assert activation_bytes(model, there, b, memory_profile=MEGATRON_2021) == pytest.approx(s * b * h * row, abs=1)


def test_llama_by_hand():
    h, keys, ff = 4096, 1024, 14336
    found = parts(LLAMA)
    assert found["queries"] == 2 * h
    assert found["keys, values"] == 2 * 2 * keys
    assert found["mlp"] == 4 * 2 * ff
    assert sum(found.values()) == 2 * (2 * h + h + 2 * keys + h + 2 * h + 4 * ff)
    fused = parts(LLAMA, memory_profile=MEGATRON_CORE)
    assert fused["mlp"] == 3 * 2 * ff
    assert parts(LLAMA, memory_profile=XLA)["mlp"] == 2 * 2 * ff


def test_experts_by_hand():
    h, ff, rows = 4096, 14336, 2
    found = parts(MIXTRAL, experts=True)
    assert found["experts.up"] == rows * 2 * h
    assert found["experts"] == rows * 4 * 2 * ff
    assert found["combine"] == rows * 2 * h
    assert found["scores"] == 8 * 4
    assert found["places"] == 2 * 8 * rows
    assert "combine" not in parts(MIXTRAL, memory_profile=MEGATRON_CORE, experts=True)
    assert activation_bytes(MIXTRAL, Layout(), 1) == round(4096 * sum(found.values()))


def test_latent_attention_by_hand():
    heads, (nope, rope, size) = 128, (128, 64, 128)
    found = parts(DEEPSEEK)
    assert found["queries"] + found["keys"] == 2 * 2 * heads * (nope + rope)
    assert found["values"] == 2 * heads * (nope + size)  # a part of what wkv_b writes
    assert found["q_norm, wq_b"] == 2 * 2 * 1536
    assert found["kv_norm"] + found["wkv_b"] == 2 * (512 + 64) + 2 * 512
    assert parts(DEEPSEEK, memory_profile=MEGATRON_CORE)["values"] == 2 * heads * size


def test_a_model_has_two_kinds_of_blocks_where_some_are_dense():
    first, last = (activation_bytes(DEEPSEEK, Layout(), 1, layer=layer) for layer in (0, 60))
    assert first == round(4096 * sum(parts(DEEPSEEK).values()))
    assert last == activation_bytes(DEEPSEEK, Layout(), 1) == round(4096 * sum(parts(DEEPSEEK, experts=True).values()))
    shared = parts(DEEPSEEK, experts=True)["shared"]
    assert shared == 4 * 2 * 2048


def test_capacity_makes_rows_whether_filled_or_not():
    tight = replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity=1.25))
    assert parts(tight, experts=True)["experts"] == pytest.approx(1.25 * parts(MIXTRAL, experts=True)["experts"])
    # Of a share of a sequence an expert takes no more tokens than there are.
    assert parts(tight, Layout(cp=4), experts=True)["experts"] == pytest.approx(
        8 / 2 * parts(MIXTRAL, experts=True)["experts"]
    )


@given(st.sampled_from([2, 4, 8]), st.floats(1, 3))
def test_uneven_routing_fills_the_fullest_rank(ep, imbalance):
    memory_profile = replace(PHALANX, imbalance=imbalance)
    layout = Layout(dp_shard=ep, ep=ep)
    even, uneven = parts(MIXTRAL, layout, experts=True), parts(MIXTRAL, layout, memory_profile, experts=True)
    assert uneven["experts"] == pytest.approx(imbalance * even["experts"])
    assert uneven["combine"] == even["combine"], "what comes home is as much as left"
    assert parts(MIXTRAL, Layout(), memory_profile, experts=True) == parts(MIXTRAL, experts=True)


@given(
    st.sampled_from([LLAMA, MIXTRAL, DEEPSEEK]), st.sampled_from([2, 4, 8]), st.sampled_from([PHALANX, MEGATRON_CORE])
)
def test_layouts_never_keep_more(model, n, memory_profile):
    alone = activation_bytes(model, Layout(), 1, memory_profile=memory_profile)
    for layout in (
        Layout(tp=n),
        Layout(tp=n, sp=True),
        Layout(tp=n, **SP),
        Layout(cp=n),
        Layout(recompute="selective"),
    ):
        assert activation_bytes(model, layout, 1, memory_profile=memory_profile) <= alone
    full = activation_bytes(model, Layout(recompute="full"), 1, memory_profile=memory_profile)
    assert full == model.seq_len * model.d_model * 2 < alone
    assert activation_bytes(model, Layout(cp=n), 1, memory_profile=memory_profile) == pytest.approx(alone / n, rel=1e-6)
    assert activation_bytes(model, Layout(tp=n, **SP), 1, memory_profile=memory_profile) >= alone / n * 0.99


def test_megatron_cuts_everything_by_the_tensor_ranks():
    for model in (LLAMA, MIXTRAL, DEEPSEEK):
        alone = activation_bytes(model, Layout(), 1, memory_profile=MEGATRON_CORE)
        assert activation_bytes(model, Layout(tp=8, sp=True), 1, memory_profile=MEGATRON_CORE) == pytest.approx(
            alone / 8
        )


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "llama3-405b"])
def test_megatron_core_keeps_what_its_own_estimate_says(name: str):
    """Megatron-LM, megatron/training/theoretical_memory_usage.py: sbh (18 + 4 ffn/h) / t of a block with sequence
    parallelism, which does not know that there are fewer key/value heads nor what SwiGLU saves."""
    model = replace(PRESETS[name], seq_len=8192)
    estimate = (18 * model.d_model + 4 * model.ff_size) / 8
    assert sum(parts(model, Layout(tp=8, **SP), MEGATRON_CORE).values()) == pytest.approx(estimate, rel=0.07)


def test_selective_means_what_the_program_means_by_it():
    selective = Layout(recompute="selective")
    assert parts(LLAMA, selective) == parts(LLAMA), "flash attention keeps no scores"
    titan = parts(LLAMA, selective, TORCHTITAN)
    assert sum(titan.values()) == 2 * (4096 + (4096 + 1024) + 4096 + 14336 + 4096)
    layers = replace(TORCHTITAN_COMPILED, selective="layers")
    every_other = activation_bytes(LLAMA, selective, 1, memory_profile=layers)
    both = [activation_bytes(LLAMA, Layout(recompute=what), 1, memory_profile=layers) for what in ("none", "full")]
    assert every_other == pytest.approx(sum(both) / 2)


@pytest.mark.parametrize(
    ("module", "gone"),
    [
        ("moe", {"scores", "gates", "places", "experts.up", "experts", "shared"}),
        ("layernorm", {"wq_a, wkv_a", "router"}),
        ("mla_up_proj", {"queries", "keys", "values"}),
        ("mlp", set[str]()),
        ("core_attn", set[str]()),
    ],
)
def test_recomputed_modules_keep_what_they_read(module: str, gone: set[str]):
    before = parts(DEEPSEEK, Layout(), MEGATRON_CORE, experts=True)
    after = parts(DEEPSEEK, Layout(), replace(MEGATRON_CORE, repeats=(module,)), experts=True)
    assert {name for name, size in after.items() if size < before[name]} == gone
    assert not any(after[name] for name in gone)


def test_recomputed_activations_keep_what_they_read():
    dense = (
        parts(DEEPSEEK, Layout(), MEGATRON_CORE),
        parts(DEEPSEEK, Layout(), replace(MEGATRON_CORE, repeats=("mlp",))),
    )
    assert dense[1]["mlp"] == 0 < dense[0]["mlp"]
    assert dense[1]["up"] == dense[0]["up"]
    profile = replace(MEGATRON_CORE, repeats=("moe_act",))
    before, after = (parts(DEEPSEEK, Layout(), each, experts=True)["experts"] for each in (MEGATRON_CORE, profile))
    assert after == before * 2 / 3  # of gate, up and their product


def test_inputs_that_leave_are_not_on_the_device():
    full = Layout(recompute="full")
    assert parts(LLAMA, full, XLA) == {"block input": 2 * LLAMA.d_model}
    assert parts(LLAMA, full, replace(XLA, inputs_leave=True)) == {"block input": 0}


def test_unfused_attention_keeps_scores_without_dropout_too():
    bare = replace(GPT, dropout=0.0)
    assert "softmax" not in parts(bare)
    assert parts(bare, memory_profile=MEGATRON_2021)["softmax"] == 8 * 32 * 2
    assert parts(GPT)["softmax"] == 8 * 32 * 5
    assert "softmax" not in parts(GPT, memory_profile=MEGATRON_CORE)
    assert "softmax" not in parts(GPT, Layout(cp=2)), "a ring computes them again"
    assert "softmax" in parts(GPT, Layout(cp=2, cp_ulysses=2))


def test_inputs_in_eight_bits():
    wide, narrow = (
        activation_bytes(LLAMA, Layout(), 1, memory_profile=MEGATRON_CORE, narrow=fp8) for fp8 in (False, True)
    )
    # Two norms' outputs and the last matrix's input by half; of attention's output a copy more.
    assert wide - narrow == 8192 * (4096 + 4096 + 14336 - 4096)
    assert activation_bytes(LLAMA, Layout(), 1, narrow=True) == activation_bytes(LLAMA, Layout(), 1)


def test_queries_that_are_not_compressed():
    plain = replace(DEEPSEEK, mla=MLA(q_rank=0, kv_rank=512))
    assert "q_norm, wq_b" not in parts(plain)
    assert parts(plain)["queries"] == parts(DEEPSEEK)["queries"]


def test_experts_of_gpt_kind_keep_two_tensors():
    model = replace(GPT, moe=MoE(n_experts=4, d_ff=128))
    assert parts(model, experts=True)["experts"] == 2 * 2 * 2 * 128
