"""Optimizer state, activations and parameters on the host or in files: equal to memory, within a budget."""

import os
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from checkpoint.contents import contents, require_same_bits
from covering import also_whole
from parallel.steps import micro_batches, steps, worst
from phalanx.blocks.parameters import count
from phalanx.comm.shared import SOCKETS
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.errors import JobError, OffloadError, RunError
from phalanx.parallel import mesh as meshes
from phalanx.parallel.offload import ALIGNMENT, DeviceBudget, StateFile, device_budget
from phalanx.train import residence as in_files
from phalanx.train import saving
from phalanx.train.optimizers import rule
from phalanx.train.step import StepInputs, Stepper
from train.measured_memory import least_device_peak
from train.runs import change, losses, moves_between, optimizer_of, require_same_weights, rows, stop, train, weights

# An optimizer on the host: equal to one on the device, its tensors counted, within a budget that it would exceed.


VOCAB = 64
GPT = ModelConfig(n_layers=2, d_model=64, n_heads=4, seq_len=16)
DEEP = replace(GPT, n_layers=12, seq_len=8, vocab_size=VOCAB)
EXPERTS = replace(GPT, moe=MoE(n_experts=4, top_k=2, d_ff=32, n_shared=1))


def job_of(layout: Layout, model: ModelConfig = GPT, name: str = "adamw", **train: Any) -> Job:
    train = {"global_batch": 8, "precision": "fp64"} | train
    return Job(model=model, layout=layout, train=Train(**train), optimizer=optimizer_of(name))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(micro_batch=2),
        Layout(dp_replicate=2, bucket_mb=0.1),
        Layout(dp_shard=2, zero=1, bucket_mb=0.1),
        Layout(dp_shard=2, zero=2, bucket_mb=0.1, micro_batch=2, accumulate="sharded"),
        Layout(dp_shard=2, zero=3, micro_batch=2),
        Layout(pp=2, micro_batch=1, schedule="zb_h1", dp_shard=2, zero=3),
        *also_whole(
            Layout(),
            Layout(dp_replicate=2, dp_shard=2, zero=2, bucket_mb=0.1),
            Layout(dp_replicate=2, dp_shard=2, zero=3),
            Layout(dp_shard=2, tp=2, sp=True, zero=1, bucket_mb=0.1),
            Layout(pp=2, micro_batch=1, dp_shard=2, zero=2, bucket_mb=0.1),
            Layout(cp=2, zero=1, bucket_mb=0.1),
        ),
    ],
    ids=Layout.line,
)
def test_equals_one_process(ranks, one_process, layout):
    job = job_of(replace(layout, offload="optimizer"))
    compare(ranks(steps, layout.world, job, VOCAB), one_process(GPT))


@pytest.fixture(scope="module")
def one_process(ranks):
    """The steps of one process, by model."""
    return cache(lambda model: ranks(steps, 1, job_of(Layout(), model), VOCAB)[0])


def compare(results, expected) -> None:
    (shown, gradients, parameters), *_ = results
    for found, alone in zip(shown, expected[0], strict=True):
        assert found == pytest.approx(alone, rel=1e-9)
    assert worst(gradients, expected[1], 1e-7) < 1e-9
    assert worst(parameters, expected[2], 1e-2) < 1e-9


NARROW = ("adamw state=8bit", "adamw state=bf16 master=none", "sgd master=none rounding=kahan")
RULES = [("adamw", "fp32"), *((name, "bf16") for name in ("adamw", *NARROW, *also_whole("sgd", "lion")))]


def counted(
    ranks, job: Job, limit: int, count: int = 2, repeats: bool = True
) -> tuple[int, int, dict[str, int], list[float]]:
    """Peaks of device and host, and copied bytes and losses of the first `count` steps, of a rank whose device has
    `limit` bytes. The chunks in which the host updates are as small beside this model as beside those that need it."""
    with mock.patch.dict(os.environ, {SOCKETS: "1"}):  # what is predicted
        mesh = meshes.build(job.layout, "cpu")
    losses, copied = list[float](), list[dict[str, int]]()
    with mock.patch.dict(rule.CHUNK, cpu=2**12), DeviceBudget(limit).counting() as budget:
        stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)

        def take(step: int) -> None:
            batches, valid = micro_batches(job, step, mesh.data_rank, VOCAB)
            losses.append(stepper.step(StepInputs(batches, step, valid, 1e-2)).loss)
            copied.append(dict(stepper.offloaded))

        peak = least_device_peak(budget, take, count, alone=job.layout.world == 1 or not repeats)
    return peak, budget.host_peak, copied[count - 1], losses[:count]


