"""Kinds of layers that are priced and not trained: their facts, parameters, FLOPs and seconds, and who refuses them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from phalanx.blocks.kinds import ATTENTION, FEED_FORWARD, BlockKind, block, block_kinds, kind_problems, untrained
from phalanx.blocks.operator import Operator, Place
from phalanx.blocks.parameters import (
    attention_flops_per_sequence,
    block_shapes,
    block_weights,
    count,
    forward_flops_per_token,
    head_flops_per_token,
    parameter_shapes,
)
from phalanx.check.load import load_words
from phalanx.cli.main import main
from phalanx.config import overrides
from phalanx.config.clusters import ACCELERATORS
from phalanx.config.model import DeltaNet, Mamba, ModelConfig, SparseAttention
from phalanx.config.presets import PRESETS
from phalanx.cost.kernels import operator_seconds, stream_seconds
from phalanx.cost.spec import Framework
from phalanx.errors import JobError
from phalanx.model.transformer import Transformer

NAMES = [name for name, model in PRESETS.items() if untrained(model)]
GLM_5_WHOLE = 753_864_139_008
"""The hub's total, with the indexer of every layer and the module for a second token."""


@pytest.mark.parametrize("table", [ATTENTION, FEED_FORWARD], ids=["attention", "feed_forward"])
def test_the_facts_of_every_kind_agree(table: Any) -> None:
    assert {name: list(kind_problems(kind)) for name, kind in table.items()} == {name: [] for name in table}


def test_an_indexer_and_a_module_for_a_second_token_have_the_published_parameters() -> None:
    dense = PRESETS["glm-5"]
    sparse = SparseAttention(top_k=2048, index_heads=32, index_head_dim=128)
    assert count(replace(dense, sparse=sparse, n_layers=dense.n_layers + 1, mtp=1)) == GLM_5_WHOLE


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("nemotron3-nano-30b-a3b", 31.58),
        ("nemotron3-super-120b-a12b", 120.67),
        ("nemotron3-ultra-550b-a55b", 549.31),
        ("qwen3-next-80b-a3b", 79.67),
    ],
)
def test_hybrids_have_the_published_parameters(name: str, billions: float) -> None:
    assert count(PRESETS[name]) / 1e9 == pytest.approx(billions, abs=0.005)


def layer(model: ModelConfig, attention: str) -> BlockKind:
    return next(kind for kind in block_kinds(model) if kind.attention == attention)


def matrices(model: ModelConfig, kind: BlockKind) -> int:
    return sum(prod(weight.shape) for weight in block_weights(model, kind) if weight.is_matrix)


def test_a_sparse_layer_scores_all_keys_in_its_indexer_and_attends_to_the_chosen_ones() -> None:
    model = PRESETS["deepseek-v3.2"]
    seq, top, heads, latent = model.seq_len, 2048, 128, 512
    attended = 2 * heads * seq * top * (2 * latent + 64)
    scored = 2 * 64 * 128 * seq * seq
    assert attention_flops_per_sequence(model, 10) == attended + scored
    assert attention_flops_per_sequence(model, 10, "causal") == attended + scored // 2
    fewer = replace(model, sparse=replace(model.sparse, top_k=seq))
    assert attention_flops_per_sequence(fewer, 10) == 2 * heads * seq * seq * (2 * latent + 64) + scored


def test_a_delta_net_and_mamba_are_linear_in_the_sequence() -> None:
    delta, chunk, k, v = PRESETS["qwen3-next-80b-a3b"], 64, 128, 128
    per_token = delta.delta.n_heads * (2 * chunk * (3 * k + 2 * v) + 2 * chunk**2 / 3 + 6 * k * v)
    assert attention_flops_per_sequence(delta, 0) == int(delta.seq_len * per_token)
    mamba, mixer = PRESETS["nemotron3-nano-30b-a3b"], PRESETS["nemotron3-nano-30b-a3b"].mamba
    per_token = 2 * mixer.chunk * mixer.state * mixer.groups
    per_token += mixer.n_heads * (2 * mixer.chunk * mixer.head_dim + 4 * mixer.state * mixer.head_dim)
    assert attention_flops_per_sequence(mamba, 0) == mamba.seq_len * per_token
    for model in (delta, mamba):
        twice = replace(model, seq_len=2 * model.seq_len)
        assert attention_flops_per_sequence(twice, 0) == 2 * attention_flops_per_sequence(model, 0)
        assert attention_flops_per_sequence(model, 0, "causal") == attention_flops_per_sequence(model, 0)


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "nemotron3-nano-30b-a3b"])
def test_a_recurrence_takes_the_time_of_what_it_moves(name: str) -> None:
    model, device = PRESETS[name], ACCELERATORS["h100-80gb"]
    place = Place(model, sequences=4)
    (scan,) = (operator for operator in block(place, block_kinds(model)[0]) if operator.fused)
    (stream,) = scan.memory_bound
    seconds = operator_seconds(device, [scan], Framework(), "bf16")
    moved = stream_seconds(device, 2 * stream.forward, stream.launches)
    if scan.fused.chunks:  # nothing hides the small products of Mamba-2
        assert 1.2 * moved < seconds.forward < 2.5 * moved
    else:
        assert seconds.products == 0
        assert seconds.forward == pytest.approx(moved)
    # With memory that costs nothing its products are left.
    fast = replace(device, bandwidth_gbs=1e9)
    assert operator_seconds(fast, [scan], Framework(), "bf16").products > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_ranks_share_matrices_seconds_and_saved_tensors(name: str, tp: int) -> None:
    model, device = PRESETS[name], ACCELERATORS["h100-80gb"]

    def seconds(ranks: int) -> float:
        place = Place(model, ranks, sequences=4)
        every = [operator for kind in set(block_kinds(model)) for operator in block(place, kind)]
        return operator_seconds(device, every, Framework(), "bf16", ranks).forward

    assert seconds(1) / tp < seconds(tp) < seconds(1)


