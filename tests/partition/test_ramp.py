"""Ramps of batch and sequence length: their phases, what they read, and what they cannot be combined with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.check.job import problems_of
from phalanx.config.job import Data, Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.money import tokens_of
from phalanx.data.loader import MicroBatch
from phalanx.partition.ramp import RampPhase, assumption, phase_jobs, ramp_of
from phalanx.train.learning_rate import at_step, resumed_end

MODEL = ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=16)
TRAIN = Train(steps=10, global_batch=12, batch_ramp="2*4+3*6", seq_ramp="1*4+3*8")
JOB = Job(model=MODEL, layout=Layout(dp_replicate=2), train=TRAIN)


def test_phases_are_those_of_both_ramps():
    found = [(p.first, p.samples, p.batch.global_batch, p.batch.micro_batch, p.parts) for p in ramp_of(JOB).phases]
    assert found == [(0, 0, 4, 2, 4), (1, 4, 4, 2, 2), (2, 8, 6, 3, 2), (4, 20, 6, 3, 1), (5, 26, 12, 6, 1)]
    ramp = ramp_of(JOB)
    sizes = [ramp.at(step).batch.global_batch for step in range(10)]
    assert sizes == [4, 4, 6, 6, 6, 12, 12, 12, 12, 12]
    assert [ramp.samples(step) for step in range(11)] == np.cumsum([0, *sizes]).tolist()
    assert tokens_of(JOB, 0) == sum(sizes) * 16
    (whole,) = ramp_of(replace(JOB, train=Train(global_batch=12))).phases
    assert whole == RampPhase(0, 0, whole.batch, 1)


def test_a_cut_micro_batch_has_the_same_tokens_in_the_same_order():
    tokens = np.arange(32).reshape(2, 16)
    micro = MicroBatch(tokens, tokens + 1, np.array([7, -1]), tokens // 5)
    cut = micro.cut(4)
    assert np.array_equal(cut.tokens, tokens.reshape(8, 4))
    assert np.array_equal(cut.targets, cut.tokens + 1)
    assert np.array_equal(cut.documents, cut.tokens // 5)
    assert cut.sample_ids.tolist()[:4] == [28, 29, 30, 31]
    assert len(set(cut.sample_ids.tolist())) == 8
    assert micro.cut(1) is micro


def test_the_rate_follows_the_batch_where_it_is_scaled_to_it():
    optimizer = replace(JOB.optimizer, batch_scaling="linear", base_batch=12, schedule="constant")
    rates = [at_step(step, optimizer, 10, ramp_of(JOB).at(step).batch.global_batch) for step in range(6)]
    assert rates == pytest.approx([optimizer.lr * size / 12 for size in (4, 4, 6, 6, 6, 12)])
    assert resumed_end(JOB, replace(JOB, train=replace(TRAIN, batch_ramp="")), 6, 10).message == ""


@pytest.mark.parametrize(
    ("job", "path", "message"),
    [
        (replace(JOB, train=replace(TRAIN, seq_ramp="2*5")), "train.seq_ramp", "16 / 5 is not an integer; nearest"),
        (replace(JOB, train=replace(TRAIN, steps=5)), "train.batch_ramp", "nearest legal: train.steps=6"),
        (
            replace(JOB, train=replace(TRAIN, batch_ramp="2*5")),
            "train.batch_ramp",
            "steps 1 to 1, global batch 5, sequences of 4 tokens: global_batch 5 ≠",
        ),
        (
            replace(JOB, layout=Layout(tp=2, sp=True, cp=2), train=replace(TRAIN, batch_ramp="", seq_ramp="1*2")),
            "train.seq_ramp",
            "steps 1 to 1, global batch 12, sequences of 2 tokens: ",
        ),
        (
            replace(JOB, layout=Layout(dp_replicate=4, sync="local_sgd")),
            "train.batch_ramp",
            "steps 3 to 4, global batch 6, sequences of 8 tokens: global_batch 6 ≠",
        ),
        (
            replace(JOB, data=Data(corpus="chat", path="rows.jsonl", template="raw")),
            "train.seq_ramp",
            "cut conversations",
        ),
        (replace(JOB, train=replace(TRAIN, batch_ramp="16,32")), "train.batch_ramp", "such as 100*64+100*128"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_choice(job, path, message):
    assert any(where == path and message in said for where, said in problems_of(job)), problems_of(job)


def test_predictions_say_what_they_assume():
    assert problems_of(JOB) == []
    assert "steps 1 to 1, global batch 4, sequences of 4 tokens; steps 2 to 2" in assumption(JOB)
    assert [job.train.global_batch for _, job in phase_jobs(JOB)] == [4, 4, 6, 6]
    assert assumption(replace(JOB, train=Train())) == ""
