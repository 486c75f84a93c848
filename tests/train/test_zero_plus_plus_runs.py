"""Whole runs with ZeRO++: they go on with another second copy of the parameters, and with quantised messages or not."""

from dataclasses import replace

import pytest
import torch

from phalanx.config.layout import Layout
from phalanx.errors import StoppedError
from train.runs import change, losses, moves_between, train, weights

COPY = Layout(dp_shard=4, hpz=2)
CODES = Layout(dp_shard=4, hpz=2, quantise_weights="int8", quantise_gradients="int4")


def test_a_run_goes_on_with_another_copy_and_without(ranks, job):
    moves_between(ranks, job, [COPY, Layout(dp_shard=2, tp=2), Layout(dp_shard=4, hpz=4)])


def test_a_run_with_quantised_messages_resumes_bit_by_bit(ranks, job):
    """Codes carry nothing from one step to the next, so that checkpoints need nothing of them."""
    job = replace(change(job, "train", precision="fp32"), layout=CODES)
    ranks(train, 4, job)
    moved = change(job, "run", name="moved")
    with pytest.raises(StoppedError):
        ranks(train, 4, moved, 3)
    ranks(train, 4, moved)
    straight, found = weights(job), weights(moved)
    assert straight.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in straight.items())
    assert losses(moved) == losses(job)


def test_a_run_goes_on_without_quantised_messages(ranks, job):
    """Its weights are the quantised run's, so that losses stay near those of one process, and are not equal to them."""
    ranks(train, 1, job)
    moved = change(job, "run", name="moved")
    with pytest.raises(StoppedError):
        ranks(train, 4, replace(moved, layout=CODES), 3)
    ranks(train, 2, replace(moved, layout=Layout(dp_shard=2)))
    assert losses(moved) == pytest.approx(losses(job), rel=1e-2)
    assert losses(moved) != losses(job)
