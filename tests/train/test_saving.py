"""Checkpoints in the background of whole runs: what is written, what a failure does, and how runs end."""

import dataclasses
import logging
import math
import os
import threading
import time

import pytest
import torch

from checkpoint.contents import contents
from phalanx.checkpoint import shard_file
from phalanx.checkpoint.inventory import check
from phalanx.config.layout import Layout
from phalanx.errors import NotFiniteError, PhalanxError
from phalanx.launch import logs
from phalanx.launch.ranks import GENERATION
from phalanx.train import loop
from phalanx.train.requests import StopRequest
from phalanx.train.run_directory import RunDirectory
from train.runs import change, rows, train


@pytest.fixture
def saving(job):
    """Six steps on two ranks, with a checkpoint after every second one."""
    return change(change(job, "checkpoint", every=2), "layout", dp_shard=2, zero=3)


@pytest.fixture
def root(job):
    return RunDirectory.of(job).checkpoints


def names(root):
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def disturbed(ranks, job, disturb, stop_at=0):
    """Trains while `disturb(trainer, rank, step of the checkpoint)` comes before every shard file is written. Returns
    the error that ends the run, with its class, and the warnings."""
    stop, warnings = StopRequest(), []
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), stop)
    requests, write, trainer.over = trainer.requests, shard_file.write, threading.Event()

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
        trainer.over.set()
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


def test_training_goes_on_while_the_state_before_is_written_and_a_stop_waits_for_it(ranks, saving, root):
    for error, warnings in ranks(disturbed, 2, saving, wait_for_the_next_step, 3):
        assert error.startswith("StoppedError: stopped by a test at step 3 of 6, with a checkpoint in ")
        assert not warnings
    assert names(root) == ["step-000002", "step-000003"]
    straight = change(change(saving, "checkpoint", background=False), "run", name="straight")
    ranks(train, 2, straight)
    expected = contents(RunDirectory.of(straight).checkpoints / "step-000002")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in contents(root / "step-000002").items())
    ranks(train, 2, saving)
    expected = contents(RunDirectory.of(straight).checkpoints / "step-000006")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in contents(root / "step-000006").items())


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


def test_a_failed_checkpoint_is_told_and_neither_the_run_nor_the_next_one_fails(ranks, saving, root):
    (error, warnings), (other, silent) = ranks(disturbed, 2, saving, fail_on_rank_one)
    assert (error, other, silent) == ("", "", [])
    assert len(warnings) == 1
    assert warnings[0].startswith(f"checkpoint {root}/step-000004 could not be written: rank 1 on ")
    assert warnings[0].endswith(f"; training goes on, and if it fails, it resumes from {root}/step-000002")
    assert names(root) == ["step-000002", "step-000006"]
    assert len(rows(saving, "step")) == 6


@pytest.mark.parametrize(
    ("options", "why"),
    [({"every": 4}, "there is no earlier checkpoint"), ({"on_failure": "stop"}, "checkpoint.on_failure=stop")],
)
def test_a_failed_checkpoint_stops_the_run_if_that_is_asked_or_none_is_there(ranks, saving, root, options, why):
    saving = change(change(saving, "checkpoint", **options), "train", steps=40)
    (error, warnings), _ = ranks(disturbed, 2, saving, fail_on_rank_one)
    assert error.startswith(f"StoppedError: stopped since a checkpoint could not be written ({why}) at step ")
    assert warnings[0].endswith(f"the run stops, since {why}")
    assert "step-000004" not in names(root)
    check(root / names(root)[-1])


def hang(trainer, rank, step):
    if step == 4:
        until(lambda: trainer.saving.writer.order.step == 4)
        trainer.saving.writer.order = dataclasses.replace(trainer.saving.writer.order, timeout_s=0.1)
        trainer.over.wait()


def test_storage_that_hangs_is_named_and_does_not_keep_the_run(ranks, saving, root):
    (error, warnings), _ = ranks(disturbed, 2, saving, hang)
    assert warnings[0].startswith(f"checkpoint {root}/step-000004 was given up: storage hangs, nothing was written by")
    assert error == (
        "RunError: no checkpoint of step 6: the storage of rank 0, 1 still hangs in the one before; earlier "
        f"checkpoints in {root} are untouched"
    )
    assert names(root) == ["step-000002"]


def supersede(trainer, rank, step):
    if (rank, step) == (0, 2):
        os.environ[GENERATION] = logs.claim(trainer.directory.path)
    if (rank, step) == (0, 4):
        logs.claim(trainer.directory.path)


def test_a_run_that_a_later_attempt_has_taken_over_ends_whatever_the_policy(ranks, saving, root):
    (error, warnings), (other, _) = ranks(disturbed, 2, saving, supersede)
    assert error == other
    assert error.startswith("SupersededError: this process belongs to generation 1 of ")
    assert warnings[0].endswith("this one must not write; the run stops")
    assert names(root) == ["step-000002"]


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


def test_a_copy_that_holds_nan_is_not_written(ranks, saving, root):
    ranks(spoil, 2, saving)
    assert names(root) == ["step-000002"]


def test_ranks_without_memory_for_a_copy_write_the_state_itself(ranks, saving, root):
    error, warnings = ranks(disturbed, 2, saving, without_memory)[0]
    assert not error
    assert all(text.startswith("no memory for a copy of the state, so training waits") for text in warnings)
    assert names(root) == ["step-000002", "step-000004", "step-000006"]


def without_memory(trainer, rank, step):
    def refuse(size):
        raise MemoryError("none is left")

    if rank == 0 and step == 2:
        trainer.saving.snapshot.memory, trainer.saving.snapshot._allocate = torch.empty(0, dtype=torch.uint8), refuse
