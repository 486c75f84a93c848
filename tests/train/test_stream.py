"""Runs whose pipeline goes on from step to step: checkpoints, validation, stopping and NaN find it empty."""

import dataclasses
import shutil

import pytest
import torch

from phalanx.config.layout import Layout
from phalanx.errors import NotFiniteError, StoppedError
from train.runs import change, losses, train, weights

LAYOUT = Layout(pp=2, accumulation=3, schedule="pipedream")


@pytest.fixture
def streamed(job):
    job = change(change(job, "train", steps=9, eval_every=4), "checkpoint", every=5)
    return dataclasses.replace(change(job, "model", dropout=0.1), layout=LAYOUT)


def test_resuming_from_a_checkpoint_gives_the_same_bits_as_an_unbroken_run(ranks, streamed, tmp_path):
    ranks(train, 2, streamed)
    straight, curve = weights(streamed), losses(streamed)
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-000009")
    (tmp_path / "runs" / "run" / "latest").unlink(missing_ok=True)
    ranks(train, 2, streamed)
    assert all(torch.equal(tensor, straight[name]) for name, tensor in weights(streamed).items())
    assert losses(streamed) == [*curve, *curve[5:]], "the steps after the checkpoint were made twice"
    assert len(curve) == 9


def test_a_request_to_stop_lets_what_is_under_way_come_back(ranks, streamed):
    with pytest.raises(StoppedError, match="at step 4 of 9, with a checkpoint"):
        ranks(train, 2, change(streamed, "train", eval_every=0), 2)
    ranks(train, 2, change(streamed, "train", eval_every=0))
    assert len(losses(streamed)) == 9


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_written(ranks, streamed):
    with pytest.raises(NotFiniteError, match=r"step \d: loss .*, gradient norm .*, first in "):
        ranks(train, 2, change(streamed, "optimizer", lr=1e200, clip=0.0, warmup_steps=0))
