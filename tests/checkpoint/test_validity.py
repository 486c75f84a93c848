"""Reading: every damage is named, and the newest whole checkpoint is found."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from phalanx.checkpoint.inventory import check, newest_valid
from phalanx.checkpoint.manifest import Box, manifest_digest
from phalanx.checkpoint.save import save_tensors
from phalanx.checkpoint.shard_file import Reader
from phalanx.errors import CheckpointError, DamagedCheckpointError

TENSORS = {"w": torch.arange(6.0).reshape(2, 3), "exp_avg/w": torch.ones(2, 3)}
SHARDS = "rank-00000.safetensors"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run" / "checkpoints"


def save(root, step=10):
    return save_tensors(root, step, TENSORS, {})


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
    save(root, 10)
    damage(save(root, 20))
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
    with Reader(check(save(root))) as tensors:
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
    with Reader(check(save(root))) as tensors:
        assert tensors.read("w", Box((0, 1), (2, 2))).tolist() == [[1, 2], [4, 5]]
        assert tensors.read("w", Box((1, 2), (1, 1))).tolist() == [[5]]


def test_a_shard_file_with_another_shape_than_the_manifest_says_is_named(root):
    path = save(root)
    boxes = {"shape": [3, 2], "dtype": "F32", "boxes": [[SHARDS, [0, 0], [3, 2]]]}
    forge(path, tensors={"w": boxes})
    with Reader(check(path)) as tensors, pytest.raises(DamagedCheckpointError, match=r"its shape is not \(3, 2\)"):
        tensors.read("w")


def test_a_shard_file_with_another_type_than_the_manifest_says_is_named(root):
    path = save(root)
    forge(path, tensors={"w": {"shape": [2, 3], "dtype": "F16", "boxes": [[SHARDS, [0, 0], [2, 3]]]}})
    with Reader(check(path)) as tensors, pytest.raises(DamagedCheckpointError, match="its type is not F16"):
        tensors.read("w")


def test_a_tensor_without_elements_is_read(root):
    path = save(root)
    forge(path, tensors={"w": {"shape": [0, 3], "dtype": "BF16", "boxes": []}})
    with Reader(check(path)) as tensors:
        assert (tensors.read("w").shape, tensors.read("w").dtype) == ((0, 3), torch.bfloat16)


@pytest.mark.parametrize("content", [None, b"x" * 20], ids=["gone", "no safetensors"])
def test_a_file_that_changes_after_it_was_checked_is_named(root, content):
    manifest = check(save(root))
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
