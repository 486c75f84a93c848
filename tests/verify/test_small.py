"""The model that is compared in place of a large one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.job.check import problems_of
from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.job.model import Model
from phalanx.job.optimizer import Optimizer
from phalanx.job.parameters import count
from phalanx.job.presets import PRESETS
from phalanx.verify.small import CHEAP_PARAMETERS, like, proof_of

DENSE = {name: model for name, model in PRESETS.items() if not model.moe.n_experts}


def test_a_cheap_model_stays_as_it_is():
    job = Job(model=Model(n_layers=4, d_model=64, n_heads=4, vocab_size=50, seq_len=100, dropout=0.1))
    proof = proof_of(job, False, 8)
    assert proof.job.model == job.model
    assert proof.vocab_size == 50
    assert set(proof.changes) == {"layout.bucket_mb"}
    assert proof.job.train.precision == "fp64"


def test_the_tokenizer_s_vocabulary_is_a_prime_here():
    assert proof_of(Job(), False, 8).vocab_size == 251


def test_as_it_is():
    job = Job(model=PRESETS["gpt2"], optimizer=Optimizer(eps=1e-12))
    proof = proof_of(job, True, 8)
    assert proof.changes == {}
    assert (proof.job.model, proof.job.optimizer) == (job.model, job.optimizer)


def test_what_was_changed_is_told():
    job = Job(model=DENSE["llama3-8b"], optimizer=Optimizer(eps=1e-12))
    changes = proof_of(job, False, 8).changes
    assert changes["model.n_layers"] == (32, 2)
    assert changes["model.seq_len"] == (8192, 32)
    assert changes["model.vocab_size"] == (128256, 251)
    assert changes["optimizer.eps"] == (1e-12, 1e-8)
    assert not {"model.n_heads", "model.n_kv_heads", "model.norm", "train.precision"} & set(changes)


def legal(job: Job, layout: Layout) -> bool:
    return not problems_of(replace(job, layout=layout, train=replace(job.train, global_batch=layout.data_ranks)))


@pytest.mark.parametrize("preset", DENSE)
def test_a_small_model_is_cheap_and_legal_under_the_same_layouts(preset):
    job = Job(model=DENSE[preset])
    proof = proof_of(job, False, 8)
    small = proof.job.model
    assert count(small, proof.vocab_size) <= 2 * CHEAP_PARAMETERS
    assert small.seq_len <= 128
    assert (small.n_heads, small.kv_heads) == (job.model.n_heads, job.model.kv_heads)
    for tp in range(1, 9):
        for sp in (False, True):
            layout = Layout(tp=tp, sp=sp)
            assert legal(proof.job, layout) == legal(job, layout), layout


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_like_divides_by_the_same_numbers(number, at_least):
    small = like(number, min(number, at_least), 8)
    assert min(number, at_least) <= small <= number
    assert [small % ranks == 0 for ranks in range(2, 9)] == [number % ranks == 0 for ranks in range(2, 9)]
