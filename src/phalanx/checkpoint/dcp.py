"""Checkpoints of torch's DCP (torch.distributed.checkpoint), in and out, on one process and without a process group.

A checkpoint written here holds the tensors under their names in Phalanx, and the step and the metadata as the UTF-8
bytes of JSON in a tensor FACTS. Tensors of others are read under the names that they have, in any sharding.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import pickle
import warnings
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from phalanx.bounded import open_regular, parse_json, read_bytes
from phalanx.checkpoint.manifest import Box, Manifest, ShardFile, StoredTensor
from phalanx.checkpoint.shard_file import DTYPES, TORCH_DTYPES, Reader, grouped
from phalanx.echo import shortened
from phalanx.errors import CheckpointError, DamagedCheckpointError, JobError

METADATA = ".metadata"
MOST_BYTES = 2**30
_ROOM = "torch.distributed.checkpoint"


class Record:
    """An object of the pickle: the arguments and the state that it was made with."""

    def __init__(self, *args: Any):
        self.args, self.state = args, None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str, kind: type) -> Any:
        """Returns a field of the state. Raises ValueError if it is not of the type."""
        value = self.state.get(name) if isinstance(self.state, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name} is {type(value).__name__}, expected {kind.__name__}")
        return value


KINDS: Mapping[tuple[str, str], Any] = {
    **{
        (f"{_ROOM}.metadata", name): type(name, (Record,), {})
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
            *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    (f"{_ROOM}.filesystem", "_StorageInfo"): type("_StorageInfo", (Record,), {}),
    ("torch.serialization", "_get_layout"): type("_get_layout", (Record,), {}),
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): type("PosixPath", (Record,), {}),
    ("pathlib._local", "PosixPath"): type("PosixPath", (Record,), {}),
}
"""The names that a pickle may use, and what they stand for."""


OPERATIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
)
"""The operations of pickle that DCP's metadata need, in protocols 2 to 5."""


class _Unpickler(pickle._Unpickler):
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = {
        ord(getattr(pickle, name)): pickle._Unpickler.dispatch[ord(getattr(pickle, name))] for name in OPERATIONS
    }

    def find_class(self, module: str, name: str) -> Any:
        found = KINDS.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no DCP checkpoint needs")
        return found

    def load_items(self) -> None:
        self._add(self.pop_mark())

    def _add(self, items: list[Any]) -> None:
        """Adds pairs to the dictionary on the stack. Keys are texts or records: to hash nested tuples, or to compare
        them, can take for ever."""
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(self.stack[-1], dict) or not isinstance(key, str | Record):
                raise pickle.UnpicklingError("it has a dictionary with other keys than DCP writes")
            self.stack[-1][key] = value

    def load_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._add([key, value])

    dispatch |= {ord(pickle.SETITEM): load_item, ord(pickle.SETITEMS): load_items}


class _UnknownTypeError(Exception):
    """A tensor has a type that checkpoints do not hold."""


class DcpPlaces(dict[tuple[str, Box], tuple[int, int]]):
    """Offset and length, in bytes, of a tensor's box in its file."""


