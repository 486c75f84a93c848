"""Faults that the guard finds: flipped bits, and losses or gradients that jump."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from checkpoint.contents import require_same_bits
from covering import also_whole
from phalanx.checkpoint.inventory import check
from phalanx.checkpoint.manifest import Manifest
from phalanx.config.job import Data, GuardOptions, Job, RunOptions
from phalanx.config.layout import Layout
from phalanx.errors import CorruptionError, NotFiniteError, SpikeError
from phalanx.parallel import mesh as meshes
from phalanx.train.guard import Difference, History, Replicas, digests, words
from phalanx.train.step import Stepper
from train.guard.faults import Fault, train_as_on_a_gpu, train_with
from train.runs import change, losses, rows, weights

# A flipped bit on one rank: found, named, and undone, so that the run ends with the bits of one without the fault.


NORM = "final_norm.weight"


def guarded(job, layout: Layout, **guard):
    job = change(change(dataclasses.replace(job, layout=layout), "train", eval_samples=0), "checkpoint", every=2)
    return change(job, "guard", **{"every": 1, **guard})


SOUND: dict[Job, tuple[dict[str, torch.Tensor], float]] = {}
"""The weights and the last loss of runs without a fault, by job, whatever the guard's options are."""


def sound_run(ranks, job) -> tuple[dict[str, torch.Tensor], float]:
    """Trains without a fault, unless a test has."""
    key = dataclasses.replace(job, run=RunOptions(), data=Data(), guard=GuardOptions())
    if key not in SOUND:
        ranks(train_with, job.layout.processes, sound := change(job, "run", name="sound"))
        assert not rows(sound, "guard")
        SOUND[key] = weights(sound), losses(sound)[-1]
    return SOUND[key]


def same_as_without(ranks, job, *faults: Fault, run=train_with) -> list[dict]:
    """The rows of the guard, of a run with faults that ends with the weights of a run without any."""
    expected, loss = sound_run(ranks, job)
    ranks(run, job.layout.processes, job, *faults)
    require_same_bits(weights(job), expected)
    assert losses(job)[-1] == loss
    return rows(job, "guard")