def test_latent_experts_send_and_compute_in_their_latents() -> None:
    model = PRESETS["nemotron3-super-120b-a12b"]
    kind = next(kind for kind in block_kinds(model) if kind.routed)

    def sent(model: ModelConfig) -> float:
        every = block(Place(model, ep=8), kind)
        return sum(message.elements for operator in every for message in operator.messages if message.copies)

    wide = replace(model, moe=replace(model.moe, latent=0))
    assert sent(wide) / sent(model) == model.d_model / model.moe.latent
    shapes = {name: shape for n in range(2) for name, shape in block_shapes(model, n).items()}
    assert shapes["moe.experts.up.weight"] == (512, 2688, 1024)
    assert shapes["moe.latent_down.weight"] == (1024, 4096)


def test_a_module_for_a_second_token_is_a_block_a_matrix_and_the_model_s_own_head() -> None:
    plain = PRESETS["deepseek-v3"]
    more = replace(plain, n_layers=plain.n_layers + 1, mtp=1)
    width, last = plain.d_model, plain.n_layers - 1
    of_block = sum(prod(shape) for shape in block_shapes(plain, last).values())
    assert count(more) - count(plain) == of_block + 2 * width * width + 3 * width
    flops = matrices(plain, block_kinds(plain)[last]), attention_flops_per_sequence(plain, last) // plain.seq_len
    added = forward_flops_per_token(more) - forward_flops_per_token(plain)
    active = 2 * (flops[0] - (256 - 8) * 3 * 7168 * 2048) + flops[1] + 2 * 2 * width * width
    assert added == active + head_flops_per_token(plain)
    assert "head.weight" in parameter_shapes(more)
    assert sum("head.weight" in name for name in parameter_shapes(more)) == 1


def heard(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    out = capsys.readouterr()
    return code, out.out + out.err


@pytest.mark.parametrize("name", NAMES)
def test_it_is_said_once_at_load_and_predicted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"model={name} cluster=dgx-b200:64 tp=2 pp=4 dp_shard=64 ep=8 train.precision=bf16".split()
    if not PRESETS[name].moe.n_experts:
        words.remove("ep=8")
    batch = ["train.global_batch=512", "layout.micro_batch=1", "layout.schedule=1f1b"]
    code, text = heard(capsys, "predict", *words, *batch)
    assert code in (0, 3), text
    assert text.count("predicted and planned, not trained or verified") == 1
    assert "step time" in text


@pytest.mark.parametrize("verb", ["train", "verify", "launch"])
def test_who_trains_refuses_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = heard(capsys, verb, "model=nemotron3-nano-30b-a3b")
    assert code == 2, text
    assert "no module here for attention=mamba (Mamba-2, a state space model)" in text
    with pytest.raises(JobError, match="predicted and planned, not trained"):
        Transformer(replace(PRESETS["nemotron3-nano-30b-a3b"], n_layers=4, vocab_size=64))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model=nemotron3-nano-30b-a3b cp=2 global_batch=2", "attention mamba states no cores"),
        ("model=qwen3.5-9b pp=2 schedule=terapipe accumulation=2 global_batch=2", "its layers need whole sequences"),
        ("model=llama3-8b model.attention=delta", "needs it above 0"),
        ("model=llama3-8b model.delta.n_heads=8", "is for layers with attention delta"),
        ("model=llama3-8b model.mamba.chunk=64", "is for layers with attention mamba"),
        ("model=llama3-8b model.sparse.top_k=64", "model.mla.kv_rank: attention sparse needs it above 0"),
        ("model=glm-5 cp=2 cp_ulysses=2 global_batch=2", "ranks do not exchange heads, cp_ulysses is 2"),
        ("model=glm-5 model.sparse.index_head_dim=32", "turn mla.rope_head_dim 64 elements of the indexer's heads"),
        ("model=glm-5 model.dropout=0.1", "is for scores over all keys, of which an indexer chooses some"),
        ("model=glm-5 model.lora.rank=2 model.sparse.dense_warmup=true", "trains the indexer alone, without adapters"),
        (
            "model=glm-5 model.sparse.dense_warmup=true sync=local_sgd dp_replicate=2",
            "sparse.dense_warmup true most",
        ),
        ("model=gpt-neox-20b model.feed_forward=none", "adds two halves, and some layers have one"),
        ("model=llama3-8b model.mtp=32", "must leave a layer before the modules"),
        ("model=mixtral-8x7b model.moe.shared_gate=true", "is for shared experts: model.moe.n_shared above 0"),
    ],
)
def test_what_cannot_be_is_refused_and_says_why(words: str, said: str) -> None:
    with pytest.raises(JobError) as error:
        load_words(overrides.parse(words.split()))
    assert said in str(error.value)


def test_sizes_of_states_are_the_layers_own() -> None:
    """Without a kind that uses them, they change nothing."""
    plain = PRESETS["llama3-8b"]
    unused = replace(plain, delta=DeltaNet(n_heads=8), mamba=Mamba(n_heads=8))
    assert parameter_shapes(unused) == parameter_shapes(plain)
    assert untrained(unused) == []


def test_an_operator_has_no_scan_unless_it_says_so() -> None:
    assert Operator("any").fused is None
