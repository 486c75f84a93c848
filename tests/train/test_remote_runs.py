"""Runs whose checkpoints are copied to an object store: moved to another machine, damaged, and without the store."""

import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from checkpoint.contents import contents, require_same_bits
from checkpoint.s3 import serving
from phalanx.checkpoint.inventory import check
from phalanx.checkpoint.remote import ObjectStore, RemoteCheckpoints
from phalanx.cli.train import _require_no_copies
from phalanx.errors import CheckpointError, JobError, PhalanxError, RunError, StoppedError
from phalanx.train import loop
from phalanx.train.requests import Requests, StopRequest
from phalanx.train.run_directory import RunDirectory
from train.runs import change, rows


@pytest.fixture
def copied(job, tmp_path):
    """Six steps on two ranks, with a checkpoint after every second one, on the disk and on a store."""
    copied = change(job, "checkpoint", every=2, remote=f"file://{tmp_path}/store", timeout_s=60.0)
    return change(copied, "layout", dp_shard=2, zero=3)


def moved(job, name):
    """The same run on a machine with an empty disk."""
    return change(job, "run", dir=str(Path(job.run.dir).with_name(name)))


def root(job):
    return RunDirectory.of(job).checkpoints


def final(root):
    return contents(root / "step-000006")


def remote(job):
    return RemoteCheckpoints.of(job.checkpoint.remote, job.run.name)


def train(ranks, job, stop_at=0):
    """Trains as one of the ranks; every checkpoint is copied before training goes on, so that none is superseded."""
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    save, trainer.requests = trainer.saving.save, lambda: Requests(stop=0 < stop_at <= trainer.state.step + 1)

    def save_and_copy(last=False):
        blocked = save(last)
        trainer.saving.settle()
        trainer.saving.finish_uploads()
        return blocked

    trainer.saving.save = save_and_copy
    return trainer.run()


def warned(ranks, job, environment=None, disturb=None, stop_at=0):
    """Trains; returns the error that ends the run, with its class, and the warnings of this rank."""
    warnings, upload, seconds_left = [], ObjectStore.upload, StopRequest.seconds_left

    class Warnings(logging.Handler):
        def emit(self, record):
            warnings.append(record.getMessage())

    handler = Warnings(logging.WARNING)
    logging.getLogger("phalanx").addHandler(handler)
    os.environ.update(environment or {})
    if disturb:
        disturb()
    try:
        train(ranks, job, stop_at)
    except PhalanxError as error:
        return f"{type(error).__name__}: {error}", warnings
    finally:
        ObjectStore.upload, StopRequest.seconds_left = upload, seconds_left
        logging.getLogger("phalanx").removeHandler(handler)
        for name in environment or {}:
            del os.environ[name]
    return "", warnings


def test_a_run_moves_to_an_empty_machine_and_into_another_layout_bit_for_bit(ranks, copied):
    straight = change(change(copied, "run", name="straight"), "checkpoint", remote="")
    ranks(train, 2, straight)
    with pytest.raises(StoppedError):
        ranks(train, 2, copied, 4)
    assert remote(copied).steps() == [4, 2]
    there = moved(copied, "there")
    ranks(train, 2, there)
    assert [row["step"] for row in rows(there, "step")] == [5, 6]
    require_same_bits(final(root(there)), final(root(straight)))
    assert remote(copied).steps() == [6, 4, 2]
    # Another number of ranks fetches the files of two; the run that is finished takes no step.
    [summary] = ranks(train, 1, change(moved(copied, "one"), "layout", dp_shard=1, zero=0))
    assert (summary["step"], summary["loss"]) == (6, None)
    require_same_bits(final(root(moved(copied, "one"))), final(root(straight)))
    with pytest.raises(JobError, match="/store/run holds 3 checkpoints, the newest of step 6; choose another run.name"):
        _require_no_copies(copied)
    with pytest.raises(JobError, match="/store/run holds a checkpoint of another job"):
        ranks(train, 2, change(moved(copied, "other"), "train", seed=5))


