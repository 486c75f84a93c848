"""The description of blocks: parameters, adapters, FLOPs, and the tensors that attention saves."""

from __future__ import annotations

from dataclasses import replace
from math import prod

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
from phalanx.blocks.operator import PHALANX, MemoryProfile, place_of
from phalanx.blocks.parameters import (
    attention_flops_per_sequence,
    attention_flops_per_token,
    block_flops_per_token,
    block_shapes,
    count,
    count_active,
    count_trained,
    forward_flops_per_token,
    head_flops_per_token,
    parameter_shapes,
    train_flops_per_step,
    train_flops_per_token,
    trained_shapes,
    trained_text,
    vocabulary,
    weight_of,
    weights,
)
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, LoRA, ModelConfig, MoE
from phalanx.config.presets import PRESETS
from phalanx.cost.prediction import hardware_flops_per_step
from phalanx.errors import JobError
from phalanx.model.transformer import Transformer
from phalanx.partition.tensor_slices import ring_positions


def test_gpt2_kind_by_hand():
    model = ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=11, seq_len=5)
    assert parameter_shapes(model) == {
        "embed.weight": (11, 8),
        "positions.weight": (5, 8),
        "blocks.0.attn_norm.weight": (8,),
        "blocks.0.attn_norm.bias": (8,),
        "blocks.0.attn.wq.weight": (8, 8),
        "blocks.0.attn.wq.bias": (8,),
        "blocks.0.attn.wk.weight": (8, 8),
        "blocks.0.attn.wk.bias": (8,),
        "blocks.0.attn.wv.weight": (8, 8),
        "blocks.0.attn.wv.bias": (8,),
        "blocks.0.attn.wo.weight": (8, 8),
        "blocks.0.attn.wo.bias": (8,),
        "blocks.0.mlp_norm.weight": (8,),
        "blocks.0.mlp_norm.bias": (8,),
        "blocks.0.mlp.up.weight": (32, 8),
        "blocks.0.mlp.up.bias": (32,),
        "blocks.0.mlp.down.weight": (8, 32),
        "blocks.0.mlp.down.bias": (8,),
        "final_norm.weight": (8,),
        "final_norm.bias": (8,),
    }


def test_llama_kind_with_experts_and_latent_attention_by_hand():
    model = ModelConfig(
        n_layers=2,
        d_model=8,
        n_heads=2,
        vocab_size=11,
        norm="rmsnorm",
        positions="rope",
        activation="swiglu",
        bias=False,
        tied=False,
        d_ff=20,
        moe=MoE(n_experts=4, top_k=2, d_ff=6, n_shared=2, n_dense_layers=1, bias_balanced=True),
        mla=MLA(q_rank=5, kv_rank=3, rope_head_dim=2, nope_head_dim=4, v_head_dim=7),
    )
    attention = {
        "attn_norm.weight": (8,),
        "attn.wq_a.weight": (5, 8),
        "attn.q_norm.weight": (5,),
        "attn.wq_b.weight": (2 * (4 + 2), 5),
        "attn.wkv_a.weight": (3 + 2, 8),
        "attn.kv_norm.weight": (3,),
        "attn.wkv_b.weight": (2 * (4 + 7), 3),
        "attn.wo.weight": (8, 2 * 7),
        "mlp_norm.weight": (8,),
    }
    assert block_shapes(model, 0) == attention | {
        "mlp.up.weight": (20, 8),
        "mlp.gate.weight": (20, 8),
        "mlp.down.weight": (8, 20),
    }
    assert block_shapes(model, 1) == attention | {
        "moe.router.weight": (4, 8),
        "moe.router.bias": (4,),
        "moe.experts.up.weight": (4, 6, 8),
        "moe.experts.gate.weight": (4, 6, 8),
        "moe.experts.down.weight": (4, 8, 6),
        "moe.shared.up.weight": (12, 8),
        "moe.shared.gate.weight": (12, 8),
        "moe.shared.down.weight": (8, 12),
    }
    assert list(parameter_shapes(model))[-2:] == ["final_norm.weight", "head.weight"]
    assert count(model) - count_active(model) == 2 * 3 * 6 * 8  # two experts of four stay idle


def test_queries_without_compression_have_one_matrix():
    model = ModelConfig(d_model=8, n_heads=2, mla=MLA(kv_rank=3, rope_head_dim=2, nope_head_dim=4))
    names = list(block_shapes(model, 0))
    assert "attn.wq.weight" in names
    assert "attn.wq_a.weight" not in names
    assert block_shapes(model, 0)["attn.wq.weight"] == (12, 8)


