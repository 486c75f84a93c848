"""Checkpoints of whole runs: who writes and reads what, saving in the background, and failures."""

import dataclasses
import logging
import math
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from checkpoint.contents import contents, require_same_bits, save_tensors
from covering import also_whole
from phalanx.checkpoint import shard_file
from phalanx.checkpoint.inventory import check
from phalanx.checkpoint.shard_file import Reader
from phalanx.cli.train import _is_finished
from phalanx.config.layout import Layout
from phalanx.errors import CheckpointError, NotFiniteError, PhalanxError, RunError
from phalanx.launch import logs
from phalanx.launch.ranks import GENERATION
from phalanx.train import loop
from phalanx.train.requests import StopRequest
from phalanx.train.run_directory import RunDirectory
from train.runs import change, rows, stop, train, weights

# Checkpoints of whole runs: what is never saved, what is never loaded, and who writes and reads what.


HYBRID = Layout(dp_shard=2, tp=2, zero=3)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def saving(job):
    """Six steps with a checkpoint after every second one."""
    return change(job, "checkpoint", every=2)


@pytest.fixture
def root(job):
    return RunDirectory.of(job).checkpoints


def spoiled(ranks, job, rank, at, kind, weight="mlp.up.weight"):
    """The message with which a run ends, one of whose ranks has an infinity in one of its elements after step `at`."""
    job = change(change(job, "checkpoint", background=False), "guard", every=0)  # which would compare replicas first
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    stepper, advance = trainer.stepper, trainer.state.advance

    def spoil(step, global_batch):
        advance(step, global_batch)
        if step == at and ranks.rank == rank:
            shard = next(f for f in stepper.replica.shards if weight in f.name and f.value.numel())
            tensors = stepper.optimizer.state_tensors() | {"": {shard.name: shard.value.detach()}}
            tensors[kind][shard.name].view(-1)[-1] = math.nan if kind else math.inf

    trainer.state.advance = spoil
    with pytest.raises(NotFiniteError) as caught:
        trainer.run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "rank", "at", "kind"),
    [
        (Layout(), 0, 4, ""),
        (Layout(dp_replicate=2), 1, 6, "exp_avg"),
        (HYBRID, 3, 4, "exp_avg_sq"),
        (Layout(pp=2, accumulation=3), 1, 6, ""),
        *also_whole((Layout(dp_replicate=2), 0, 4, "exp_avg_sq")),
    ],
    ids=lambda value: value.line() or "one process" if isinstance(value, Layout) else str(value),
)
def test_a_state_that_holds_nan_is_not_saved_and_ends_the_run(ranks, saving, root, layout, rank, at, kind):
    messages = ranks(spoiled, layout.processes, dataclasses.replace(saving, layout=layout), rank, at, kind)
    assert len(set(messages)) == 1
    what = f"{kind}/blocks.{layout.pp - 1}" if kind else f"blocks.{layout.pp - 1}"
    assert messages[0] == (
        f"step {at}: {what}.mlp.up.weight holds NaN or infinity, so this state was not saved; the newest good "
        f"checkpoint is {root}/step-{at - 2:06d}"
    )
    assert names(root)[-1] == f"step-{at - 2:06d}"
    assert NotFiniteError.exit_code == 5


@pytest.mark.parametrize("kind", ["exp_avg_scale", "exp_avg_sq_scale"])
def test_a_scale_of_codes_that_is_nan_is_not_saved_and_ends_the_run(ranks, saving, root, kind):
    job = change(change(saving, "optimizer", state="8bit"), "model", d_ff=256)
    (message,) = ranks(spoiled, 1, dataclasses.replace(job, layout=Layout()), 0, 4, kind, "mlp.down.weight")
    assert message.startswith(f"step 4: {kind}/blocks.0.mlp.down.weight holds NaN or infinity, so this state was not")
    assert names(root)[-1] == "step-000002"


def replace_by_nan(path: Path) -> None:
    """Puts a checkpoint with one NaN, whose digests are right, in the place of a good one."""
    manifest, tensors = check(path), contents(path)
    tensors["exp_avg/embed.weight"].view(-1)[3] = math.nan
    shutil.rmtree(path)
    save_tensors(path.parent, manifest.step, tensors, manifest.meta)


