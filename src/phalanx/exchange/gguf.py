"""Reads GGUF files, llama.cpp's format: metadata, and tensors one at a time, dequantised.

A file is magic and version, two counts, the metadata (key, type, value), the tensors' names, shapes, types and offsets,
and their elements (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Header and bounds are read here, since
the `gguf` package trusts every count that a file states; it dequantises the elements.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.bounded import open_regular
from phalanx.errors import CheckpointError, DamagedCheckpointError, NotFoundError
from phalanx.nearest import near_file

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_HEADER_BYTES = 256 * 2**20
"""Most bytes before the tensors. The largest published vocabulary takes 15 MB."""
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of values, as `struct` writes them; 8 is a string, 9 an array."""
_F32, _F16 = 0, 1
_PLAIN = {_F32: (1, 4), _F16: (1, 2)}
"""Elements and bytes of a block, of the types that need no package."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file."""

    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it; the file states the reverse."""
    type: int
    """ggml's number of the type."""
    start: int
    """The first byte in the file."""
    nbytes: int


class GgufFile:
    """An open GGUF file. Strings of its metadata are str, numbers int and float, arrays lists.

    Raises NotFoundError if there is no such file; DamagedCheckpointError, naming the file, if it is not GGUF or
    incomplete; CheckpointError for versions and types that are not read."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open_regular(path) as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise NotFoundError(f"{path}: there is no such file{near_file(path)}") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise DamagedCheckpointError(f"{path} cannot be read: {_reason(error)}") from None
        try:
            self.metadata, self.tensors = _Header(self._bytes).read()
        except (ValueError, struct.error) as error:
            raise DamagedCheckpointError(f"{path} is no whole GGUF file: {error}") from None
        except CheckpointError as error:
            raise type(error)(f"{path}: {error}") from None

    def same_bytes(self, name: str, other: str) -> bool:
        """Returns whether two tensors have the same shape, type and stored bytes."""
        a, b = self.tensors[name], self.tensors[other]
        same = (a.shape, a.type) == (b.shape, b.type)
        return same and bytes(self._stored(a)) == bytes(self._stored(b))

    def read(self, name: str) -> Tensor:
        """Returns a tensor's values in float32. Raises CheckpointError for a type that cannot be dequantised."""
        tensor = self.tensors[name]
        stored = self._stored(tensor)
        if tensor.type == _F32:
            values = stored.view("<f4").copy()
        elif tensor.type == _F16:
            values = stored.view("<f2").astype(np.float32)
        else:
            values = _dequantise(stored, tensor.type, f"{self.path}: {name}")
        return torch.from_numpy(values.reshape(tensor.shape))

    def _stored(self, tensor: GgufTensor) -> np.ndarray:
        return np.frombuffer(self._bytes, np.uint8, tensor.nbytes, tensor.start)


class _Header:
    """Reads a header. Raises ValueError and struct.error, whose text goes behind "no whole GGUF file: "."""

    def __init__(self, content: mmap.mmap):
        self.content, self.at, self.end = content, 0, min(len(content), _MOST_HEADER_BYTES)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            what = "big-endian numbers" if version % 65536 == 0 else f"version {version}"
            raise CheckpointError(f"GGUF with {what}; versions 2 and 3, little-endian, are read")
        n_tensors, n_values = self._count("tensors", 24), self._count("values", 13)
        metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = self._string()
            if key in metadata:
                raise ValueError(f"the key {key!r} occurs twice")
            metadata[key] = self._value(self._number("I"), key)
        if metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"it is one of {metadata['split.count']} parts; merge them first: llama-gguf-split --merge FIRST OUT"
            )
        return metadata, self._tensors(n_tensors, metadata.get("general.alignment", 32))

    def _tensors(self, count: int, alignment: object) -> dict[str, GgufTensor]:
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment}, no power of two")
        entries = []
        for _ in range(count):
            name, dimensions = self._string(), self._number("I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
            shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))))
            entries.append((name, shape, self._number("I"), self._number("Q")))
        first = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            block, block_bytes = _block(kind, name)
            if name in tensors or offset % alignment or math.prod(shape) == 0 or shape[-1] % block:
                raise ValueError(f"tensor {name!r} occurs twice, or its shape {list(shape)} or offset is not valid")
            nbytes = math.prod(shape) // block * block_bytes
            if first + offset + nbytes > len(self.content):
                missing = first + offset + nbytes - len(self.content)
                raise ValueError(f"tensor {name!r} ends {missing:,} bytes after the file")
            tensors[name] = GgufTensor(shape, kind, first + offset, nbytes)
        return tensors

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"the value of {key!r} has the unknown type {kind}")
        item = self._number("I")
        if item == _STRING:
            return [self._string() for _ in range(self._count(f"texts of {key!r}", 8))]
        if item not in _SCALARS:
            raise ValueError(f"{key!r} is a list of the unknown type {item}")
        size = struct.calcsize(f"<{_SCALARS[item]}")
        count = self._count(f"numbers of {key!r}", size)
        return list(struct.unpack(f"<{count}{_SCALARS[item]}", self._take(count * size)))

    def _count(self, what: str, least_bytes: int) -> int:
        """Reads a number of things, each of which takes at least `least_bytes`."""
        count = self._number("Q")
        if count * least_bytes > self.end - self.at:
            raise ValueError(f"it states {count:,} {what}, more than it has room for")
        return count

    def _number(self, kind: str) -> Any:
        [value] = struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))
        return value

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _take(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise ValueError(f"it ends within its header, at byte {self.end:,}")
        self.at += count
        return self.content[self.at - count : self.at]


def exact_decimal(value: float) -> float:
    """Returns the shortest decimal that rounds to the same float32: 1e-05 of 9.999999747378752e-06. Metadata hold
    float32, whose author meant the decimal."""
    return float(str(np.float32(value)))


def _block(kind: int, name: str) -> tuple[int, int]:
    """Returns elements and bytes of a type's block."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    quantisation = _library(name)
    try:
        return quantisation.GGML_QUANT_SIZES[quantisation.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise CheckpointError(
            f"tensor {name!r} has type {kind}, which the installed gguf package does not know"
        ) from None


def _dequantise(stored: np.ndarray, kind: int, whose: str) -> np.ndarray:
    quantisation = _library(whose)
    dequantise: Callable[..., np.ndarray] = quantisation.dequantize
    wanted = quantisation.GGMLQuantizationType(kind)
    _, block_bytes = quantisation.GGML_QUANT_SIZES[wanted]
    try:
        return dequantise(stored.reshape(-1, block_bytes), wanted)
    except (NotImplementedError, AttributeError) as error:
        raise CheckpointError(f"{whose} has type {wanted.name}, which cannot be dequantised: {error}") from None


def _library(whose: str) -> Any:
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            f"{whose} is quantised, and dequantising needs the gguf package: pip install 'phalanx[gguf]'"
        ) from None
    return gguf


def _reason(error: OSError | ValueError) -> str:
    return str(error) if isinstance(error, OSError) else "the file is empty"