def test_biases_follow_their_flags():
    model = ModelConfig(vocab_size=11, bias=False)
    assert not [name for name in parameter_shapes(model) if name.endswith(".bias")]
    qwen = [name for name in block_shapes(replace(model, qkv_bias=True), 0) if name.endswith(".bias")]
    assert qwen == ["attn.wq.bias", "attn.wk.bias", "attn.wv.bias"]
    rms = parameter_shapes(replace(model, bias=True, norm="rmsnorm"))
    assert not [name for name in rms if "norm" in name and name.endswith(".bias")]


def test_a_tied_head_is_counted_once():
    model = ModelConfig(vocab_size=1000, d_model=128)
    assert count(replace(model, tied=False)) - count(model) == 1000 * 128
    assert count(model) == sum(map(prod, parameter_shapes(model).values())) == count_active(model)


def test_the_vocabulary_is_the_tokenizers_where_it_is_given():
    assert vocabulary(ModelConfig(vocab_size=50257), 65) == 65
    assert vocabulary(ModelConfig(vocab_size=50257)) == 50257
    assert parameter_shapes(ModelConfig(), 65)["embed.weight"] == (65, 128)
    with pytest.raises(JobError, match=r"model\.vocab_size is 0, which means the tokenizer's vocabulary"):
        count(ModelConfig())


def test_tokens_within_an_experts_capacity():
    moe = MoE(n_experts=8, top_k=2)
    assert moe.most_tokens(64) == 64  # no limit
    assert replace(moe, capacity=1.0).most_tokens(64) == 16
    assert replace(moe, capacity=1.25).most_tokens(66) == 21  # of 20.6
    assert replace(moe, capacity=1.1).most_tokens(40) == 11  # though 1.1 × 10 is 11.000000000000002
    assert replace(moe, capacity=100.0).most_tokens(64) == 64


def test_gpt2_kind_with_experts_by_hand():
    model = ModelConfig(d_model=8, n_heads=2, moe=MoE(n_experts=3, d_ff=6, n_shared=1))
    experts = {name: shape for name, shape in block_shapes(model, 0).items() if name.startswith("moe.")}
    assert experts == {
        "moe.router.weight": (3, 8),
        "moe.experts.up.weight": (3, 6, 8),
        "moe.experts.up.bias": (3, 6),
        "moe.experts.down.weight": (3, 8, 6),
        "moe.experts.down.bias": (3, 8),
        "moe.shared.up.weight": (6, 8),
        "moe.shared.up.bias": (6,),
        "moe.shared.down.weight": (8, 6),
        "moe.shared.down.bias": (8,),
    }
    of_one = 6 * 8 + 6 + 8 * 6 + 8
    assert count(replace(model, vocab_size=11)) - count_active(replace(model, vocab_size=11)) == 4 * of_one


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


# Adapters in the description of blocks: their weights, how ranks cut them, what is frozen, and their FLOPs.

LLAMA = ModelConfig(
    n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, d_ff=24, vocab_size=20, seq_len=8, positions="rope",
    norm="rmsnorm", activation="swiglu", bias=True, tied=False,
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "gpt": ModelConfig(n_layers=2, d_model=16, n_heads=4, vocab_size=20, seq_len=8),
    "parallel block": replace(LLAMA, parallel_block=True),
    "latent": replace(
        LLAMA, n_kv_heads=0, mla=MLA(q_rank=8, kv_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=4)
    ),
    "experts": replace(LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=12, n_shared=1, n_dense_layers=1, bias_balanced=True)),
}
TARGETS = ["all", "attention", "feed_forward"]


def adapted(model: ModelConfig, rank: int = 3, targets: str = "all") -> ModelConfig:
    return replace(model, lora=LoRA(rank=rank, targets=targets))


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_the_module_has_the_described_parameters_in_their_order(model, targets):
    model = adapted(model, targets=targets)
    with torch.device("meta"):
        made = Transformer(model)
    held = {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}
    assert list(held.items()) == list(parameter_shapes(model).items())
    trained = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert trained == set(trained_shapes(model))
    assert all(".lora_a." in name or ".lora_b." in name for name in trained)
    assert count_trained(model) == sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_rank_0_changes_nothing(model):
    described = list(weights(replace(model, lora=LoRA(targets="attention", alpha=3))))
    assert described == list(weights(model))
    assert not any(weight.frozen for weight in described)
    assert count_trained(model) == count(model)
    assert train_flops_per_token(model) == 3 * forward_flops_per_token(model)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_an_adapter_is_cut_with_its_matrix(model):
    """By rows B is cut, by columns A; each rank computes a part of the gradient of the other one."""
    model, seen = adapted(model), 0
    for weight in weights(model):
        if not weight.name.endswith(".lora_a.weight"):
            continue
        seen += 1
        matrix = weight_of(model, weight.name.replace(".lora_a", ""))
        b = weight_of(model, weight.name.replace("lora_a", "lora_b"))
        assert [each.frozen for each in (matrix, weight, b)] == [True, False, False]
        *stack, outputs, inputs = matrix.shape
        assert (weight.shape, b.shape) == ((*stack, 3, inputs), (*stack, outputs, 3))
        for ranks in (1, 2, 4):
            part, whole = matrix.shape_on(ranks), weight.shape_on(ranks)
            assert whole[-1] == part[-1], "A reads what the matrix reads"
            assert b.shape_on(ranks)[-2] == part[-2], "B writes what the matrix writes"
        assert (weight.dim is None) == (matrix.cut != "columns")
        assert (b.dim is None) == (matrix.cut != "rows")
        for each in (weight, b):
            if each.dim is None:
                assert each.is_summed(sp=False) or matrix.gradient == "tokens"
    assert seen


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("attention", {"wq", "wk", "wv", "wo"}),
        ("feed_forward", {"up", "gate", "down"}),
        ("wq, wv", {"wq", "wv"}),
        ("attention,down", {"wq", "wk", "wv", "wo", "down"}),
    ],
)
def test_targets_name_halves_and_layers(targets, layers):
    names = trained_shapes(adapted(LLAMA, targets=targets))
    assert {name.split(".")[3] for name in names} == layers


