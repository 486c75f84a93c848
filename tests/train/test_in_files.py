"""An optimizer whose state is in files: equal to one in memory, within a budget, and its failures."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from parallel.steps import micro_batches, steps, worst
from phalanx.blocks.parameters import count
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.errors import JobError, OffloadError
from phalanx.parallel import mesh as meshes
from phalanx.parallel.offload import ALIGNMENT, DeviceBudget, StateFile
from phalanx.train import residence as in_files
from phalanx.train.step import StepInputs, Stepper
from train.test_offload import DEEP, EXPERTS, GPT, VOCAB, job_of

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
        Layout(dp_replicate=2, dp_shard=2, zero=3),
        Layout(pp=2, micro_batch=1, schedule="zb_h1", tp=2),
        Layout(dp_shard=2, zero=3, offload="all"),
    ],
    ids=Layout.line,
)
def test_equals_one_process(ranks, tmp_path, layout):
    job = job_of(in_files_of(layout, tmp_path))
    (shown, gradients, parameters), *_ = ranks(in_small_buffers, layout.world, job, VOCAB)
    ((one, expected_gradients, expected),) = ranks(steps, 1, job_of(Layout()), VOCAB)
    for found, alone in zip(shown, one, strict=True):
        assert found == pytest.approx(alone, rel=1e-9)
    assert worst(gradients, expected_gradients, 1e-7) < 1e-9
    assert worst(parameters, expected, 1e-2) < 1e-9
    assert not list(tmp_path.iterdir())  # the files have no names


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adamw8bit"])
def test_every_optimizer_computes_the_bits_of_host_memory(ranks, tmp_path, name, precision):
    layout, model = Layout(dp_shard=2, zero=1, ep=2), replace(EXPERTS, vocab_size=VOCAB)
    job = job_of(replace(layout, offload="optimizer"), model, name, precision=precision)
    on_host, *_ = ranks(steps, 2, job, VOCAB, 3)
    found, *_ = ranks(in_small_buffers, 2, replace(job, layout=in_files_of(layout, tmp_path)), VOCAB, 3)
    assert on_host[0] == found[0]
    for parameter, tensor in on_host[2].items():
        assert torch.equal(found[2][parameter], tensor), parameter


def counted(ranks, job: Job, limit: int) -> tuple[int, int, dict[str, int], list[float]]:
    """Peaks of device and host, moved bytes, and losses of two steps, of a rank whose device has `limit` bytes."""
    mesh, losses = meshes.build(job.layout, "cpu"), []
    with mock.patch.object(in_files, "BUFFER_BYTES", BUFFER), DeviceBudget(limit).counting() as budget:
        stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
        for step in range(2):
            batches, valid = micro_batches(job, step, mesh.data_rank, VOCAB)
            losses.append(stepper.step(StepInputs(batches, step, valid, 1e-2)).loss)
    return budget.device_peak, budget.host_peak, stepper.offloaded, losses


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_state_of_four_times_the_budget_passes_through_three_buffers(ranks, tmp_path, precision):
    layout = Layout(dp_shard=2 if precision == "fp64" else 1)
    model = replace(DEEP, n_layers=DEEP.n_layers * layout.world)
    job = job_of(replace(layout, recompute="full"), model, precision=precision, global_batch=2)
    whole, kept, passing = {"bf16": (16, 12, 6), "fp64": (32, 24, 8)}[precision]
    state, numbers = whole * count(model, VOCAB), count(model, VOCAB) / layout.world
    ((*_, expected),) = ranks(counted, 1, replace(job, layout=Layout()), 0)
    offloaded = replace(job, layout=in_files_of(job.layout, tmp_path))
    (device, host, moved, losses), *_ = ranks(counted, layout.world, offloaded, state // 4)
    assert losses == (pytest.approx(expected, rel=1e-9) if precision == "fp64" else expected)
    assert device <= state // 4
    # Gradients (those of bf16 also in fp32), buffers with their alignment, and what the first step makes.
    assert host - passing * numbers < 3 * (BUFFER + ALIGNMENT) + BUFFER + 2**12
    assert host < 0.6 * (passing + kept) * numbers
    padding = ALIGNMENT * 3 * 12 * model.n_layers  # of small tensors
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
