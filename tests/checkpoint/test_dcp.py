"""Checkpoints of torch's DCP: read by torch, written by torch, and never obeyed."""

import builtins
import io
import os
import pickle
import pickletools
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import load as torch_load
from torch.distributed.checkpoint import save as torch_save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from phalanx.checkpoint import dcp
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.dcp import FACTS, OPERATIONS, DcpReader
from phalanx.checkpoint.manifest import Box, StoredTensor
from phalanx.checkpoint.shard_file import DTYPES
from phalanx.errors import CheckpointError, DamagedCheckpointError, JobError

TENSORS = {
    "blocks.0.w": torch.arange(15.0).view(5, 3),
    "exp_avg/blocks.0.w": torch.ones(5, 3, dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "layers[0]": torch.ones(2),
}
META = {"job": {"name": "é"}, "samples": 5}


@pytest.fixture
def path(tmp_path):
    specs = {name: StoredTensor(tuple(each.shape), DTYPES[each.dtype], ()) for name, each in TENSORS.items()}
    dcp.write(tmp_path / "dcp", specs, TENSORS.__getitem__, {"step": 3, "meta": META}, lambda _: None)
    return tmp_path / "dcp"


def test_torch_loads_what_is_written(path):
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    torch_load(found, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_large_states_are_divided_among_files(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp, "FILE_BYTES", 40)
    specs = {name: StoredTensor(tuple(each.shape), DTYPES[each.dtype], ()) for name, each in TENSORS.items()}
    dcp.write(tmp_path, specs, TENSORS.__getitem__, None, lambda _: None)
    assert sorted(each.name for each in tmp_path.glob("*.distcp")) == [f"__{number}_0.distcp" for number in range(3)]
    test_torch_loads_what_is_written(tmp_path)


def test_what_is_written_is_read(path):
    with DcpReader(path, trusted=True) as tensors:
        assert (tensors.manifest.step, tensors.manifest.meta) == (3, META)
        assert set(tensors.names()) == set(TENSORS)
        for name, tensor in TENSORS.items():
            found = tensors.read(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
        assert tensors.read("blocks.0.w", Box((1, 1), (2, 1))).tolist() == [[4], [7]]


def write_sharded(ranks, path):
    """Saves DTensors of 5 × 6, sharded along each dimension, a whole tensor, and objects, as torch trainers do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks.world,))
    whole = torch.arange(30.0).view(5, 6)
    state = {f"dim{dim}": distribute_tensor(whole, mesh, [Shard(dim)]) for dim in range(2)}
    state |= {"replicated": distribute_tensor(whole, mesh, [Replicate()]), "plain": whole}
    torch_save({"model": state, "step": 5, "rng": [1, 2]}, checkpoint_id=path)


def test_what_torch_writes_on_several_ranks_is_read(ranks, tmp_path, caplog):
    ranks(write_sharded, 3, str(tmp_path / "dcp"))
    with DcpReader(tmp_path / "dcp", trusted=True) as tensors:
        assert set(tensors.names()) == {f"model.{name}" for name in ("dim0", "dim1", "replicated", "plain")}
        assert len(tensors.manifest.tensors["model.dim1"].boxes) == 3
        for name in tensors.names():
            assert torch.equal(tensors.read(name), torch.arange(30.0).view(5, 6)), name
    assert "entries are no tensors and are left out" in caplog.text


def test_without_trust_nothing_is_read(path):
    (path / ".metadata").write_bytes(b"anything")
    with pytest.raises(JobError, match="is pickle and not read without --trust"):
        DcpReader(path, trusted=False)


class Calls:
    """Pickles as the call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def names(module, name):
    """A pickle that calls a function by its name."""
    return b"\x80\x04" + f"c{module}\n{name}\n".encode() + b"(X\x05\x00\x00\x00touchtR."


HOSTILE = {
    "system": pickle.dumps(Calls(os.system, "touch hacked")),
    "eval": pickle.dumps(Calls(builtins.eval, "open('hacked', 'w')")),
    "in metadata": pickle.dumps(Metadata({"w": Calls(os.mkdir, "hacked")})),
    "in a key": pickle.dumps({Calls(os.mkdir, "hacked"): 1}),
    "getattr": pickle.dumps(Calls(getattr, Metadata, "__init__")),
    "torch.load": pickle.dumps(Calls(torch.load, "hacked")),
    "through the module": names("torch.distributed.checkpoint.metadata", "os"),
    "dotted": names("torch", "serialization.os.system"),
    "torch.hub": names("torch.hub", "load"),
    "copyreg": names("copyreg", "_reconstructor"),
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "instance": b"(ios\nsystem\n.",
    "huge memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "huge bytes": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "hash bomb": b"\x80\x04)" + b"2\x86" * 60 + b"}\x8c\x01a)s.",
    "nested key": b"\x80\x04})" + b"\x85" * 60 + b"Ns.",
    "state of a class": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x01\x00\x00\x00ak\x01sb.",
    "cut": pickle.dumps(Metadata({}))[:-9],
    "text": b"hello",
    "nothing": b"",
    "another object": pickle.dumps({"state_dict_metadata": {}}),
    "no storage": pickle.dumps(Metadata({})),
    "deep": b"\x80\x04" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_metadata_are_one_message_and_run_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"dcp/\.metadata is refused: \S"):
        DcpReader(Path("dcp"), trusted=True)
    assert [each.name for each in tmp_path.iterdir()] == ["dcp"]
    assert Metadata.__name__ == "Metadata"