def counted_briefly(ranks, job: Job, expected) -> list:
    """Returns what `counted` finds per rank. It repeats steps only where a device takes a tenth more than `expected` of
    its stage."""
    world = job.layout.world
    found = ranks(counted, world, job, 0, 2, False)
    stages = [expected[rank // (world // job.layout.pp)] for rank in range(world)]
    if any(0.9 * device > stage.allocated for (device, *_), stage in zip(found, stages, strict=True)):
        found = ranks(counted, world, job, 0)
    return found


def test_a_model_whose_state_is_four_times_the_budget_trains_as_without_one(ranks):
    job = job_of(Layout(recompute="full"), DEEP, precision="bf16", global_batch=2)
    state = 16 * count(DEEP, VOCAB)
    with pytest.raises(RunError, match=r"no memory for this rank's .* nearest remedy .*: layout.offload=optimizer"):
        ranks(counted, 1, job, state // 4)
    ((_, _, nothing, expected),) = ranks(counted, 1, job, 0)
    offloaded = replace(job, layout=replace(job.layout, offload="optimizer"))
    ((device, host, copied, losses),) = ranks(counted, 1, offloaded, state // 4)
    assert losses == expected
    assert not nothing
    assert device <= state // 4
    # Masters and moments, and gradients in bf16, whose memory the parameters use on their way back.
    assert host == pytest.approx(14 * count(DEEP, VOCAB), rel=0.01)
    assert copied == {"down": 2 * 2 * count(DEEP, VOCAB), "up": 2 * 2 * count(DEEP, VOCAB)}


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        (Layout(recompute="full"), {}),
        (Layout(dp_shard=2, zero=3, recompute="full"), {"precision": "fp32"}),
        (Layout(pp=2, micro_batch=1, recompute="full"), {}),
        *also_whole((Layout(dp_replicate=2, bucket_mb=0.5, recompute="full"), {})),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else " ".join(value.values()),
)
def test_memory_of_device_and_host_is_the_predicted_one(ranks, layout, train):
    """The device to 10 %, the host to 1 %: small buffers weigh more than in a model that needs offload."""
    layout = replace(layout, offload="optimizer")
    job = job_of(layout, DEEP, **({"precision": "bf16", "global_batch": 4} | train))
    expected = step_memory(rank_spec(job, VOCAB, "cpu"))
    for rank, (device, host, _, _) in enumerate(counted_briefly(ranks, job, expected)):
        predicted = expected[rank // (layout.world // layout.pp)]
        print(layout.line(), rank, device, predicted.allocated, host, predicted.host, predicted)
        assert predicted.allocated == pytest.approx(device, rel=0.1)
        assert predicted.host == pytest.approx(host, rel=0.01)


# Activations and parameters on the host: equal to one process, counted as predicted, within a budget.

FOUR = replace(GPT, n_layers=4)
LONG = ModelConfig(n_layers=8, d_model=64, n_heads=4, seq_len=128, vocab_size=VOCAB)
"""A model whose activations weigh more than its parameters."""
FEW = [
    Layout(recompute="selective"),
    Layout(dp_shard=2, zero=3, recompute="full", micro_batch=2),
    Layout(pp=2, micro_batch=1, schedule="zb_h1"),
]
MANY = [
    Layout(),
    Layout(recompute="full"),
    Layout(micro_batch=2),
    Layout(dp_replicate=2),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_shard=2, micro_batch=2, accumulate="sharded"),
    Layout(dp_shard=2, reshard=False),
    Layout(dp_shard=2, tiles=2, tile="all"),
    Layout(dp_shard=2, ep=2),
    Layout(dp_shard=2, tp=2, sp=True),
    Layout(tp=2, sp=True, sp_regather=True, recompute="selective"),
    Layout(cp=2),
    Layout(cp=2, cp_ulysses=2),
    Layout(pp=2, micro_batch=1),
    Layout(pp=2, micro_batch=1, dp_shard=2, recompute="full"),
    Layout(pp=2, micro_batch=1, schedule="zb_v"),
    Layout(pp=2, micro_batch=1, schedule="dualpipe_v"),
    Layout(pp=2, micro_batch=2, schedule="terapipe"),
]
OFTEN = bool(os.environ.get("PHALANX_OFFLOAD_MATRIX"))
needs_matrix = pytest.mark.skipif(not OFTEN, reason="set PHALANX_OFFLOAD_MATRIX=1, or `make offload`")


@pytest.mark.parametrize("layout", FEW, ids=Layout.line)
def test_activations_and_parameters_equal_one_process(ranks, one_process, layout):
    compare(ranks(steps, layout.world, job_of(replace(layout, offload="all"), FOUR), VOCAB), one_process(FOUR))


def test_gradients_of_experts_leave_when_they_have_arrived(ranks, one_process):
    """Experts that several ranks of each place of ep share are sent by a reduce-scatter of their own."""
    job = job_of(Layout(dp_shard=4, ep=2, offload="optimizer"), EXPERTS)
    compare(ranks(steps, 4, job, VOCAB), one_process(EXPERTS))


@needs_matrix
@pytest.mark.parametrize("offload", ["activations", "optimizer+parameters", "all"])
@pytest.mark.parametrize("layout", MANY, ids=Layout.line)
def test_every_layout_equals_one_process(ranks, one_process, layout, offload):
    model = EXPERTS if layout.ep > 1 else FOUR
    job = job_of(replace(layout, offload=offload), model)
    compare(ranks(steps, layout.world, job, VOCAB), one_process(model))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_as_without_offload(ranks, precision):
    layout = Layout(dp_shard=2, recompute="selective")
    job = job_of(layout, FOUR, precision=precision)
    (plain, *_), (offloaded, *_) = (
        ranks(steps, 2, replace(job, layout=replace(layout, offload=each)), VOCAB) for each in ("none", "all")
    )
    assert plain[0] == offloaded[0]
    assert all(bool((offloaded[2][name] == tensor).all()) for name, tensor in plain[2].items())


@pytest.mark.parametrize(
    "layout",
    [
        Layout(offload_blocks=3, recompute="selective"),
        Layout(pp=2, micro_batch=1, schedule="zb_h1"),
        *also_whole(Layout(), Layout(pp=2, micro_batch=1)),
    ],
    ids=Layout.line,
)
def test_activations_are_where_they_are_predicted(ranks, layout):
    """The device to 10 %, the host to 1 %; a pipeline has some of several micro-batches there."""
    job = job_of(replace(layout, offload="activations"), LONG, precision="fp32", global_batch=8)
    expected, plain = (
        step_memory(rank_spec(each, VOCAB, "cpu"))
        for each in (job, replace(job, layout=replace(layout, offload_blocks=0)))
    )
    for rank, (device, host, copied, _) in enumerate(counted_briefly(ranks, job, expected)):
        assert expected[rank].allocated == pytest.approx(device, rel=0.1)
        assert expected[rank].host == pytest.approx(host, rel=0.01)
        assert host > 0.3 * (plain[rank].allocated - device)
        assert copied["down"] == copied["up"] > 0


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=2, recompute="full"), *also_whole(Layout(dp_shard=2, micro_batch=1, accumulate="sharded"))],
    ids=Layout.line,
)
def test_parameters_are_where_they_are_predicted(ranks, layout):
    job = job_of(replace(layout, offload="optimizer+parameters"), DEEP, precision="fp32", global_batch=4)
    (expected,) = predicted = step_memory(rank_spec(job, VOCAB, "cpu"))
    for device, host, copied, _ in counted_briefly(ranks, job, predicted):
        assert expected.allocated == pytest.approx(device, rel=0.1)
        assert expected.host == pytest.approx(host, rel=0.01)
        # Two steps: gradients once each, parameters before both passes of each micro-batch.
        assert copied["down"] == pytest.approx(2 * 4 * count(DEEP, VOCAB) / layout.world)
        assert copied["up"] >= 1.9 * copied["down"]