@pytest.mark.parametrize(
    ("layout", "fault", "tensor"),
    [
        (Layout(dp_replicate=3), Fault("parameter", 2, 4), "blocks.1.mlp.down.weight"),
        (Layout(dp_replicate=3), Fault("exp_avg_sq", 1, 3), "blocks.1.mlp.down.weight (exp_avg_sq)"),
        (Layout(dp_shard=3, zero=1), Fault("parameter", 1, 4), "blocks.1.mlp.down.weight"),
        (
            Layout(dp_replicate=2, pp=2, schedule="dualpipe", accumulation=2),
            Fault("parameter", 1, 4),
            "blocks.1.mlp.down.weight",
        ),
        *also_whole((Layout(tp=2, dp_replicate=2), Fault("exp_avg", 3, 4, NORM), f"{NORM} (exp_avg)")),
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
    return change(change(job, "optimizer", state="8bit"), "model", d_ff=256)


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
        (Layout(dp_replicate=2), 3, "rewind"),
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
        *also_whole((Layout(dp_replicate=2, dp_shard=2), "nan")),
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


# A loss or gradient that jumps, or is not finite, whenever the step is computed: skipped, left behind, or the end.

SPIKE = Fault("own gradient", 0, 4, times=2)
LAYOUT = Layout(dp_replicate=2)


def watched(job, **guard):
    job = change(change(dataclasses.replace(job, layout=LAYOUT), "train", eval_samples=0), "checkpoint", every=1)
    job = change(job, "optimizer", schedule="constant")
    return change(job, "guard", **{"on_spike": "skip", "spike_warmup": 3, "spike_window": 8, **guard})


def saved(job, step: int) -> Manifest:
    return check(Path(job.run.dir) / job.run.name / "checkpoints" / f"step-{step:06d}")


def test_a_spike_is_skipped_and_the_samples_are_named_also_after_a_resume(ranks, job):
    job = watched(job)
    ranks(train_with, 2, job, SPIKE)
    (row,) = rows(job, "guard")
    assert (row["step"], row["found"], row["action"]) == (4, "spike", "skip")
    assert row["samples"] == [36, 47]
    assert row["grad_norm"] > 5 * rows(job, "step")[2]["grad_norm"]
    assert [saved(job, step).meta["updates"] for step in (3, 4, 5, 6)] == [3, 3, 4, 5]
    resumed = change(job, "run", name="resumed")
    ranks(train_with, 2, change(resumed, "train", steps=3))
    ranks(train_with, 2, resumed, SPIKE)
    require_same_bits(weights(resumed), weights(job))


def test_a_rewind_continues_with_the_samples_after_the_spike(ranks, job):
    job = change(watched(job, on_spike="rewind", every=0), "checkpoint", every=2)
    ranks(train_with, 2, job, SPIKE)
    assert [row["step"] for row in rows(job, "step")] == [1, 2, 3, 3, 4, 5, 6]
    assert saved(job, 6).meta["samples"] == 48 + 4 * 12
    assert [row["action"] for row in rows(job, "guard")] == ["rewind"]


def test_a_spike_ends_the_run_by_policy(ranks, job):
    with pytest.raises(SpikeError, match=r"step 4: gradient norm .* × its median of .* \(samples 36 to 47\), computed"):
        ranks(train_with, 2, watched(job, on_spike="stop"), SPIKE)


def test_steps_that_are_not_finite_are_skipped_up_to_a_limit(ranks, job):
    job = watched(job, on_nan="skip", limit=1)
    with pytest.raises(NotFiniteError, match=r"step 5: loss .*guard.limit of 1 in 1,000 steps is reached"):
        ranks(train_with, 2, job, Fault("nan", 1, 3, times=2), Fault("nan", 0, 5, times=2))
    assert [(row["step"], row["action"]) for row in rows(job, "guard")] == [(3, "skip"), (5, "stop")]
    assert rows(job, "step")[2]["grad_norm"] is None
    assert saved(job, 4).meta["updates"] == 3


def test_a_jump_is_measured_against_the_median_after_the_warm_up():
    history = History(GuardOptions(spike_warmup=3, spike_window=4, spike_loss=1.5, spike_norm=4.0))
    for number in range(1, 4):
        assert history.spike(100.0, 100.0) == ""
        history.take(2.0, number / 2)
    assert history.spike(2.9, 3.9) == ""
    assert history.spike(3.1, 4.1) == "loss 3.1 is 1.55 × its median of 2, gradient norm 4.1 is 4.1 × its median of 1"
    restored = History(history.options)
    restored.load_state(history.state())
    assert restored == history
    assert math.isclose(restored.norms[-1], 1.5)


def test_interventions_are_limited_in_a_window_and_survive_going_back():
    history = History(GuardOptions(limit=2))
    assert [history.intervene(step) for step in (5, 5, 900, 1005, 1900)] == [True, True, False, True, True]
    history.restart()
    history.load_state(History(history.options).state())
    assert history.interventions == [1005, 1900]


# Digests: any flipped bit and any two values that change places give another one, and equal bits the same.

CPU = torch.device("cpu")
KINDS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
SIZES = st.integers(1, 3000)


def digest(tensor: torch.Tensor) -> int:
    return int(digests([tensor], CPU).item())


def drawn(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(size=SIZES, dtype=st.sampled_from([*KINDS]), place=st.floats(0, 0.999), bit=st.integers(0, 63))
def test_any_flipped_bit_changes_the_digest(size, dtype, place, bit):
    tensor = drawn(size, dtype)
    before, bits = digest(tensor), tensor.view(KINDS[dtype])
    width = 8 * tensor.element_size()
    bits[int(place * size)] ^= torch.tensor(1 << bit % width if bit % width < width - 1 else -(1 << (width - 1)))
    assert digest(tensor) != before
    assert not torch.equal(words(tensor), words(drawn(size, dtype)))


@given(size=st.integers(2, 3000), places=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)))
def test_values_that_change_places_change_the_digest(size, places):
    tensor = drawn(size, torch.float32)
    one, other = (int(place * size) for place in places)
    assume(tensor[one] != tensor[other])
    before = digest(tensor)
    tensor[[one, other]] = tensor[[other, one]]
    assert digest(tensor) != before


@given(size=st.integers(4, 3000), bits=st.lists(st.integers(0, 31), min_size=2, max_size=3), data=st.data())
def test_the_same_bit_flipped_in_two_or_three_places_changes_the_digest(size, bits, data):
    """Sign bits cancel in a plain sum of words."""
    tensor = drawn(size, torch.float32)
    before = digest(tensor)
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=len(bits), max_size=len(bits), unique=True))
    tensor[places] *= -1
    assert digest(tensor) != before


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_digest_depends_neither_on_where_a_tensor_lies_nor_on_those_beside_it(dtype):
    around = drawn(2001, dtype)
    part = around[7:1000]
    alone = digest(part.clone())
    assert digest(part) == alone
    assert digests([around, part, None, part[:0]], CPU)[1:3].tolist() == [alone, 0]
    assert digest(around[:1998].view(2, 999).t()) == digest(around[:1998].view(2, 999).t().contiguous())


def test_a_majority_is_more_than_half():
    of = {
        (1, 1, 2): ([0, 1], [2]),
        (1, 2): ([], [0, 1]),
        (1, 1, 2, 2): ([], [0, 1, 2, 3]),
        (5, 1, 5, 5): ([0, 2, 3], [1]),
    }
    for found, (good, suspects) in of.items():
        difference = Difference(0, "parameter", "w", dict(enumerate(found)))
        assert (difference.good, difference.suspects) == (good, suspects)
