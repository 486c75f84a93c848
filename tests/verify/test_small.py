"""The model that is compared in place of a large one."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.blocks.kinds import alike, block_kinds, untrained
from phalanx.blocks.parameters import count
from phalanx.check.job import problems_of
from phalanx.check.model import model_problems
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE
from phalanx.config.presets import PRESETS
from phalanx.verify.select import CHEAP_PARAMETERS, compared_job


def test_a_cheap_model_stays_as_it_is():
    job = Job(model=ModelConfig(n_layers=4, d_model=64, n_heads=4, vocab_size=50, seq_len=100, dropout=0.1))
    compared = compared_job(job, False, 8)
    assert compared.job.model == job.model
    assert compared.vocab_size == 50
    assert set(compared.changes) == {"layout.bucket_mb"}
    assert compared.job.train.precision == "fp64"
    narrow = Train(precision="fp8", fp8_scaling="tensorwise", compile=True)
    compared = compared_job(replace(job, train=narrow), False, 8)
    assert compared.job.train == replace(narrow, compile=False), "in fp64, with emulated products in 8 bits"


def test_the_tokenizer_s_vocabulary_is_a_prime_here():
    assert compared_job(Job(), False, 8).vocab_size == 251


def test_as_it_is():
    job = Job(model=PRESETS["gpt2"], optimizer=Optimizer(eps=1e-12))
    compared = compared_job(job, True, 8)
    assert compared.changes == {}
    assert (compared.job.model, compared.job.optimizer) == (job.model, job.optimizer)


def test_what_was_changed_is_told():
    job = Job(model=PRESETS["llama3-8b"], optimizer=Optimizer(eps=1e-12))
    changes = compared_job(job, False, 8).changes
    assert changes["model.n_layers"] == (32, 2)
    assert changes["model.seq_len"] == (8192, 32)
    assert changes["model.vocab_size"] == (128256, 251)
    assert changes["optimizer.eps"] == (1e-12, 1e-8)
    assert not {"model.n_heads", "model.n_kv_heads", "model.norm", "train.precision"} & set(changes)


def test_both_kinds_of_layers_stay_and_heads_turn_as_far():
    model = replace(PRESETS["llama3-8b"], window=4096, full_every=6, rotary_fraction=0.25)
    small = compared_job(Job(model=model), False, 8).job.model
    assert {small.window_of(layer) > 0 for layer in range(small.n_layers)} == {True, False}
    assert small.rotary_size / small.head_size == 0.25
    assert not list(model_problems(small))
    # A model in which no layer is full has none afterwards either.
    small = compared_job(Job(model=replace(model, full_every=50)), False, 8).job.model
    assert all(small.window_of(layer) for layer in range(small.n_layers))


def test_windows_shrink_with_sequences():
    model = replace(PRESETS["llama3-8b"], window=4096)
    small = compared_job(Job(model=model), False, 8).job.model
    assert (small.seq_len, small.window) == (32, 16)
    assert compared_job(Job(model=replace(model, window=1)), False, 8).job.model.window == 1
    assert compared_job(Job(model=replace(model, window=9000)), False, 8).job.model.window >= 32
    assert compared_job(Job(model=replace(PRESETS["baby"], seq_len=256, window=100)), False, 8).changes["model.window"]
    cheap = replace(PRESETS["tiny"], vocab_size=50, window=9)
    assert compared_job(Job(model=cheap), False, 8).job.model == cheap


def legal(job: Job, layout: Layout) -> bool:
    return not problems_of(replace(job, layout=layout, train=replace(job.train, global_batch=layout.data_ranks)))


@pytest.mark.parametrize("preset", [name for name, model in PRESETS.items() if not untrained(model)])
def test_a_small_model_is_cheap_and_legal_under_the_same_layouts(preset):
    job = Job(model=PRESETS[preset])
    compared = compared_job(job, False, 8)
    small = compared.job.model
    assert count(small, compared.vocab_size) <= 2 * CHEAP_PARAMETERS
    assert small.seq_len <= 128
    assert (small.n_heads, small.kv_heads) == (job.model.n_heads, job.model.kv_heads)
    for n in range(1, 9):
        layouts = Layout(tp=n), Layout(tp=n, sp=True), Layout(cp=n, cp_ulysses=n), Layout(dp_shard=n, ep=n)
        for layout in layouts:
            assert legal(compared.job, layout) == legal(job, layout), layout


@pytest.mark.parametrize("preset", ["gemma2-27b", "gemma3-27b", "gpt-oss-20b"])
def test_layers_with_and_without_a_window_remain(preset):
    model = compared_job(Job(model=PRESETS[preset]), False, 8).job.model
    windows = [model.window_of(layer) for layer in range(model.n_layers)]
    assert windows[-1] == 0
    assert 4 < windows[0] < model.seq_len


def test_experts_and_latent_attention_in_small_are_still_both_at_work():
    small = compared_job(Job(model=PRESETS["deepseek-v3"]), False, 8).job.model
    assert [kind.routed for kind in block_kinds(small)] == [False, True]
    moe, mla = small.moe, small.mla
    assert (moe.n_experts, moe.n_groups, moe.top_groups, moe.top_k, moe.n_shared) == (8, 4, 2, 2, 1)
    assert (mla.q_rank, mla.kv_rank, small.head_size, small.v_head_size) == (16, 8, 8, 4)
    mixtral = compared_job(Job(model=PRESETS["mixtral-8x7b"]), False, 8).job.model
    assert mixtral.moe == replace(PRESETS["mixtral-8x7b"].moe, d_ff=mixtral.moe.d_ff)


@given(
    n_experts=st.integers(2, 400),
    top_k=st.integers(1, 8),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 1), (8, 8)]),
    n_dense_layers=st.integers(0, 20),
)
def test_any_experts_are_legal_in_small(n_experts, top_k, groups, n_dense_layers):
    moe = MoE(
        n_experts=n_experts,
        top_k=top_k,
        renormalise=top_k > 1,
        n_groups=groups[0],
        top_groups=groups[1],
        n_dense_layers=n_dense_layers,
    )
    model = replace(PRESETS["llama3-8b"], moe=moe)
    assume(not list(model_problems(model)))
    small = compared_job(Job(model=model), False, 8).job.model
    assert list(model_problems(small)) == []
    assert block_kinds(small)[-1].routed
    assert (small.moe.top_k == 1) == (top_k == 1)
    for ep in range(2, 9):
        assert (small.moe.n_experts % ep == 0) == (n_experts % ep == 0)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_like_divides_by_the_same_numbers(number, at_least):
    small = alike(number, min(number, at_least), 8)
    assert min(number, at_least) <= small <= number
    assert [small % ranks == 0 for ranks in range(2, 9)] == [number % ranks == 0 for ranks in range(2, 9)]