def test_a_checkpoint_that_holds_nan_is_not_loaded(ranks, saving, root):
    two = dataclasses.replace(saving, layout=Layout(dp_shard=2, zero=1))
    stop(ranks, two, 4)
    replace_by_nan(root / "step-000004")
    ranks(train, 2, two)
    assert [row["step"] for row in rows(two, "step")] == [1, 2, 3, 4, 3, 4, 5, 6]
    for path in root.glob("step-*"):
        replace_by_nan(path)
    with pytest.raises(CheckpointError, match="is whole; the oldest: .*step-000002: exp_avg/embed.weight holds NaN"):
        ranks(train, 2, two)


def test_a_checkpoint_without_the_progress_of_a_run_is_refused_in_one_message(ranks, job, root):
    ranks(train, 1, job)
    path = root / "step-000006"
    manifest, tensors = check(path), contents(path)
    for meta, message in [
        ({"job": manifest.meta["job"]}, "step-000006 is not of a training run: it lacks data, guard, "),
        (manifest.meta | {"samples": "many", "guard": [1]}, "samples: expected a whole number, found 'many'; guard: "),
    ]:
        shutil.rmtree(path)
        save_tensors(root, 6, tensors, meta)
        with pytest.raises(CheckpointError, match=message):
            ranks(train, 1, job)


def test_a_finished_run_whose_last_checkpoint_is_damaged_goes_on_and_writes_it_again(ranks, saving, root, capsys):
    ranks(train, 1, saving)
    last, before = root / "step-000006", weights(saving)
    assert _is_finished(RunDirectory.of(saving), saving, as_json=False)
    with (last / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    capsys.readouterr()
    assert not _is_finished(RunDirectory.of(saving), saving, as_json=False)
    assert "is finished" not in capsys.readouterr().out
    ranks(train, 1, saving)
    assert [row["step"] for row in rows(saving, "step")] == [1, 2, 3, 4, 5, 6, 5, 6]
    assert names(root) == [".damaged-step-000006-1", "step-000002", "step-000004", "step-000006"]
    require_same_bits(weights(saving), before)
    assert _is_finished(RunDirectory.of(saving), saving, as_json=False)


def failing(ranks, job):
    """Trains with one rank that cannot write its last checkpoint."""
    calls, write = iter(range(10)), shard_file.write

    def no_space(*arguments):
        if next(calls) == 2 and ranks.rank == 1:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    shard_file.write = no_space
    try:
        with pytest.raises(RunError) as caught:
            train(ranks, job)
    finally:
        shard_file.write = write
    return str(caught.value)


def test_if_one_rank_cannot_write_the_save_fails_on_all(ranks, saving, root):
    first, *others = ranks(failing, 3, dataclasses.replace(saving, layout=Layout(dp_replicate=3)))
    assert others == [first] * 2
    assert first.startswith(f"checkpoint {root}/step-000006 could not be written: rank 1 on ")
    assert re.search(
        r"No space left on device \(.* are free\); earlier checkpoints are untouched: free some space, lower "
        "checkpoint.keep, or choose another run.dir$",
        first,
    )
    assert names(root) == ["step-000002", "step-000004"]


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_replicate=4), Layout(dp_shard=2, tp=2, zero=3), *also_whole(Layout(dp_replicate=2, pp=2))],
    ids=Layout.line,
)
def test_all_ranks_write_and_each_its_share(ranks, job, root, layout):
    ranks(train, 4, change(dataclasses.replace(job, layout=layout), "train", steps=1))
    sizes = [file.bytes for file in check(root / "step-000001").files.values()]
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)


def elements_read(ranks, job):
    """How many elements this rank reads to resume, and how many of the state it holds."""
    real, counts = Reader.read, []

    def read(self, name, box=None):
        found = real(self, name, box)
        counts.append(found.numel())
        return found

    Reader.read = read
    try:
        trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    finally:
        Reader.read = real
    held = sum(shard.value.numel() for shard in trainer.stepper.replica.shards)
    return sum(counts), 3 * held


def test_each_rank_reads_only_what_it_holds(ranks, job):
    ranks(train, 2, dataclasses.replace(job, layout=Layout(tp=2)))
    results = ranks(elements_read, 4, dataclasses.replace(job, layout=Layout(dp_shard=4, zero=3)))
    assert all(read == held for read, held in results)


