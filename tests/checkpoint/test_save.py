"""Saving: whole or absent, by several ranks, through every death of the process."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.contents import contents
from phalanx.checkpoint import shard_file
from phalanx.checkpoint.inventory import Retention, check, newest_valid
from phalanx.checkpoint.manifest import Box
from phalanx.checkpoint.parts import Part
from phalanx.checkpoint.save import Save, save_tensors
from phalanx.errors import RunError
from phalanx.launch import logs
from phalanx.launch.ranks import GENERATION

TENSORS = {
    "w": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "exp_avg/w": torch.ones(2, 3, dtype=torch.float64),
    "scalar": torch.tensor(7),
}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run" / "checkpoints"


def save(root, step=10, tensors=TENSORS):
    return save_tensors(root, step, tensors, {"samples": 5 * step})


def rows(rank):
    """The part of each of two ranks: one row of w."""
    return [Part("w", (2, 3), Box((rank, 0), (1, 3)), TENSORS["w"][rank : rank + 1])]


def begin(root, step, ranks=2, need=24):
    found = Save.begin(root, step, ranks, need)
    assert found is not None
    return found


def test_what_is_saved_is_loaded(root):
    path = save(root)
    manifest = check(path)
    assert (manifest.step, manifest.meta, manifest.finite) == (10, {"samples": 50}, True)
    found = contents(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert (root.parent / "latest").read_text() == "checkpoints/step-000010\n"


def test_the_library_reads_a_shard_file_of_one_process_as_the_tensors_themselves(root):
    found = load_file(save(root) / "rank-00000.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("dtype", shard_file.DTYPES, ids=str)
def test_shard_files_hold_any_type_without_gaps(tmp_path, dtype):
    tensors = {
        "odd": torch.ones(3, dtype=torch.uint8),
        "x": torch.ones(2, 3).to(dtype),
        "t": torch.ones(2, 3).t().to(dtype),
    }
    facts = shard_file.write(tmp_path / "file", tensors)
    assert facts.bytes == (tmp_path / "file").stat().st_size
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_every_rank_writes_its_own_part_and_rank_zero_commits(root):
    pending = begin(root, 10, ranks=3)
    assert pending.missing() == [0, 1, 2]
    pending.write(1, rows(1))
    pending.write(2, [])  # other ranks hold all that this one has
    assert pending.missing() == [0]
    pending.write(0, rows(0))
    path = pending.commit({}, Retention())
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    assert torch.equal(contents(path)["w"], TENSORS["w"])


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({0: rows(0)}, "rank 1 wrote its part, but rank 0 does not see it in .*, on storage they share"),
        ({0: rows(0), 1: []}, "the ranks' parts are not every element once of w: a bug"),
        ({0: rows(0), 1: [*rows(0), *rows(1)]}, "the ranks' parts are not every element once of w: a bug"),
    ],
)
def test_a_part_that_is_missing_or_there_twice_is_not_committed(root, written, message):
    save(root, 10)
    pending = begin(root, 20)
    for rank, parts in written.items():
        pending.write(rank, parts)
    with pytest.raises(RunError, match=message):
        pending.commit({}, Retention())
    pending.discard()
    assert [path.name for path in root.iterdir()] == ["step-000010"]


def test_a_rank_without_the_shared_directory_says_so(root):
    pending = begin(root, 10)
    pending.directory.rmdir()
    with pytest.raises(RunError, match=r"could not be written: rank 1 on .* is not there; all ranks need the same"):
        pending.write(1, rows(1))


def test_saving_the_same_step_again_leaves_it(root):
    before = (save(root) / "manifest.json").stat().st_mtime_ns
    assert (save(root) / "manifest.json").stat().st_mtime_ns == before


def test_a_damaged_checkpoint_of_the_same_step_is_written_again(root):
    for number in (1, 2):
        os.truncate(save(root) / "rank-00000.safetensors", 20)
        assert torch.equal(contents(save(root))["w"], TENSORS["w"])
        assert (root / f".damaged-step-000010-{number}").is_dir()


def test_a_full_disk_is_called_so_and_harms_nothing(root, monkeypatch):
    save(root, 10)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(RunError, match="it needs 86B, and .* has 10B free; earlier checkpoints are untouched"):
        save(root, 20)
    assert [p.name for p in root.iterdir()] == ["step-000010"]


def test_a_write_that_fails_leaves_no_half_checkpoint(root, monkeypatch):
    save(root, 10)

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(RunError, match="rank 0 on .*No space left on device"):
        save(root, 20)
    assert [p.name for p in root.iterdir()] == ["step-000010"]
    assert (root.parent / "latest").read_text() == "checkpoints/step-000010\n"


KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
import torch
from phalanx.checkpoint.manifest import Box
from phalanx.checkpoint.parts import Part
from phalanx.checkpoint.inventory import Retention
from phalanx.checkpoint.save import Save
from phalanx.checkpoint.inventory import check, newest_valid

def save(root, step):
    pending = Save.begin(root, step, 2, 24)
    for rank in (0, 1):
        pending.write(rank, [Part("w", (2, 3), Box((rank, 0), (1, 3)), torch.ones(1, 3))])
    pending.commit({}, Retention(keep=1))

def dying(at):
    calls = 0
    def before(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for owner, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")):
        setattr(owner, name, before(getattr(owner, name)))

found = []
for at in range(1, 100):
    root = Path(sys.argv[1]) / str(at) / "checkpoints"
    save(root, 10)
    child = os.fork()
    if child == 0:
        dying(at)
        save(root, 20)
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    newest, latest = newest_valid(root), (root.parent / "latest").read_text().strip()
    check(root.parent / latest)
    save(root, 30)
    left = sorted(path.name for path in root.iterdir())
    found.append([killed, newest.step, left])
    if not killed:
        break
print(json.dumps(found))
"""


def test_a_kill_at_any_point_of_a_save_leaves_a_latest_that_loads_and_nothing_behind(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 15
    assert [killed for killed, *_ in found] == [True] * (len(found) - 1) + [False]
    steps = [step for _, step, _ in found]
    assert steps == sorted(steps)
    assert {10, 20} == set(steps)
    assert all(left == ["step-000030"] for *_, left in found)


def test_nothing_is_pickled(root):
    for file in save(root).iterdir():
        assert not file.read_bytes().startswith(b"\x80")
        assert file.suffix in (".json", ".safetensors")


def test_without_checkpoints_there_is_none(tmp_path):
    assert newest_valid(tmp_path) is None


def test_an_earlier_attempt_that_wakes_up_cannot_commit_or_clean_up(root, monkeypatch):
    root.mkdir(parents=True)
    monkeypatch.setenv(GENERATION, logs.claim(root.parent))
    save(root, 10)
    zombie = begin(root, 20)
    for rank in (0, 1):
        zombie.write(rank, rows(rank))
    logs.claim(root.parent)
    with pytest.raises(RunError, match="a later attempt has taken over"):
        zombie.commit({}, Retention())
    with pytest.raises(RunError, match="a later attempt has taken over"):
        begin(root, 30)
    assert (root.parent / "latest").read_text() == "checkpoints/step-000010\n"
    assert zombie.directory.is_dir(), "the later attempt may be writing beside it"
