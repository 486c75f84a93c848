"""Steps that the host judges one step later, as on a GPU: the same bits, the same answers, and no wait in a step."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from covering import also_whole
from parallel.steps import micro_batches
from phalanx.checkpoint.inventory import check
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import MoE
from phalanx.errors import NotFiniteError, StoppedError
from phalanx.parallel import mesh as meshes
from phalanx.train.guard import Guard, History
from phalanx.train.step import StepInputs, Stepper
from train.guard.faults import Fault, train_with
from train.runs import change, losses, require_same_weights, rows, train

HOST_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
VOCAB = 64


def kept(job: Job, **guard: Any) -> Job:
    """No step is compared with replicas, which waits for the device, and checkpoints are rare."""
    return change(change(job, "checkpoint", every=4), "guard", every=0, **guard)


def deferring() -> contextlib.AbstractContextManager[Any]:
    return mock.patch("phalanx.train.guard.repeats_exactly", return_value=False)


def launched(ranks: Any, job: Job, *faults: Fault) -> int:
    """Trains with steps that are judged later. Returns how many were launched."""
    launch, count = Stepper.launch, []

    def counting(stepper: Stepper, *arguments: Any) -> None:
        count.append(arguments)
        launch(stepper, *arguments)

    with deferring(), mock.patch.object(Stepper, "launch", counting):
        train_with(ranks, job, *faults)
    return len(count)


def stopped(ranks: Any, job: Job) -> None:
    with deferring():
        train(ranks, job, stop_at=1)


LAYOUTS = [Layout(dp_shard=2, zero=1), Layout(dp_shard=2), Layout(pp=2)]
LAYOUTS += also_whole(Layout(), Layout(dp_replicate=2), Layout(tp=2))  # which share their path with the kinds below


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.line())
def test_a_run_has_the_same_bits(ranks, job, layout):
    job = kept(dataclasses.replace(job, layout=layout))
    ranks(train, layout.processes, job)
    later = change(job, "run", name="later")
    assert ranks(launched, layout.processes, later)[0] == 4, "all but those before a checkpoint or the end"
    assert [row["step"] for row in rows(later, "step")] == [1, 2, 3, 4, 5, 6]
    require_same_weights(later, job)


MIXTURE = MoE(n_experts=4, top_k=2, d_ff=8, aux_loss=0.01, bias_balanced=True)
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "muon": {"optimizer": {"name": "muon"}},
    "adamw 8bit": {"optimizer": {"state": "8bit"}},
    "fp16": {"train": {"precision": "fp16"}},
    "experts": {"model": {"moe": MIXTURE}},
}
CAPACITY = {"model": {"moe": dataclasses.replace(MIXTURE, capacity=1.5)}}
"""Experts on several ranks without a count of the rows that they exchange, for which the host would wait."""


def of_kind(job: Job, name: str) -> Job:
    for section, values in (KINDS | {"capacity": CAPACITY}).get(name, {}).items():
        job = change(job, section, **values)
    return job


@pytest.mark.parametrize("name", KINDS)
def test_so_it_has_with_every_kind_of_state(ranks, job, name):
    """Also where a step is not finite, which with fp16 halves the loss scale; experts' loads count each token of the
    steps once."""
    job = kept(of_kind(dataclasses.replace(job, layout=Layout(dp_replicate=2)), name), on_nan="skip")
    job, fault = change(job, "train", log_every=2), Fault("nan", 1, 2, times=2)
    ranks(train_with, 2, job, fault)
    later = change(job, "run", name="later")
    assert ranks(launched, 2, later, fault)[0] > 3
    experts = [[row | {"time": 0} for row in rows(each, "experts")] for each in (later, job)]
    assert experts[0] == experts[1]
    require_same_weights(later, job)


@pytest.mark.parametrize("times", [1, 2], ids=["transient", "comes again"])
def test_a_step_that_is_not_finite_is_answered_and_the_next_one_taken_again(ranks, job, times):
    job = kept(dataclasses.replace(job, layout=Layout(dp_replicate=2)), on_nan="skip")
    fault = Fault("nan", 1, 2, times=times)
    ranks(train_with, 2, job, fault)
    later = change(job, "run", name="later")
    ranks(launched, 2, later, fault)
    described = [[(row["step"], row["found"], row["action"]) for row in rows(each, "guard")] for each in (job, later)]
    assert described[0] == described[1]
    assert len(described[0]) == 1
    require_same_weights(later, job)
    path = Path(job.run.dir) / "later" / "checkpoints" / "step-000006"
    assert check(path).meta["updates"] == 7 - times


def test_a_step_that_is_not_finite_ends_the_run(ranks, job):
    job = kept(dataclasses.replace(job, layout=Layout(dp_replicate=2)))
    with pytest.raises(NotFiniteError, match=r"step 2: loss .*, first in .* \(samples 12 to 23\)"):
        ranks(launched, 2, job, Fault("nan", 1, 2, times=9))
    assert [row["step"] for row in rows(job, "step")] == [1]


def test_a_request_to_stop_is_met_one_step_later(ranks, job):
    job = kept(job)
    with pytest.raises(StoppedError, match="at step 2 of 6"):
        ranks(stopped, 1, job)
    ranks(launched, 1, job)
    straight = change(job, "run", name="straight")
    ranks(train, 1, straight)
    assert losses(job) == losses(straight)


class NoHostReads(TorchDispatchMode):
    """Refuses what waits for a device to read a value of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in HOST_READS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def without_reads(ranks: Any, job: Job) -> list[float]:
    mesh = meshes.build(job.layout, "cpu")
    with deferring():
        stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
        guard = Guard(stepper, History(job.guard), lambda *_: None)
    shown: list[float] = []
    compute, launch = stepper.compute, stepper.launch

    def refusing(call: Any) -> Any:
        def called(*arguments: Any) -> Any:
            with NoHostReads():
                return call(*arguments)

        return called

    stepper.compute, stepper.launch = refusing(compute), refusing(launch)
    for step in range(4):
        batches, valid = micro_batches(job, step, mesh.data_rank, VOCAB)
        known = guard.submit(StepInputs(batches, step, valid, 1e-3, samples=range(4)), settles=False)
        shown += [each.loss for _, each in known]
    return shown


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *((layout, "adamw") for layout in (Layout(), *also_whole(Layout(dp_replicate=2), Layout(dp_shard=2)))),
        *((Layout(dp_shard=2), name) for name in ("muon", "fp16", "experts", *also_whole("lion"))),
        *((Layout(dp_replicate=2), name) for name in ("adamw 8bit", *also_whole("sgd", "fp16"))),
        *((Layout(dp_shard=2, zero=zero), "adamw") for zero in (1, *also_whole(2))),
        *((Layout(dp_shard=2, offload=part), "adamw") for part in ("all", *also_whole("optimizer", "activations"))),
        *((Layout(dp_shard=2, recompute=mode), "adamw") for mode in ("full", *also_whole("products", "mlp"))),
        *((layout, "fp8") for layout in (Layout(tp=2, sp=True), *also_whole(Layout(), Layout(dp_shard=2)))),
        (Layout(dp_shard=2, zero=2, accumulate="sharded", accumulation=2), "adamw"),
        (Layout(dp_shard=2, ep=2), "capacity"),
        (Layout(cp=2), "adamw"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.line(),
)
def test_a_step_reads_nothing_of_the_device(ranks, job, layout, name):
    job = dataclasses.replace(job, layout=layout)
    job = kept(change(job, "train", precision="bf16", global_batch=4))
    if name == "fp8":
        job = change(job, "train", precision=name)
    else:
        job = of_kind(job, name) if name in {*KINDS, "capacity"} else change(job, "optimizer", name=name)
    for shown in ranks(without_reads, layout.processes, job):
        # The host's processors update what is on the host: they have the gradients, and know the norm at once.
        assert len(shown) == (4 if layout.offload in ("optimizer", "all") else 3), "the last is known one step later"