def test_best_and_permanent_checkpoints_stay(ranks, job, root):
    job = change(job, "checkpoint", every=1, keep=1, keep_every=4, keep_best=True)
    ranks(train, 1, change(job, "train", eval_every=1))
    losses = {row["step"]: row["val_loss"] for row in rows(job, "validation")}
    best = min(losses, key=lambda step: losses[step])
    assert names(root) == sorted({f"step-{step:06d}" for step in (best, 4, 6)})


# Checkpoints in the background of whole runs: what is written, what a failure does, and how runs end.


@pytest.fixture
def background(job):
    """Six steps on two ranks, with a checkpoint after every second one."""
    return change(change(job, "checkpoint", every=2), "layout", dp_shard=2, zero=3)


def saved_names(root):
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def disturbed(ranks, job, disturb, stop_at=0):
    """Trains while `disturb(trainer, rank, step of the checkpoint)` comes before every shard file is written. Returns
    the error that ends the run, with its class, and the warnings."""
    stop, warnings = StopRequest(), []
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), stop)
    requests, write, trainer.test_over = trainer.requests, shard_file.write, threading.Event()

    def asked():
        if trainer.state.step == stop_at - 1:
            stop.ask("by a test")
        return requests()

    def disturbed_write(path, *arguments):
        disturb(trainer, ranks.rank, int(path.parent.name.split(".")[1].removeprefix("step-")))
        return write(path, *arguments)

    class Warnings(logging.Handler):
        def emit(self, record):
            warnings.append(record.getMessage())

    handler = Warnings(logging.WARNING)
    logging.getLogger("phalanx").addHandler(handler)
    trainer.requests, shard_file.write = asked, disturbed_write
    try:
        trainer.run()
    except PhalanxError as error:
        return f"{type(error).__name__}: {error}", warnings
    finally:
        shard_file.write = write
        trainer.test_over.set()
        os.environ.pop(GENERATION, None)
        logging.getLogger("phalanx").removeHandler(handler)
    return "", warnings


def until(condition):
    deadline = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_the_next_step(trainer, rank, step):
    if step == 2:
        until(lambda: trainer.state.step >= 3)


def test_training_goes_on_while_the_state_before_is_written_and_a_stop_waits_for_it(ranks, background, root):
    for error, warnings in ranks(disturbed, 2, background, wait_for_the_next_step, 3):
        assert error.startswith("StoppedError: stopped by a test at step 3 of 6, with a checkpoint in ")
        assert not warnings
    assert saved_names(root) == ["step-000002", "step-000003"]
    straight = change(change(background, "checkpoint", background=False), "run", name="straight")
    ranks(train, 2, straight)
    expected = RunDirectory.of(straight).checkpoints
    require_same_bits(contents(root / "step-000002"), contents(expected / "step-000002"))
    ranks(train, 2, background)
    require_same_bits(contents(root / "step-000006"), contents(expected / "step-000006"))


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 2, "zero": 3},
        {"dp_replicate": 2, "zero": 0},
        {"pp": 2, "schedule": "pipedream", "accumulation": 3},
        {"dp_replicate": 2, "zero": 0, "sync": "local_sgd", "sync_every": 1},
        {"dp_replicate": 2, "zero": 0, "sync": "asp"},
    ],
    ids=lambda layout: layout.get("sync") or layout.get("schedule") or f"zero-{layout['zero']}",
)
def test_the_state_does_not_change_while_it_is_copied(ranks, job, root, layout):
    job = dataclasses.replace(change(job, "checkpoint", every=2, keep=0), layout=Layout(**layout))
    for filled, error in ranks(copied_late, 2, job):
        assert not error
        assert filled
        assert all(same for same in filled)


def copied_late(ranks, job):
    """Trains with copies that begin late, and returns of each whether it is what the state was when it was taken."""
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    snapshot, filled = trainer.saving.snapshot, []
    take, fill = snapshot.take, snapshot.fill

    def taken(values):
        snapshot.expected = [value.clone() for value in values]
        snapshot.copies = take(values)
        return snapshot.copies

    def filled_late():
        time.sleep(0.3)
        fill()
        filled.append(all(map(torch.equal, snapshot.copies, snapshot.expected)))

    snapshot.take, snapshot.fill = taken, filled_late
    try:
        trainer.run()
    except PhalanxError as error:
        return filled, str(error)
    return filled, ""