def test_a_model_whose_state_is_four_times_the_budget_trains_within_it(ranks):
    """In float64, and equal to one process: 32 bytes per parameter."""
    layout = Layout(dp_shard=2, recompute="full", offload="all")
    model = replace(DEEP, n_layers=16)  # of a small one the blocks on their way are most
    job = job_of(layout, model, global_batch=2)
    budget = 32 * count(model, VOCAB) // 2 // 4
    found = ranks(counted, 2, job, budget, 2, False)
    ((_, _, _, expected),) = ranks(counted, 1, replace(job, layout=Layout()), 0)
    assert found[0][3] == pytest.approx(expected, rel=1e-9)
    assert found[0][0] <= budget
    with pytest.raises(RunError, match="nearest remedy"):
        ranks(counted, 2, replace(job, layout=replace(layout, offload="none")), budget)


# Whole runs with an optimizer on the host: resume with and without offload, what they record, and their budget.


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(dp_shard=2, zero=1, offload="optimizer"), Layout(dp_replicate=2), Layout(tp=2, offload="optimizer")],
        [Layout(offload="all"), Layout(dp_shard=2, offload="all"), Layout(pp=2, offload="activations")],
        *also_whole([Layout(), Layout(offload="optimizer"), Layout()]),
    ],
    ids=lambda layouts: " ".join(layout.line() for layout in layouts),
)
def test_a_run_goes_on_without_offload_and_back(ranks, job, layouts):
    moves_between(ranks, job, layouts)