def read(path: Path) -> tuple[dict[str, StoredTensor], dict[str, ShardFile], DcpPlaces, list[str]]:
    """Returns the tensors of the DCP checkpoint at `path`, its files, the place of each tensor's box, and the names of
    the entries that are no tensors.

    Raises DamagedCheckpointError if the metadata are refused, or are not those of the files; CheckpointError for types
    that checkpoints do not hold."""
    try:
        content = read_bytes(path / METADATA, MOST_BYTES)
        return _parse(path, _Unpickler(io.BytesIO(content)).load())
    except _UnknownTypeError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from None
    except Exception as error:  # a hostile pickle may raise anything
        raise DamagedCheckpointError(f"{path / METADATA} is refused: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return "it holds an operation that no DCP checkpoint needs"
    if isinstance(error, EOFError):
        return "it is empty, or ends too early"
    return str(error) if isinstance(error, pickle.UnpicklingError | ValueError | OSError) else type(error).__name__


def _parse(path: Path, metadata: Any) -> tuple[dict[str, StoredTensor], dict[str, ShardFile], DcpPlaces, list[str]]:
    entries = _of(metadata, "Metadata").field("state_dict_metadata", dict)
    places = DcpPlaces()
    files: dict[str, ShardFile] = {}
    missing: set[str] = set()
    located: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for index, info in metadata.field("storage_data", dict).items():
        if isinstance(index, Record) and isinstance(index.state, dict) and index.state.get("offset") is not None:
            try:
                where = _place(path, _of(info, "_StorageInfo"), files)
            except FileNotFoundError as error:
                missing.add(Path(error.filename).name)
                continue
            located[_of(index, "MetadataIndex").field("fqn", str), _sizes(index.state["offset"])] = where
    if missing:
        raise ValueError(f"files are missing: {', '.join(sorted(missing)[:5])}{', ...' * (len(missing) > 5)}")
    tensors: dict[str, StoredTensor] = {}
    others: list[str] = []
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise ValueError("a name is no text")
        if type(entry) is not KINDS[f"{_ROOM}.metadata", "TensorStorageMetadata"]:
            others.append(name)
            continue
        boxes: list[tuple[str, Box]] = []
        for each in entry.field("chunks", list):
            chunk = _of(each, "ChunkStorageMetadata")
            box = Box(_sizes(chunk.field("offsets", tuple)), _sizes(chunk.field("sizes", tuple)))
            if not box.elements:
                continue
            if (name, box.offsets) not in located:
                raise ValueError(f"no file has {box.key(name, ())}")
            file, offset, length = located[name, box.offsets]
            boxes.append((file, box))
            places[name, box] = offset, length
        tensors[name] = _tensor(name, entry, tuple(boxes), places)
    return tensors, files, places, others


def _tensor(name: str, entry: Record, boxes: tuple[tuple[str, Box], ...], places: DcpPlaces) -> StoredTensor:
    properties = _of(entry.field("properties", Record), "TensorProperties").state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if dtype not in DTYPES:
        raise _UnknownTypeError(f"{name} has the type {dtype}; there are {', '.join(map(str, DTYPES))}")
    tensor = StoredTensor(_sizes(entry.field("size", tuple)), DTYPES[dtype], boxes)
    if not tensor.complete:
        raise ValueError(f"it does not account for all of {name}")
    # Files are not compressed, so that a forged size cannot make us reserve more memory than there are bytes on disk.
    if tensor.nbytes > sum(places[name, box][1] for _, box in boxes):
        raise ValueError(f"{name} is larger than what its files hold of it")
    return tensor


def _place(path: Path, info: Record, files: dict[str, ShardFile]) -> tuple[str, int, int]:
    """Returns file, offset and length of an entry, and adds the file to `files`."""
    name, offset, length = info.field("relative_path", str), info.field("offset", int), info.field("length", int)
    if Path(name).name != name:
        raise ValueError(f"it names {name!r}, a file outside its directory")
    if isinstance(info.state, dict) and info.state.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed or encrypted, which this program cannot read")
    if name not in files:
        with open_regular(path / name) as file:
            files[name] = ShardFile(file.seek(0, 2), "")
    if offset < 0 or length < 0 or offset + length > files[name].bytes:
        raise ValueError(f"{name} ends before the {length} bytes at {offset} that it should hold")
    return name, offset, length


def _of(value: Any, name: str) -> Record:
    if not isinstance(value, Record) or type(value).__name__ != name:
        raise ValueError(f"{type(value).__name__} where {name} is expected")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError("offsets or sizes that are none")
    return value


log = logging.getLogger(__name__)

FACTS = "phalanx_metadata"
FILE_BYTES = 256 * 2**20
"""Bytes of tensors in a file, and so the memory that writing takes."""


class DcpReader(Reader):
    """The tensors of a DCP checkpoint. A context manager like Reader."""

    def __init__(self, path: Path, trusted: bool):
        """Reads the metadata. Raises JobError unless the checkpoint is `trusted`; DamagedCheckpointError for metadata
        that are refused or do not fit the files; CheckpointError for types that checkpoints do not hold."""
        if not trusted:
            raise JobError(
                f"{path} is a checkpoint of torch's DCP, whose {METADATA} is pickle and not read without --trust; give "
                "that if you trust whoever wrote it (only the names that DCP itself writes are accepted)"
            )
        tensors, files, self.places, others = read(path)
        super().__init__(Manifest(path, 0, False, {}, files, tensors))
        if others:
            log.warning("%s: %d entries are no tensors and are left out: %s", path, len(others), shortened(str(others)))
        if FACTS in tensors:
            facts = self._facts()
            del tensors[FACTS]
            self.manifest = Manifest(path, facts["step"], False, facts["meta"], files, tensors)

    def _facts(self) -> dict[str, Any]:
        try:
            facts = parse_json(self.read(FACTS).numpy().tobytes())
            if type(facts["step"]) is not int or not isinstance(facts["meta"], dict) or facts["step"] < 0:
                raise ValueError("step or metadata of the wrong type")
            return facts
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedCheckpointError(f"checkpoint {self.manifest.path}: {FACTS} is not valid: {error}") from None

    def _piece(self, name: str, file: str, there: Box, common: Box) -> Tensor:
        path, dtype = self.manifest.path / file, TORCH_DTYPES[self.manifest.tensors[name].dtype]
        offset, length = self.places[name, there]
        try:
            with open_regular(path) as opened:
                opened.seek(offset)
                content = io.BytesIO(opened.read(length))
            found = torch.load(content, map_location="cpu", weights_only=True)
            if not isinstance(found, Tensor) or tuple(found.shape) != there.sizes or found.dtype != dtype:
                raise OSError(f"it is no {dtype} of shape {there.sizes}")
            return found.detach()[common.within(there)]
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            unread = isinstance(error, pickle.UnpicklingError | EOFError)  # torch advises to load it unsafely
            reason = "its bytes are no tensor that torch saved" if unread else str(error).partition("\n")[0]
            raise DamagedCheckpointError(f"checkpoint file {path}: {name} cannot be read: {reason}") from None


class _LazyPlanner(DefaultSavePlanner):
    """Reads each tensor when it is written; DCP's own planner holds all of them."""

    def __init__(self, read: Callable[[str], Tensor], progress: Callable[[int], None]):
        super().__init__()
        self.read, self.progress = read, progress

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        tensor = self.read(write_item.index.fqn)
        self.progress(tensor.nbytes)
        return tensor


class _BoundedWriter(FileSystemWriter):
    """Divides the tensors among files, as if as many ranks wrote: DCP's own writer keeps the tensors of a file in
    memory until it is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(grouped(plan.items, _bytes_of, FILE_BYTES)):
            prefix = type(plan.storage_data)(f"__{number}_")
            part = dataclasses.replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return prod(data.size) * data.properties.dtype.itemsize if data else 0


def write(
    directory: Path,
    tensors: Mapping[str, StoredTensor],
    read: Callable[[str], Tensor],
    facts: Mapping[str, Any] | None,
    progress: Callable[[int], None],
) -> None:
    """Writes a DCP checkpoint into a new directory, one tensor at a time, which `read` returns. `progress` gets the
    bytes of every tensor. Raises OSError."""
    state: dict[str, Any] = {
        name: torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")
        for name, tensor in tensors.items()
    }
    if facts:
        state[FACTS] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    planner = _LazyPlanner(lambda name: state[FACTS] if name == FACTS else read(name), progress)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        try:
            save(
                state,
                storage_writer=_BoundedWriter(directory),
                planner=planner,
                no_dist=True,
            )
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
