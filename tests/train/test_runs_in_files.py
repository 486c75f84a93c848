"""Whole runs whose optimizer state is in files: resume, saves in the background, records."""

import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from checkpoint.contents import contents
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.train import residence as in_files
from phalanx.train import saving
from train.runs import change, losses, moves_between, rows, train


def test_a_run_goes_on_in_memory_and_back(ranks, job, tmp_path):
    there = {"offload": "optimizer", "offload_to": str(tmp_path)}
    layouts = [Layout(dp_shard=2, zero=1, **there), Layout(tp=2, offload="optimizer"), Layout(**there)]
    moves_between(ranks, job, layouts)


def test_the_guard_compares_replicas_in_files(ranks, job, tmp_path):
    job = change(change(job, "guard", every=2), "layout", dp_replicate=2)
    ranks(train, 2, job)
    there = change(job, "layout", offload="optimizer", offload_to=str(tmp_path))
    ranks(train, 2, change(there, "run", name="moved"))
    assert losses(change(job, "run", name="moved")) == losses(job)
    assert not rows(change(job, "run", name="moved"), "guard")


def saved_slowly(ranks, job: Job) -> None:
    """Trains while each tensor of a checkpoint takes its time, as it does from a slow disk."""
    with (
        mock.patch.object(in_files, "BUFFER_BYTES", 16 * 1024),
        mock.patch.object(saving, "will_read", side_effect=lambda tensor: time.sleep(0.005)),
    ):
        train(ranks, job)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saves_in_the_background_hold_one_moment(ranks, job, tmp_path, precision):
    job = change(change(job, "train", precision=precision), "checkpoint", every=1, keep=0)
    ranks(train, 1, job)
    moved = change(job, "run", name="moved")
    ranks(saved_slowly, 1, change(moved, "layout", offload="optimizer", offload_to=str(tmp_path)))
    folder = Path(job.run.dir)
    steps = sorted(path.name for path in (folder / job.run.name / "checkpoints").glob("step-*"))
    assert len(steps) == job.train.steps
    for step in steps:
        straight, found = (contents(folder / name / "checkpoints" / step) for name in (job.run.name, "moved"))
        assert straight.keys() == found.keys()
        for name, tensor in straight.items():
            assert torch.equal(found[name], tensor), (step, name)
    (row,) = rows(moved, "offload")
    assert row["bytes"].keys() == {"down", "up", "read", "written"}
    assert row["bytes"]["read"] >= sum(t.nbytes for name, t in straight.items() if "/" in name)
