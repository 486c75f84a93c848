"""Checkpoints: whole or absent, every damage named, the newest whole one found."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
import torch

from phalanx.errors import CheckpointError, RunError
from phalanx.train import checkpoint

GROUPS = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "optimizer": {"exp_avg/w": torch.ones(2, 3)}}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run" / "checkpoints"


def save(root, step=10, keep=0, groups=GROUPS):
    return checkpoint.save(root, step, groups, {"samples": 5 * step}, keep)


def load(path):
    """The manifest of a checkpoint whose digests were checked, and all its tensors."""
    manifest = checkpoint.check(path)
    groups = {}
    for group in (name.removesuffix(".safetensors") for name in manifest.files):
        with checkpoint.Reader(manifest, group) as tensors:
            groups[group] = {name: tensors[name] for name in tensors.names()}
    return manifest, groups


def test_what_is_saved_is_loaded(root):
    path = save(root)
    manifest, groups = load(path)
    assert (manifest.step, manifest.meta) == (10, {"samples": 50})
    assert torch.equal(groups["model"]["w"], GROUPS["model"]["w"])
    assert torch.equal(groups["optimizer"]["exp_avg/w"], GROUPS["optimizer"]["exp_avg/w"])
    assert (root.parent / "latest").read_text() == "checkpoints/step-000010\n"
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "model.safetensors", "optimizer.safetensors"]


def test_tensors_are_held_to_the_model_before_they_are_read(root):
    manifest = checkpoint.check(save(root))
    with checkpoint.Reader(manifest, "model") as tensors:
        tensors.require({"w": (2, 3)})
        with pytest.raises(CheckpointError) as caught:
            tensors.require({"w": (3, 2), "b": (3,)})
        with pytest.raises(CheckpointError, match="w is not in the model"):
            tensors.require({})
        with pytest.raises(CheckpointError, match=r"model\.safetensors: b cannot be read"):
            tensors["b"]
    assert str(caught.value).endswith(
        "step-000010 does not fit the model: b is missing; w is (2, 3) there and (3, 2) here"
    )


def test_a_file_that_is_gone_or_no_safetensors_is_named(root):
    path = save(root)
    manifest = checkpoint.check(path)
    (path / "optimizer.safetensors").write_bytes(b"x" * 20)
    (path / "model.safetensors").unlink()
    for group in GROUPS:
        with pytest.raises(CheckpointError, match=rf"{group}\.safetensors cannot be read"):
            checkpoint.Reader(manifest, group).__enter__()


def test_only_the_newest_are_kept(root):
    for step in (10, 20, 30, 1_000_000):
        save(root, step, keep=2)
    assert sorted(p.name for p in root.iterdir()) == ["step-000030", "step-1000000"]
    newest = checkpoint.newest_valid(root)
    assert newest is not None
    assert newest.step == 1_000_000


def test_saving_the_same_step_again_leaves_it(root):
    before = (save(root) / "manifest.json").stat().st_mtime_ns
    assert (save(root) / "manifest.json").stat().st_mtime_ns == before


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def edit_manifest(path, **changes):
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGE = {
    "flipped bit": (lambda p: flip_a_bit(p / "model.safetensors"), "model.safetensors does not match its sha256"),
    "truncated": (lambda p: os.truncate(p / "optimizer.safetensors", 20), "optimizer.safetensors has 20 bytes"),
    "missing file": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "has no manifest.json"),
    "not JSON": (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is damaged"),
    "edited": (lambda p: edit_manifest(p, step=11), "does not match its own digest"),
    "foreign": (lambda p: edit_manifest(p, format="x"), "is not the manifest of a Phalanx checkpoint"),
    "later version": (lambda p: edit_manifest(p, version=2), "has format version 2; this program reads 1"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_every_damage_is_named_and_the_one_before_is_used(root, damage, message):
    save(root, 10)
    damage(save(root, 20))
    with pytest.raises(CheckpointError, match=message):
        load(root / "step-000020")
    told: list[str] = []
    found = checkpoint.newest_valid(root, report=told.append)
    assert found is not None
    assert found.step == 10
    assert message in told[0]
    assert told[0].endswith("trying the one before it")
    shutil.rmtree(root / "step-000010")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        checkpoint.newest_valid(root, report=told.append)


def test_a_manifest_cannot_point_outside_its_directory(root):
    path = save(root)
    raw = json.loads((path / "manifest.json").read_text())
    raw["files"] = {"../../secret": {"bytes": 1, "sha256": ""}}
    del raw["digest"]
    raw["digest"] = checkpoint._manifest_digest(raw)
    (path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="a file outside its directory"):
        checkpoint.check(path)


def test_without_checkpoints_there_is_none(tmp_path):
    assert checkpoint.newest_valid(tmp_path) is None


def test_a_full_disk_is_called_so_and_harms_nothing(root, monkeypatch):
    save(root, 10)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(RunError, match="it needs 48B, and .* has 10B free; earlier checkpoints are untouched"):
        save(root, 20)
    assert [p.name for p in root.iterdir()] == ["step-000010"]


def test_a_write_that_fails_leaves_no_half_checkpoint(root, monkeypatch):
    save(root, 10)

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", no_space)
    with pytest.raises(RunError, match="No space left on device"):
        save(root, 20)
    assert [p.name for p in root.iterdir()] == ["step-000010"]
    assert (root.parent / "latest").read_text() == "checkpoints/step-000010\n"


KILLED = """
import os, sys
from pathlib import Path
import torch
from phalanx.train import checkpoint
calls = 0
real = checkpoint._sync
def sync(path):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os._exit(9)
    real(path)
checkpoint._sync = sync
checkpoint.save(Path(sys.argv[1]), 20, {"model": {"w": torch.zeros(3)}}, {}, 0)
"""


@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_dying_in_a_save_never_leaves_a_latest_that_does_not_load(root, at):
    save(root, 10)
    subprocess.run([sys.executable, "-c", KILLED, str(root), str(at)], check=False)
    newest = checkpoint.newest_valid(root)
    assert newest is not None
    assert newest.step == (10 if at <= 3 else 20)
    assert load(root.parent / (root.parent / "latest").read_text().strip())
    save(root, 30)
    assert not list(root.glob(".step*"))  # what the dead save left is gone


def test_nothing_is_pickled(root):
    path = save(root)
    for file in path.iterdir():
        assert not file.read_bytes().startswith(b"\x80")
        assert file.suffix in (".json", ".safetensors")