def metadata(size=(2, 3), chunks=(((0, 0), (2, 3)),), file="__0_0.distcp", offset=0, length=100, **storage):
    entry = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks],
    )
    places = {MetadataIndex("w", offsets): _StorageInfo(file, offset, length, **storage) for offsets, _ in chunks}
    return Metadata({"w": entry}, None, places)


WRONG = {
    "outside": (metadata(file="../x"), "a file outside its directory"),
    "absolute": (metadata(file="/etc/passwd"), "a file outside its directory"),
    "absent": (metadata(file="y"), "files are missing: y"),
    "past the end": (metadata(offset=10), "ends before the 100 bytes at 10"),
    "negative": (metadata(offset=-10), "ends before"),
    "huge": (metadata(size=(2**40, 3), chunks=(((0, 0), (2**40, 3)),)), "w is larger than what its files hold"),
    "half": (metadata(chunks=(((0, 0), (1, 3)),)), "does not account for all of w"),
    "overlap": (metadata(chunks=(((0, 0), (1, 3)), ((0, 1), (1, 3)))), "does not account for all of w"),
    "compressed": (metadata(transform_descriptors=["zstd"]), "compressed or encrypted"),
    "types": (metadata(length="long"), "length is str, expected int"),
    "no place": (Metadata(metadata().state_dict_metadata, None, {}), "no file has w"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_metadata_that_do_not_fit_the_files_are_refused(tmp_path, content, message):
    (tmp_path / "__0_0.distcp").write_bytes(b"x" * 100)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(DamagedCheckpointError, match=message):
        DcpReader(tmp_path, trusted=True)


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"x" * 100, b"", pickle.dumps(Calls(os.mkdir, "hacked")), saved(Calls(os.mkdir, "hacked")), saved(torch.ones(3))],
    ids=["no tensor", "empty", "pickle", "hostile", "shape"],
)
def test_hostile_tensors_are_one_message_and_run_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    content += b" " * (24 - len(content))
    (tmp_path / "__0_0.distcp").write_bytes(content)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata(length=len(content))))
    reader = DcpReader(tmp_path, trusted=True)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0.distcp: w cannot be read: \S") as caught:
        reader.read("w")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "hacked").exists()


def test_a_type_that_checkpoints_do_not_hold_is_named(tmp_path):
    torch_save({"w": torch.ones(2, dtype=torch.complex64)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"w has the type torch.complex64; there are torch.float64"):
        DcpReader(tmp_path, trusted=True)


def test_false_facts_are_refused(path, tmp_path):
    false = torch.frombuffer(bytearray(b'{"step": "x", "meta": {}}'), dtype=torch.uint8)
    torch_save({FACTS: false}, checkpoint_id=tmp_path / "false", no_dist=True)
    with pytest.raises(DamagedCheckpointError, match=f"{FACTS} is not valid"):
        DcpReader(tmp_path / "false", trusted=True)


def test_only_the_operations_in_use_are_allowed(path):
    """Those that torch writes now; a later torch that writes more would be refused, and this test would tell."""
    used = {code.name for code, _, _ in pickletools.genops((path / ".metadata").read_bytes())}
    assert used <= set(OPERATIONS)


def test_a_part_of_a_checkpoint_says_what_is_missing(path, tmp_path):
    """And a folder of several says so, as torchtitan's step-10 and step-20 are."""
    several = tmp_path / "several"
    several.mkdir()
    shutil.copytree(path, several / "step-10")
    with pytest.raises(CheckpointError, match="is a folder of checkpoints of torch's DCP: name one .*step-10"):
        open_source(several, trusted=True)
    [part, *_] = sorted((several / "step-10").glob("*.distcp"))
    with pytest.raises(CheckpointError, match="is one file of a checkpoint of torch's DCP"):
        open_source(part, trusted=True)
    content = part.read_bytes()
    part.write_bytes(bytes(len(content)))
    with pytest.raises(DamagedCheckpointError, match="its bytes are no tensor that torch saved"):
        open_source(several / "step-10", trusted=True)  # it reads the facts
    part.rename(part.with_name("other.distcp"))
    with pytest.raises(DamagedCheckpointError, match=f"is refused: files are missing: {part.name}"):
        open_source(several / "step-10", trusted=True)
    (several / "step-10" / ".metadata").unlink()
    with pytest.raises(DamagedCheckpointError, match="no .metadata, which is written last"):
        open_source(several / "step-10", trusted=True)
