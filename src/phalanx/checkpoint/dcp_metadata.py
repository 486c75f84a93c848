"""Reads `.metadata` of torch's distributed checkpoints (DCP), which is pickle, without running what it says.

Unpickling calls any function that the file names. Here every name outside of a short list is refused, and the names on
it stand for records that only hold what they are given: no class or function of torch is called, and nothing outside
of the records can be changed. Only the operations that DCP's metadata need exist, none of which reserves more memory
than the file has bytes. What the records hold is checked before it is used.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from phalanx.bounded import open_regular, read_bytes
from phalanx.checkpoint.boxes import Box
from phalanx.checkpoint.manifest import ShardFile, StoredTensor
from phalanx.checkpoint.shard_file import DTYPES
from phalanx.errors import CheckpointError, DamagedCheckpointError

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
    return str(error) if isinstance(error, pickle.UnpicklingError | ValueError | OSError) else type(error).__name__


def _parse(path: Path, metadata: Any) -> tuple[dict[str, StoredTensor], dict[str, ShardFile], DcpPlaces, list[str]]:
    entries = _of(metadata, "Metadata").field("state_dict_metadata", dict)
    places = DcpPlaces()
    files: dict[str, ShardFile] = {}
    located: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for index, info in metadata.field("storage_data", dict).items():
        if isinstance(index, Record) and isinstance(index.state, dict) and index.state.get("offset") is not None:
            where = _place(path, _of(info, "_StorageInfo"), files)
            located[_of(index, "MetadataIndex").field("fqn", str), _sizes(index.state["offset"])] = where
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