def fail_on_rank_one(trainer, rank, step):
    if (rank, step) == (1, 4):
        raise OSError(28, "No space left on device")


def test_a_failed_checkpoint_is_told_and_neither_the_run_nor_the_next_one_fails(ranks, background, root):
    (error, warnings), (other, silent) = ranks(disturbed, 2, background, fail_on_rank_one)
    assert (error, other, silent) == ("", "", [])
    assert len(warnings) == 1
    assert warnings[0].startswith(f"checkpoint {root}/step-000004 could not be written: rank 1 on ")
    assert warnings[0].endswith(f"; training goes on, and if it fails, it resumes from {root}/step-000002")
    assert saved_names(root) == ["step-000002", "step-000006"]
    assert len(rows(background, "step")) == 6


@pytest.mark.parametrize(
    ("options", "why"),
    [({"every": 4}, "there is no earlier checkpoint"), ({"on_failure": "stop"}, "checkpoint.on_failure=stop")],
)
def test_a_failed_checkpoint_stops_the_run_if_that_is_asked_or_none_is_there(ranks, background, root, options, why):
    background = change(change(background, "checkpoint", **options), "train", steps=40)
    (error, warnings), _ = ranks(disturbed, 2, background, fail_on_rank_one)
    assert error.startswith(f"StoppedError: stopped since a checkpoint could not be written ({why}) at step ")
    assert warnings[0].endswith(f"the run stops, since {why}")
    assert "step-000004" not in saved_names(root)
    check(root / saved_names(root)[-1])


def hang(trainer, rank, step):
    if step == 4:
        until(lambda: trainer.saving.writer.order.step == 4)
        trainer.saving.writer.order = dataclasses.replace(trainer.saving.writer.order, timeout_s=0.1)
        trainer.test_over.wait()


def test_storage_that_hangs_is_named_and_does_not_keep_the_run(ranks, background, root):
    (error, warnings), _ = ranks(disturbed, 2, background, hang)
    assert warnings[0].startswith(f"checkpoint {root}/step-000004 was given up: storage hangs, nothing was written by")
    assert error == (
        "RunError: no checkpoint of step 6: the storage of rank 0, 1 still hangs in the one before; earlier "
        f"checkpoints in {root} are untouched"
    )
    assert saved_names(root) == ["step-000002"]


def supersede(trainer, rank, step):
    if (rank, step) == (0, 2):
        os.environ[GENERATION] = logs.claim(trainer.directory.path)
    if (rank, step) == (0, 4):
        logs.claim(trainer.directory.path)


def test_a_run_that_a_later_attempt_has_taken_over_ends_whatever_the_policy(ranks, background, root):
    (error, warnings), (other, _) = ranks(disturbed, 2, background, supersede)
    assert error == other
    assert error.startswith("SupersededError: this process belongs to generation 1 of ")
    assert warnings[0].endswith("this one must not write; the run stops")
    assert saved_names(root) == ["step-000002"]


def spoil(ranks, job):
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    advance = trainer.state.advance

    def advance_and_spoil(step, global_batch):
        advance(step, global_batch)
        if step == 4 and ranks.rank == 1:
            moments = trainer.stepper.optimizer.state_tensors()["exp_avg"]
            next(tensor for tensor in moments.values() if tensor.numel()).view(-1)[-1] = math.nan

    trainer.state.advance = advance_and_spoil
    with pytest.raises(NotFiniteError):
        trainer.run()


def test_a_copy_that_holds_nan_is_not_written(ranks, background, root):
    ranks(spoil, 2, background)
    assert saved_names(root) == ["step-000002"]


def test_ranks_without_memory_for_a_copy_write_the_state_itself(ranks, background, root):
    error, warnings = ranks(disturbed, 2, background, without_memory)[0]
    assert not error
    assert all(text.startswith("no memory for a copy of the state, so training waits") for text in warnings)
    assert saved_names(root) == ["step-000002", "step-000004", "step-000006"]


def without_memory(trainer, rank, step):
    def refuse(size):
        raise MemoryError("none is left")

    if rank == 0 and step == 2:
        trainer.saving.snapshot.memory, trainer.saving.snapshot._allocate = torch.empty(0, dtype=torch.uint8), refuse