def test_damaged_copies_give_way_to_older_ones_and_are_replaced(ranks, copied, tmp_path):
    ranks(train, 2, copied)
    store = tmp_path / "store" / "run"
    newest = next(path for path in store.iterdir() if path.name.startswith("step-000006-"))
    (newest / "rank-00001.safetensors").unlink()
    middle = next(path for path in store.iterdir() if path.name.startswith("step-000004-"))
    with (middle / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    there = moved(copied, "there")
    (error, warnings), _ = ranks(warned, 2, there)
    assert not error
    assert "step-000006.json has 3 objects" in warnings[0]
    assert "rank-00001.safetensors is missing, or does not match its digest" in warnings[1]
    assert [row["step"] for row in rows(there, "step")] == [3, 4, 5, 6]
    require_same_bits(final(root(there)), final(root(copied)))
    assert remote(copied).find(6), "it was damaged, and is whole"
    # A local checkpoint that proves damaged is fetched again.
    with (root(there) / "step-000006" / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    ranks(train, 2, there)
    assert check(root(there) / "step-000006")
    for record in store.glob("*.json"):
        record.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="no newer checkpoint in .*; the oldest: .*step-000002.json is damaged"):
        ranks(train, 2, moved(copied, "last"))


def refusing():
    def refuse(store, path, name, progress):
        raise store._failure(f"{name} could not be written", PermissionError("Access Denied"))

    ObjectStore.upload = refuse


def test_a_store_that_fails_ends_no_run_that_has_local_checkpoints(ranks, copied, tmp_path):
    (error, warnings), (other, silent) = ranks(warned, 2, copied, None, refusing)
    assert (error, other, silent) == ("", "", [])
    assert len(warnings) == 3
    assert f"checkpoint {root(copied)}/step-000006 was not uploaded: " in warnings[-1]
    assert warnings[-1].endswith("PermissionError: Access Denied; the local one is whole")
    assert remote(copied).steps() == []
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("no folder")
    (error, warnings), _ = ranks(warned, 2, change(copied, "train", steps=7))
    assert not error
    assert f"; a newer checkpoint may be there than {root(copied)}/step-000006" in warnings[0]
    error = ranks(warned, 2, moved(copied, "there"))[0][0]
    assert error.startswith(f"RunError: file://{tmp_path}/store/run: .probe-")
    assert error.endswith("make it reachable, or set checkpoint.remote=''")
    assert RunError.exit_code == 1


def hanging_at_the_end():
    ObjectStore.upload = lambda *_: threading.Event().wait()
    StopRequest.seconds_left = lambda *_: 2.0


def test_a_stop_that_leaves_no_time_for_an_upload_does_not_wait_for_it(ranks, copied):
    (error, warnings), _ = ranks(warned, 2, copied, None, hanging_at_the_end, 4)
    assert error.startswith("StoppedError")
    assert set(warnings) == {
        f"the newest checkpoint was not uploaded to {copied.checkpoint.remote} before the time to stop was over"
    }
    assert check(root(copied) / "step-000004")


def test_a_run_moves_over_an_s3_server_and_tells_no_secret(ranks, copied, tmp_path):
    with serving(tmp_path) as environment:
        s3 = change(copied, "checkpoint", remote="s3://bucket/runs", keep=1)
        (error, warnings), _ = ranks(warned, 2, s3, environment, None, 4)
        assert error.startswith("StoppedError")
        there = moved(s3, "there")
        assert [ranks(warned, 2, there, environment)[0], warnings] == [("", []), []]
    assert [row["step"] for row in rows(there, "step")] == [5, 6]
    straight = change(change(copied, "run", name="straight"), "checkpoint", remote="")
    ranks(train, 2, straight)
    require_same_bits(final(root(there)), final(root(straight)))
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        assert b"a-secret-of-a-test" not in file.read_bytes()
