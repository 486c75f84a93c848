"""A flipped bit on one rank: found, named, and undone, so that the run ends with the bits of one without the fault."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from phalanx.config.layout import Layout
from phalanx.errors import CorruptionError
from phalanx.parallel import mesh as meshes
from phalanx.train.replicas import Replicas
from phalanx.train.step import Stepper
from train.guard.faults import Fault, train_as_on_a_gpu, train_with
from train.runs import change, losses, rows, weights

NORM = "final_norm.weight"


def guarded(job, layout: Layout, **guard):
    job = change(change(dataclasses.replace(job, layout=layout), "train", eval_samples=0), "checkpoint", every=2)
    return change(job, "guard", **{"every": 1, **guard})


def same_as_without(ranks, job, *faults: Fault, run=train_with) -> list[dict]:
    """The rows of the guard, of a run with faults that ends with the weights of a run without any."""
    world = job.layout.processes
    ranks(train_with, world, sound := change(job, "run", name="sound"))
    ranks(run, world, job, *faults)
    assert not rows(sound, "guard")
    expected, found = weights(sound), weights(job)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert losses(job)[-1] == losses(sound)[-1]
    return rows(job, "guard")


@pytest.mark.parametrize(
    ("layout", "fault", "tensor"),
    [
        (Layout(dp_replicate=3), Fault("parameter", 2, 4), "blocks.1.mlp.down.weight"),
        (Layout(dp_replicate=3), Fault("exp_avg_sq", 1, 3), "blocks.1.mlp.down.weight (exp_avg_sq)"),
        (Layout(tp=2, dp_replicate=2), Fault("exp_avg", 3, 4, NORM), f"{NORM} (exp_avg)"),
        (Layout(dp_shard=3, zero=1), Fault("parameter", 1, 4), "blocks.1.mlp.down.weight"),
        (
            Layout(dp_replicate=2, pp=2, schedule="dualpipe", accumulation=6),
            Fault("parameter", 1, 4),
            "blocks.1.mlp.down.weight",
        ),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else getattr(value, "where", ""),
)
def test_a_majority_heals_a_flipped_bit(ranks, job, layout, fault, tensor):
    (row,) = same_as_without(ranks, guarded(job, layout, on_corruption="heal"), fault)
    assert (row["step"], row["found"], row["action"]) == (fault.step, "corruption", "heal")
    assert row["tensors"] == [tensor]
    assert [*row["hosts"]] == [str(fault.rank)]


def with_codes(job):
    """The job with 8-bit AdamW, which quantises the moments of mlp.down: rows of 256."""
    return change(change(job, "optimizer", name="adamw8bit"), "model", d_ff=256)


def test_bits_of_codes_and_of_scales_are_healed(ranks, job):
    faults = Fault("exp_avg", 2, 3), Fault("exp_avg_sq_scale", 1, 4)
    found = same_as_without(ranks, guarded(with_codes(job), Layout(dp_replicate=3), on_corruption="heal"), *faults)
    assert [(row["step"], row["action"], row["tensors"]) for row in found] == [
        (fault.step, "heal", [f"{fault.name} ({fault.where})"]) for fault in faults
    ]
    assert [[*row["hosts"]] for row in found] == [["2"], ["1"]]


def test_a_bit_of_a_scale_with_one_replica_takes_the_run_back(ranks, job):
    fault = Fault("exp_avg_scale", 1, 5)
    (row,) = same_as_without(ranks, guarded(with_codes(job), Layout(dp_replicate=2)), fault)
    assert (row["step"], row["action"], row["tensors"]) == (5, "rewind", [f"{fault.name} (exp_avg_scale)"])


def share(ranks, job):
    """The share of rank 0's state that has a replica, and the bytes of its parameters and of its optimizer's state."""
    stepper = Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), 13)
    found = Replicas(stepper, exact=True).share
    state = [tensor.nbytes for each in stepper.optimizer.make_state(1).values() for tensor in each.values()]
    return found, sum(each.value.nbytes for each in stepper.replica.local_parameters()), sum(state)


def test_the_share_with_replicas_counts_bytes_of_codes(ranks, job):
    job = dataclasses.replace(with_codes(job), layout=Layout(dp_shard=2, zero=1))
    found, parameters, state = ranks(share, 2, job)[0]
    assert found == parameters / (parameters + state), "each rank has moments of its own"


@pytest.mark.parametrize(
    ("layout", "every", "policy"),
    [
        (Layout(dp_replicate=2), 1, "heal"),
        (Layout(dp_replicate=2, tp=2), 3, "rewind"),
        (Layout(dp_replicate=3), 2, "rewind"),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else "",
)
def test_without_a_majority_or_by_policy_the_run_goes_back(ranks, job, layout, every, policy):
    fault = Fault("parameter", 1, 5)
    job = guarded(job, layout, every=every, on_corruption=policy)
    (row,) = same_as_without(ranks, job, fault)
    assert (row["step"], row["action"]) == (5 if every == 1 else 6, "rewind")
    assert "blocks.1.mlp.down.weight" in row["tensors"]
    assert "1" in row["hosts"]
    taken = [each["step"] for each in rows(job, "step")]
    assert taken == [1, 2, 3, 4, 5, 6] if every == 1 else [1, 2, 3, 4, 5, 5, 6]


def test_without_a_checkpoint_the_run_starts_again(ranks, job):
    job = change(guarded(job, Layout(dp_replicate=2)), "checkpoint", every=0)
    (row,) = same_as_without(ranks, job, Fault("parameter", 0, 3))
    assert row["action"] == "rewind"
    assert [each["step"] for each in rows(job, "step")] == [1, 2, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        (Layout(dp_replicate=2), "summed gradient"),
        (Layout(dp_replicate=2, bucket_mb=0.01), "nan"),
        (Layout(dp_shard=2, zero=2), "own gradient"),
        (Layout(dp_replicate=2, dp_shard=2), "nan"),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else value,
)
def test_a_transient_fault_of_a_gradient_is_computed_away_and_named(ranks, job, layout, where):
    fault = Fault(where, 1, 4)
    (row,) = same_as_without(ranks, guarded(job, layout, on_spike="skip", spike_warmup=3), fault)
    assert (row["step"], row["found"], row["action"]) == (4, "transient", "computed_again")
    assert [*row["hosts"]] == ["1"]


def test_a_fault_that_nothing_shows_is_found_where_every_step_is_repeated(ranks, job):
    fault = Fault("last digits of own gradient", 1, 4)
    (row,) = same_as_without(ranks, guarded(job, Layout(dp_shard=2), repeat_every=2), fault)
    assert (row["step"], row["found"], row["action"], [*row["hosts"]]) == (4, "transient", "computed_again", ["1"])


def test_a_transient_fault_is_seen_through_the_noise_of_other_kernels(ranks, job):
    fault = Fault("nan", 2, 4)
    (row,) = same_as_without(ranks, guarded(job, Layout(tp=2, dp_replicate=2)), fault, run=train_as_on_a_gpu)
    assert (row["found"], [*row["hosts"]]) == ("transient", ["2", "3"]), "tensor ranks exchange what they compute"


def test_a_run_stops_by_policy_or_after_too_many_faults(ranks, job):
    layout = Layout(dp_replicate=3)
    with pytest.raises(
        CorruptionError, match=r"step 3: replicas differ: blocks.1.mlp.down.weight on rank 2 \(.*\), not"
    ):
        ranks(train_with, 3, guarded(job, layout, on_corruption="stop"), Fault("parameter", 2, 3))
    unsteady = change(guarded(job, Layout(dp_replicate=2), on_spike="skip", spike_warmup=2), "run", name="unsteady")
    with pytest.raises(CorruptionError, match=r"step 3: 3 computations of a step gave 3 results: a fault on rank 1 \("):
        ranks(train_with, 2, unsteady, Fault("unsteady gradient", 1, 3, times=3))
    limited = change(guarded(job, layout, on_corruption="heal", limit=1), "run", name="limited")
    with pytest.raises(CorruptionError, match=r"guard.limit of 1 in 1,000 steps is reached. Checkpoints are from"):
        ranks(train_with, 3, limited, Fault("parameter", 2, 3), Fault("exp_avg", 0, 5))