def test_masters_of_bf16_resume_bit_by_bit(ranks, job):
    job = change(job, "train", precision="bf16")
    ranks(train, 1, job)
    moved = change(job, "run", name="moved")
    stop(ranks, change(moved, "layout", offload="optimizer"), 3)
    ranks(train, 1, moved)
    assert any(name.startswith("master/") for name in weights(moved))
    require_same_weights(moved, job)


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


# An optimizer whose state is in files: equal to one in memory, within a budget, and its failures.

BUFFER = 32 * 1024
"""Bytes of a buffer here: large tensors of the tiny models are cut, small ones share one."""


def in_small_buffers(ranks, job: Job, *args):
    with mock.patch.object(in_files, "BUFFER_BYTES", BUFFER):
        return steps(ranks, job, *args)


def in_files_of(layout: Layout, folder: Path) -> Layout:
    offload = "optimizer" if layout.offload == "none" else layout.offload
    return replace(layout, offload=offload, offload_to=str(folder))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(micro_batch=2),
        Layout(dp_shard=2, zero=1, bucket_mb=0.1),
        Layout(dp_shard=2, zero=3, offload="all"),
        *also_whole(Layout(dp_replicate=2, dp_shard=2, zero=3), Layout(pp=2, micro_batch=1, schedule="zb_h1", tp=2)),
    ],
    ids=Layout.line,
)
def test_state_in_files_equals_one_process(ranks, one_process, tmp_path, layout):
    job = job_of(in_files_of(layout, tmp_path))
    compare(ranks(in_small_buffers, layout.world, job, VOCAB), one_process(GPT))
    assert not list(tmp_path.iterdir())  # the files have no names


@pytest.mark.parametrize(("name", "precision"), RULES)
def test_every_elementwise_optimizer_computes_the_same_bits_everywhere(ranks, tmp_path, name, precision):
    layout, model = Layout(dp_shard=2, zero=1, ep=2), replace(EXPERTS, vocab_size=VOCAB)
    job = job_of(layout, model, name, precision=precision)
    expected, *_ = ranks(steps, 2, job, VOCAB, 3)
    for run, place in (
        (steps, replace(layout, offload="optimizer")),
        (in_small_buffers, in_files_of(layout, tmp_path)),
    ):
        found, *_ = ranks(run, 2, replace(job, layout=place), VOCAB, 3)
        assert found[0] == expected[0]
        for parameter, tensor in expected[2].items():
            assert torch.equal(found[2][parameter], tensor), parameter


def counted_files(ranks, job: Job, limit: int) -> tuple[int, int, dict[str, int], list[float]]:
    """Peaks of device and host, moved bytes, and losses of two steps, of a rank whose device has `limit` bytes."""
    mesh, losses = meshes.build(job.layout, "cpu"), []
    with mock.patch.object(in_files, "BUFFER_BYTES", BUFFER), DeviceBudget(limit).counting() as budget:
        stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
        for step in range(2):
            batches, valid = micro_batches(job, step, mesh.data_rank, VOCAB)
            losses.append(stepper.step(StepInputs(batches, step, valid, 1e-2)).loss)
    return budget.device_peak, budget.host_peak, stepper.offloaded, losses