def test_layers_of_experts_have_names_of_their_own():
    experts = MODELS["experts"]
    names = trained_shapes(adapted(experts, targets="attention,shared.up,mlp.up"))
    assert {name for name in names if "moe" in name} == {
        "blocks.1.moe.shared.up.lora_a.weight",
        "blocks.1.moe.shared.up.lora_b.weight",
    }
    assert not any("router" in name for name in trained_shapes(adapted(experts)))


@given(
    rank=st.integers(1, 12),
    shape=st.tuples(st.integers(1, 3), st.sampled_from([8, 16]), st.sampled_from([12, 40])),
    targets=st.sampled_from(TARGETS),
    sequences=st.integers(1, 3),
)
def test_frozen_matrices_have_no_weight_gradients_to_compute(rank, shape, targets, sequences):
    layers, width, hidden = shape
    plain = replace(LLAMA, n_layers=layers, d_model=width, d_ff=hidden, bias=False)
    model = adapted(plain, rank, targets)
    matrices = [prod(weight.shape) for weight in weights(model) if weight.is_matrix and not weight.frozen]
    frozen = [prod(weight.shape) for weight in weights(plain) if weight.is_matrix and weight.name != "embed.weight"]
    attention = train_flops_per_step(plain, sequences) - 6 * sequences * plain.seq_len * sum(frozen)
    expected = sequences * plain.seq_len * (4 * sum(frozen) + 6 * sum(matrices)) + attention
    assert train_flops_per_step(model, sequences) == expected


def test_the_share_that_is_trained_in_words():
    model = adapted(LLAMA, 1, "wo")
    assert trained_text(model) == f"64 of {count(model):,} parameters ({64 / count(model):.2%})"


# Tensors that attention saves only under some layouts and frameworks, in bytes per token, by hand.

HEADS, KV_HEADS, HEAD, TOKENS, WIDTH = 8, 2, 6, 64, 2
SAVING = ModelConfig(
    n_layers=1, d_model=HEADS * HEAD, n_heads=HEADS, n_kv_heads=KV_HEADS, seq_len=TOKENS, positions="rope"
)


def saved(layout: Layout, profile: MemoryProfile = PHALANX) -> dict[str, float]:
    place = place_of(SAVING, layout, width=WIDTH, profile=profile)
    return {one.operator: one.size for op in block(place, block_kinds(SAVING)[0]) for one in op.saved}


def test_unfused_attention_gives_every_query_head_keys_and_values_of_its_own():
    """The projections' keys and values stay, and copies for the six heads that had none."""
    found = saved(Layout(), MemoryProfile(scores="always"))
    assert found["keys, values"] == 2 * KV_HEADS * HEAD * WIDTH
    assert found["keys, values of each head"] == 2 * (HEADS - KV_HEADS) * HEAD * WIDTH
    assert found["softmax"] == HEADS * TOKENS * WIDTH
    assert "keys, values of each head" not in saved(Layout())


def test_ulysses_saves_the_output_before_its_exchange():
    assert saved(Layout(cp=2, cp_ulysses=2))["exchange"] == HEADS * HEAD * WIDTH
    assert "exchange" not in saved(Layout(cp=2))


def test_keys_and_values_are_saved_for_every_rank_that_shares_the_heads():
    """Two key/value heads on four tensor ranks are four heads."""
    assert saved(Layout(tp=4))["keys, values"] == 2 * 4 * HEAD * WIDTH
    assert saved(Layout(cp=8, cp_ulysses=8))["keys, values"] == 2 * 8 * HEAD * WIDTH
