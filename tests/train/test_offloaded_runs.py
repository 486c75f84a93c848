"""Whole runs with an optimizer on the host: resume with and without offload, what they record, and their budget."""

from dataclasses import replace

import pytest
import torch

from phalanx.config.layout import Layout
from phalanx.errors import RunError, StoppedError
from phalanx.parallel.offload import device_budget
from train.runs import change, moves_between, rows, train, weights


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(), Layout(offload="optimizer"), Layout()],
        [Layout(dp_shard=2, zero=1, offload="optimizer"), Layout(dp_replicate=2), Layout(tp=2, offload="optimizer")],
        [Layout(offload="all"), Layout(dp_shard=2, offload="all"), Layout(pp=2, offload="activations")],
    ],
    ids=lambda layouts: " ".join(layout.line() for layout in layouts),
)
def test_a_run_goes_on_without_offload_and_back(ranks, job, layouts):
    moves_between(ranks, job, layouts)


def test_masters_of_bf16_resume_bit_by_bit(ranks, job):
    job = change(job, "train", precision="bf16")
    ranks(train, 1, job)
    moved = change(job, "run", name="moved")
    with pytest.raises(StoppedError):
        ranks(train, 1, change(moved, "layout", offload="optimizer"), 3)
    ranks(train, 1, moved)
    straight, found = weights(job), weights(moved)
    assert straight.keys() == found.keys()
    assert any(name.startswith("master/") for name in found)
    assert all(torch.equal(found[name], tensor) for name, tensor in straight.items())


def test_copied_bytes_are_recorded(ranks, job):
    ranks(train, 1, change(job, "layout", offload="optimizer"))
    (row,) = rows(job, "offload")
    parameters = 8 * sum(tensor.numel() for name, tensor in weights(job).items() if "/" not in name)
    assert row["bytes"] == {"down": parameters, "up": parameters}


def within(ranks, job, mib: float) -> dict[str, int]:
    with device_budget(mib) as peaks:
        train(ranks, job)
    return peaks


def test_a_budget_ends_a_run_that_exceeds_it_and_not_the_offloaded_one(ranks, job):
    job = replace(job, model=replace(job.model, n_layers=6, d_model=64, seq_len=8), layout=Layout(recompute="full"))
    with pytest.raises(RunError, match=r"exceed run.device_budget_mib, 5.0MiB per device") as caught:
        ranks(within, 1, job, 5.0)
    assert "layout.offload=optimizer" in str(caught.value)
    (peaks,) = ranks(within, 1, change(job, "layout", offload="optimizer"), 5.0)
    assert peaks["device_peak_bytes"] <= 5 * 2**20 < peaks["host_peak_bytes"]