def test_state_of_four_times_the_budget_passes_through_three_buffers(ranks, tmp_path):
    job = job_of(Layout(recompute="full"), DEEP, precision="bf16", global_batch=2)
    whole, kept, passing, numbers = 16, 12, 6, count(DEEP, VOCAB)
    ((*_, expected),) = ranks(counted_files, 1, replace(job, layout=Layout()), 0)
    offloaded = replace(job, layout=in_files_of(job.layout, tmp_path))
    ((device, host, moved, losses),) = ranks(counted_files, 1, offloaded, whole * numbers // 4)
    assert losses == expected
    assert device <= whole * numbers // 4
    # Gradients (those of bf16 also in fp32), buffers with their alignment, and what the first step makes.
    assert host - passing * numbers < 3 * (BUFFER + ALIGNMENT) + BUFFER + 2**12
    assert host < 0.6 * (passing + kept) * numbers
    padding = ALIGNMENT * 3 * 12 * DEEP.n_layers  # of small tensors
    for direction in ("read", "written"):
        assert 2 * kept * numbers <= moved[direction] <= 2 * (kept * numbers + padding)


def stopped_short(ranks, job: Job) -> None:
    mesh = meshes.build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    batches, valid = micro_batches(job, 0, mesh.data_rank, VOCAB)
    stepper.step(StepInputs(batches, 0, valid, 1e-2))
    residence = stepper.optimizer.residence
    assert isinstance(residence, in_files.InFiles)
    with mock.patch("os.preadv", return_value=0):
        stepper.step(StepInputs(batches, 1, valid, 1e-2))


def test_a_file_that_ends_early_ends_the_run(ranks, tmp_path):
    job = job_of(in_files_of(Layout(), tmp_path), GPT)
    with pytest.raises(OffloadError, match=r"cannot be read: it ends at byte .* Checkpoints are whole") as caught:
        ranks(stopped_short, 1, job)
    assert caught.value.exit_code == 4


def built_with(ranks, job: Job, free: int) -> None:
    space = mock.Mock(f_bavail=free, f_frsize=1)
    with mock.patch("os.statvfs", return_value=space):
        Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), VOCAB)


def test_ranks_on_a_disk_are_counted_together(ranks, tmp_path):
    job = job_of(in_files_of(Layout(dp_replicate=2), tmp_path), GPT)
    with pytest.raises(JobError, match=r"has 3.0MiB free, and its ranks' optimizer state needs 5.\dMiB: free some"):
        ranks(built_with, 2, job, 3 * 2**20)
    with pytest.raises(JobError, match=r"layout.offload_to: .*/none on .* does not exist: make it"):
        ranks(built_with, 2, replace(job, layout=in_files_of(job.layout, tmp_path / "none")), 2**40)


def test_without_direct_io_the_same_bytes_come_back(tmp_path):
    with mock.patch("phalanx.parallel.offload._open_direct", return_value=None):
        file = StateFile(tmp_path, 3 * ALIGNMENT)
    assert not file.is_direct
    data = torch.arange(ALIGNMENT, dtype=torch.int64).to(torch.uint8)
    file.write(data, ALIGNMENT)
    assert torch.equal(file.mapped[ALIGNMENT : 2 * ALIGNMENT], data)
    file.mapped[:3] = 7
    back = torch.empty(2 * ALIGNMENT, dtype=torch.uint8)
    file.read(back, 0)
    assert torch.equal(back, file.mapped[: 2 * ALIGNMENT])


# Whole runs whose optimizer state is in files: resume, saves in the background, records.


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


@pytest.mark.parametrize("precision", ["bf16", *also_whole("fp32")])
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
        require_same_bits(found, straight)
    (row,) = rows(moved, "offload")
    assert row["bytes"].keys() == {"down", "up", "read", "written"}
    assert row["bytes"]["read"] >= sum(t.nbytes for name, t in straight.items() if "/" in name)
