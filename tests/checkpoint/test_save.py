"""Saving and reading: whole or absent through every death of the process, each damage named, what stays."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.contents import contents, save_tensors
from phalanx.checkpoint import inventory as files
from phalanx.checkpoint import shard_file
from phalanx.checkpoint.convert import _needed
from phalanx.checkpoint.inventory import Retention, check, expired, newest_valid
from phalanx.checkpoint.manifest import MANIFEST, Box, manifest_digest
from phalanx.checkpoint.new_target import target_problems, written_beside
from phalanx.checkpoint.parts import Part
from phalanx.checkpoint.save import Save
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.job import Optimizer
from phalanx.errors import CheckpointError, DamagedCheckpointError, RunError
from phalanx.launch import logs
from phalanx.launch.ranks import GENERATION
from warm import as_file

# Saving: whole or absent, by several ranks, through every death of the process.


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
        [*as_file(tmp_path, KILLED), str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
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


# Reading: every damage is named, and the newest whole checkpoint is found.

PAIR = {"w": torch.arange(6.0).reshape(2, 3), "exp_avg/w": torch.ones(2, 3)}
SHARDS = "rank-00000.safetensors"


def save_pair(root, step=10):
    return save_tensors(root, step, PAIR, {})


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def edit(path, **changes):
    """Changes a manifest without its digest."""
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def forge(path, **changes):
    """Changes a manifest and its digest."""
    raw = json.loads((path / "manifest.json").read_text()) | changes
    del raw["digest"]
    (path / "manifest.json").write_text(json.dumps(raw | {"digest": manifest_digest(raw)}))


BOXES = {"shape": [2, 3], "dtype": "F32", "boxes": [[SHARDS, [0, 0], [1, 3]]]}
OVERLAP = BOXES | {"boxes": [[SHARDS, [0, 0], [1, 3]], [SHARDS, [0, 0], [1, 3]]]}
DAMAGE = {
    "flipped bit": (lambda p: flip_a_bit(p / SHARDS), f"{SHARDS} does not match its digest"),
    "truncated": (lambda p: os.truncate(p / SHARDS, 20), f"{SHARDS} has 20 bytes"),
    "empty": (lambda p: os.truncate(p / SHARDS, 0), f"{SHARDS} has 0 bytes"),
    "missing file": (lambda p: (p / SHARDS).unlink(), f"{SHARDS} is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "has no manifest.json"),
    "not JSON": (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is damaged"),
    "nested": (lambda p: (p / "manifest.json").write_text("[" * 100_000), "manifest.json is damaged"),
    "edited": (lambda p: edit(p, step=11), "does not match its own digest"),
    "foreign": (lambda p: edit(p, format="x"), "is not the manifest of a Phalanx checkpoint"),
    "earlier version": (lambda p: edit(p, version=1), "format version 1, written by Phalanx 0"),
    "later version": (lambda p: edit(p, version=4, phalanx="9.0"), "format version 4, written by Phalanx 9.0; this"),
    "not checked": (lambda p: forge(p, finite=False), "was not checked for NaN"),
    "outside": (lambda p: forge(p, files={"../x": {"bytes": 1, "xxh3_128": ""}}), "a file outside its directory"),
    "no tensors": (lambda p: forge(p, tensors=[]), "lacks what every manifest has"),
    "overlap": (lambda p: forge(p, tensors={"w": OVERLAP}), "does not account for all of w"),
    "unknown type": (lambda p: forge(p, tensors={"w": BOXES | {"dtype": "X"}}), "gives w the type 'X'; there are F64"),
    "half a tensor": (lambda p: forge(p, tensors={"w": BOXES}), "does not account for all of w"),
    "negative size": (lambda p: forge(p, files={SHARDS: {"bytes": -1, "xxh3_128": ""}}), "-1 is no size"),
    "half removed": (lambda p: [file.unlink() for file in p.iterdir()], "has no manifest.json"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_every_damage_is_named_and_the_one_before_is_used(root, damage, message):
    save_pair(root, 10)
    damage(save_pair(root, 20))
    with pytest.raises(CheckpointError, match=message):
        check(root / "step-000020")
    told: list[str] = []
    found = newest_valid(root, report=told.append)
    assert found is not None
    assert found.step == 10
    assert message in told[0]
    assert told[0].endswith("trying the one before it")
    shutil.rmtree(root / "step-000010")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        newest_valid(root, report=told.append)


def test_tensors_are_held_to_the_model_before_they_are_read(root):
    with Reader(check(save_pair(root))) as tensors:
        tensors.require({"w": (2, 3)})
        with pytest.raises(CheckpointError) as caught:
            tensors.require({"w": (3, 2), "b": (3,)})
        with pytest.raises(CheckpointError, match="w is not in the model"):
            tensors.require({})
        with pytest.raises(CheckpointError, match="has no tensor b"):
            tensors.read("b")
    assert str(caught.value).endswith(
        "step-000010 does not fit the model: b is missing; w is (2, 3) there and (3, 2) here"
    )


def test_any_box_is_read(root):
    with Reader(check(save_pair(root))) as tensors:
        assert tensors.read("w", Box((0, 1), (2, 2))).tolist() == [[1, 2], [4, 5]]
        assert tensors.read("w", Box((1, 2), (1, 1))).tolist() == [[5]]


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [([3, 2], "F32", r"its shape is not \(3, 2\)"), ([2, 3], "F16", "its type is not F16")],
)
def test_a_shard_file_with_other_tensors_than_the_manifest_says_is_named(root, shape, dtype, message):
    path = save_pair(root)
    forge(path, tensors={"w": {"shape": shape, "dtype": dtype, "boxes": [[SHARDS, [0, 0], shape]]}})
    with Reader(check(path)) as tensors, pytest.raises(DamagedCheckpointError, match=message):
        tensors.read("w")


def test_a_tensor_without_elements_is_read(root):
    path = save_pair(root)
    forge(path, tensors={"w": {"shape": [0, 3], "dtype": "BF16", "boxes": []}})
    with Reader(check(path)) as tensors:
        assert (tensors.read("w").shape, tensors.read("w").dtype) == ((0, 3), torch.bfloat16)


@pytest.mark.parametrize("content", [None, b"x" * 20], ids=["gone", "no safetensors"])
def test_a_file_that_changes_after_it_was_checked_is_named(root, content):
    manifest = check(save_pair(root))
    (manifest.path / SHARDS).unlink()
    if content:
        (manifest.path / SHARDS).write_bytes(content)
    with Reader(manifest) as tensors, pytest.raises(DamagedCheckpointError, match=rf"{SHARDS}: w cannot be read"):
        tensors.read("w")


def test_looking_for_checkpoints_imports_no_torch():
    program = (
        "import sys, phalanx.checkpoint.inventory, phalanx.train.run_directory; "
        "sys.exit(any(name.split('.')[0] in ('torch', 'safetensors') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Which checkpoints stay.


BEST = {10: 3.0, 20: 1.5, 30: float("nan"), 40: 1.5, 50: 2.0, 60: None}
"""Validation losses by step."""


def save_step(root, step, policy, loss=None, measured=None):
    meta = {"val_loss": loss, "val_step": measured or step}
    return save_tensors(root, step, {"w": torch.ones(3)}, meta, policy)


def left(root):
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize(
    ("policy", "losses", "kept"),
    [
        ({"keep": 2}, dict.fromkeys([10, 20, 30, 1_000_000]), [30, 1_000_000]),
        ({"keep": 0}, dict.fromkeys([10, 20, 30]), [10, 20, 30]),
        ({"keep": 2, "keep_every": 20}, dict.fromkeys(range(10, 80, 10)), [20, 40, 60, 70]),
        ({"keep": 1, "keep_best": True}, BEST, [20, 60]),  # of two equal ones the older
        ({"keep": 1, "keep_best": True}, BEST | {70: 1.0}, [70]),
    ],
    ids=["newest", "all", "at an interval", "best", "the newest is the best"],
)
def test_what_the_policy_keeps_stays(root, policy, losses, kept):
    for step, loss in losses.items():
        save_step(root, step, Retention(**policy), loss)
    assert left(root) == sorted(f"step-{step:06d}" for step in kept)


def test_a_loss_of_an_earlier_step_is_not_a_checkpoints_own(root):
    save_step(root, 10, Retention(keep=1, keep_best=True), 3.0)
    save_step(root, 20, Retention(keep=1, keep_best=True), 1.0, measured=15)
    assert left(root) == ["step-000010", "step-000020"]


def test_a_damaged_checkpoint_does_not_count_and_goes_once_it_is_old(root):
    policy = Retention(keep=2)
    save_step(root, 10, policy)
    os.truncate(save_step(root, 20, policy) / "rank-00000.safetensors", 5)
    save_step(root, 30, policy)
    assert left(root) == ["step-000010", "step-000020", "step-000030"], "10 and 30 are the whole ones"
    save_step(root, 40, policy)
    assert left(root) == ["step-000030", "step-000040"]


def test_one_that_was_set_aside_goes_once_it_is_old(root):
    policy = Retention(keep=1)
    os.truncate(save_step(root, 10, policy) / "rank-00000.safetensors", 5)
    save_step(root, 10, policy)
    assert left(root) == [".damaged-step-000010-1", "step-000010"]
    save_step(root, 20, policy)
    assert left(root) == ["step-000020"]


def test_checkpoints_of_another_version_are_not_touched(root):
    path = save_step(root, 10, Retention())
    (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"version": 3', '"version": 4'))
    save_step(root, 20, Retention(keep=1))
    save_step(root, 30, Retention(keep=1))
    assert left(root) == ["step-000010", "step-000030"]


def test_an_interrupted_removal_leaves_nothing_under_the_checkpoints_name(root, monkeypatch):
    save_step(root, 10, Retention())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: next(path.iterdir()).unlink())
        save_step(root, 20, Retention(keep=1))
    assert left(root) == [".removed-step-000010-1", "step-000020"]
    save_step(root, 30, Retention(keep=2))
    assert left(root) == ["step-000020", "step-000030"]


def test_a_removal_that_fails_does_not_fail_the_save(root, monkeypatch, caplog):
    save_step(root, 10, Retention())

    def refused(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "remove", refused)
    save_step(root, 20, Retention(keep=1))
    assert left(root) == ["step-000010", "step-000020"]
    assert "an old checkpoint could not be removed: [Errno 13] Permission denied" in caplog.text
    assert [path.name for path in expired(root, Retention(keep=1))] == ["step-000010"]


# New files and folders: written beside their place, in folders that are made, and gone if something fails.


def test_folders_above_the_target_are_made(tmp_path):
    target = tmp_path / "runs" / "of" / "mine"
    assert not list(target_problems(target))
    with written_beside(target, 10) as new:
        (new.directory / "file").write_text("x")
    assert [path.name for path in target.iterdir()] == ["file"]
    assert [path.name for path in target.parent.iterdir()] == ["mine"]


def test_a_failure_leaves_none_of_them(tmp_path):
    target = tmp_path / "runs" / "of" / "mine"
    with pytest.raises(RuntimeError), written_beside(target, 10):
        raise RuntimeError
    with (
        pytest.raises(RunError, match=r"of/mine could not be written: it needs .* has .* free"),
        written_beside(target, 2**70),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_among_the_folders_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    [problem] = target_problems(tmp_path / "runs" / "of" / "mine")
    assert problem.endswith(f"{tmp_path}/runs is no folder; name another target")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(number, tmp_path):
    def interrupted():
        with written_beside(tmp_path / "run", 10) as new:
            (new.directory / "file").write_text("x")
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as error:
        interrupted()
    assert error.value.code == 128 + number
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_a_killed_process_left_is_removed_and_what_another_one_writes_is_not(tmp_path):
    abandoned = tmp_path / ".run.tmp-0123"
    with written_beside(tmp_path / "run", 10) as first:
        abandoned.mkdir()
        with written_beside(tmp_path / "other", 10):
            assert len(list(tmp_path.iterdir())) == 3  # of another target
        (tmp_path / "other").rmdir()
        with contextlib.suppress(ZeroDivisionError), written_beside(tmp_path / "run", 10) as second:
            assert sorted(tmp_path.iterdir()) == sorted([first.directory, second.directory])
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# The tensors that a state needs which is converted to a run's: the optimizer's own only where it keeps them.

SHAPES = {"norm.weight": (128,), "down.weight": (128, 512)}


def test_scales_are_needed_of_quantised_parameters_only():
    kinds = ["exp_avg", "exp_avg_scale", "master", "replica1/exp_avg_scale"]
    assert set(_needed(Optimizer(state="8bit"), kinds, SHAPES)) == {
        *(f"{kind}/down.weight" for kind in kinds),
        "exp_avg/norm.weight",
        "master/norm.weight",
    }
