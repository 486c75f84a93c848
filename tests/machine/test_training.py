"""The short training: the same loss on all ranks, step times of each, a profile; and losses that differ are named."""

import json

import torch

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.machine import training
from phalanx.parallel import mesh as meshes

WORDS = ["model=tiny", "data.corpus=random", "layout.micro_batch=2"]


def job_of(*words):
    return load_words(overrides.parse([*WORDS, *words])).job


def train(ranks, words, folder, fault=None):
    job = job_of(*words)
    mesh = meshes.build(training.trainable(job)[0].layout, "cpu")
    if fault is not None:
        fault(ranks)
    training.STEPS = {True: (3, 3)}
    hosts = [f"h{rank}" for rank in range(ranks.world)]
    return training.train_briefly(
        job, mesh, torch.device("cpu"), 31, hosts, quick=True, traces=folder, tick=lambda done, total: None
    )


def test_all_ranks_have_the_same_loss_and_a_trace(ranks, tmp_path):
    every = ranks(train, 2, ["dp_replicate=2"], tmp_path)
    found = every[0]
    assert repr(every[1]) == repr(found)
    assert found.steps == 3
    assert len(found.losses) == training.WARM_UP + 3 + training.PROFILED
    assert [len(seconds) for seconds in found.step_s] == [3, 3]
    assert found.problems == found.changed == []
    assert 3.0 < found.losses[0] < 4.0, "log 31 = 3.43"
    assert found.traces == [str(tmp_path / f"test-dist-rank_{rank}.json") for rank in range(2)]
    for path in found.traces:
        with open(path) as file:
            assert json.load(file)["traceEvents"]
    assert 0 < len(found.kernels) <= training.MOST_KERNELS
    assert all(kernel.seconds > 0 for kernel in found.kernels)


def differ(ranks):
    """Rank 1 reads another loss."""
    step = training.Stepper.step

    def other(self, *words):
        done = step(self, *words)
        return training.replace(done, loss=done.loss * 1.01) if ranks.rank == 1 else done

    training.Stepper.step = other


def test_losses_that_differ_are_named(ranks):
    before = training.Stepper.step
    try:
        found = ranks(train, 2, ["dp_replicate=2"], None, differ)[0]
    finally:
        training.Stepper.step = before
    (problem,) = found.problems
    assert problem.startswith("training step 1: rank 1 (h1) has loss 3.")
    assert problem.endswith("all should have the same")
    assert found.traces == []


def test_steps_that_do_not_stand_alone_are_replaced():
    job, changed = training.trainable(job_of("dp_replicate=2", "sync=local_sgd"))
    assert (job.layout.sync, changed) == ("bsp", ["sync=bsp instead of local_sgd"])
    job, changed = training.trainable(job_of("pp=2", "layout.schedule=pipedream", "accumulation=2"))
    assert (job.layout.schedule, changed) == ("1f1b", ["schedule=1f1b instead of pipedream"])
    assert training.trainable(job_of("dp_shard=2"))[1] == []


def test_a_loss_that_is_not_finite_is_named():
    assert training._different([[1.0, 2.0], [1.0, float("nan")]], ["a", "b"]) == [
        "training step 2: rank 1 (b) has loss nan, which is not finite"
    ]
    assert training._different([[1.0], [1.0 + 1e-9]], ["a", "b"]) == []
