"""Which checkpoints stay."""

import os
import shutil

import pytest
import torch

from phalanx.checkpoint import inventory as files
from phalanx.checkpoint.inventory import Retention, expired
from phalanx.checkpoint.manifest import MANIFEST
from phalanx.checkpoint.save import save_tensors


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run" / "checkpoints"


def save(root, step, policy, loss=None, measured=None):
    meta = {"val_loss": loss, "val_step": measured or step}
    return save_tensors(root, step, {"w": torch.ones(3)}, meta, policy)


def left(root):
    return sorted(path.name for path in root.iterdir())


def test_the_newest_are_kept(root):
    for step in (10, 20, 30, 1_000_000):
        save(root, step, Retention(keep=2))
    assert left(root) == ["step-000030", "step-1000000"]


def test_zero_keeps_all(root):
    for step in (10, 20, 30):
        save(root, step, Retention(keep=0))
    assert len(left(root)) == 3


def test_checkpoints_at_an_interval_are_kept_for_ever(root):
    for step in range(10, 80, 10):
        save(root, step, Retention(keep=2, keep_every=20))
    assert left(root) == ["step-000020", "step-000040", "step-000060", "step-000070"]


def test_the_best_is_kept(root):
    losses = {10: 3.0, 20: 1.5, 30: float("nan"), 40: 1.5, 50: 2.0, 60: None}
    for step, loss in losses.items():
        save(root, step, Retention(keep=1, keep_best=True), loss)
    assert left(root) == ["step-000020", "step-000060"], "of two equal ones the older"
    save(root, 70, Retention(keep=1, keep_best=True), 1.0)
    assert left(root) == ["step-000070"]


def test_a_loss_of_an_earlier_step_is_not_a_checkpoints_own(root):
    save(root, 10, Retention(keep=1, keep_best=True), 3.0)
    save(root, 20, Retention(keep=1, keep_best=True), 1.0, measured=15)
    assert left(root) == ["step-000010", "step-000020"]


def test_a_damaged_checkpoint_does_not_count_and_goes_once_it_is_old(root):
    policy = Retention(keep=2)
    save(root, 10, policy)
    os.truncate(save(root, 20, policy) / "rank-00000.safetensors", 5)
    save(root, 30, policy)
    assert left(root) == ["step-000010", "step-000020", "step-000030"], "10 and 30 are the whole ones"
    save(root, 40, policy)
    assert left(root) == ["step-000030", "step-000040"]


def test_one_that_was_set_aside_goes_once_it_is_old(root):
    policy = Retention(keep=1)
    os.truncate(save(root, 10, policy) / "rank-00000.safetensors", 5)
    save(root, 10, policy)
    assert left(root) == [".damaged-step-000010-1", "step-000010"]
    save(root, 20, policy)
    assert left(root) == ["step-000020"]


def test_checkpoints_of_another_version_are_not_touched(root):
    path = save(root, 10, Retention())
    (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"version": 3', '"version": 4'))
    save(root, 20, Retention(keep=1))
    save(root, 30, Retention(keep=1))
    assert left(root) == ["step-000010", "step-000030"]


def test_an_interrupted_removal_leaves_nothing_under_the_checkpoints_name(root, monkeypatch):
    save(root, 10, Retention())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: next(path.iterdir()).unlink())
        save(root, 20, Retention(keep=1))
    assert left(root) == [".removed-step-000010-1", "step-000020"]
    save(root, 30, Retention(keep=2))
    assert left(root) == ["step-000020", "step-000030"]


def test_a_removal_that_fails_does_not_fail_the_save(root, monkeypatch, caplog):
    save(root, 10, Retention())

    def refused(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "remove", refused)
    save(root, 20, Retention(keep=1))
    assert left(root) == ["step-000010", "step-000020"]
    assert "an old checkpoint could not be removed: [Errno 13] Permission denied" in caplog.text
    assert [path.name for path in expired(root, Retention(keep=1))] == ["step-000010"]
