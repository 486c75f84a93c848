"""Reads boxes of a checkpoint's tensors, whatever boxes they were written in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.checkpoint.boxes import Box
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.shard_file import DTYPES
from phalanx.errors import CheckpointError, DamagedCheckpointError

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
"""Types by their names in safetensors files."""
OPEN_FILES = 256
"""Shard files open at a time: a process may have 1,024 by default."""


class Reader:
    """The tensors of a checkpoint. A context manager, in which shard files are opened as they are needed.

    Raises DamagedCheckpointError, naming the file, if one cannot be read."""

    manifest: Manifest
    """The tensors and metadata of the checkpoint."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self.open: dict[str, Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.open.clear()

    def names(self) -> list[str]:
        """Returns the names of the tensors."""
        return list(self.manifest.tensors)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Returns a tensor, or a box of it, on the CPU. Only the shard files' bytes of that box are read, some of them
        when the result is used: it may be a view of the file, to be copied.

        Raises CheckpointError if there is no such tensor."""
        if name not in self.manifest.tensors:
            raise CheckpointError(f"checkpoint {self.manifest.path} has no tensor {name}")
        stored = self.manifest.tensors[name]
        wanted = box or Box.of(stored.shape)
        result: Tensor | None = None
        for file, there in stored.boxes:
            common = wanted.intersection(there)
            if common is None:
                continue
            piece = self._piece(name, file, there, common)
            if common == wanted:
                return piece
            if result is None:
                result = torch.empty(wanted.sizes, dtype=piece.dtype)
            result[common.within(wanted)] = piece
        if result is None:  # the manifest accounts for every element, so there are none
            result = torch.empty(wanted.sizes, dtype=TORCH_DTYPES[stored.dtype])
        return result

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError with every parameter that is missing, extra or of another shape."""
        there = {name: tensor.shape for name, tensor in self.manifest.tensors.items() if "/" not in name}
        wrong = [f"{name} is missing" for name in shapes.keys() - there.keys()]
        wrong += [f"{name} is not in the model" for name in there.keys() - shapes.keys()]
        for name in shapes.keys() & there.keys():
            if there[name] != tuple(shapes[name]):
                wrong.append(f"{name} is {there[name]} there and {tuple(shapes[name])} here")
        if wrong:
            raise CheckpointError(f"checkpoint {self.manifest.path} does not fit the model: {'; '.join(sorted(wrong))}")

    def _piece(self, name: str, file: str, there: Box, common: Box) -> Tensor:
        """Returns what a file has of a tensor: the box `common` out of the box `there`."""
        path, stored = self.manifest.path / file, self.manifest.tensors[name]
        key = there.key(name, stored.shape)
        try:
            if file not in self.open:
                if len(self.open) == OPEN_FILES:
                    del self.open[next(iter(self.open))]
                self.open[file] = safe_open(path, "pt")
            if tuple(self.open[file].get_slice(key).get_shape()) != there.sizes:
                raise OSError(f"its shape is not {there.sizes}")
            if self.open[file].get_slice(key).get_dtype() != stored.dtype:
                raise OSError(f"its type is not {stored.dtype}")
            if common == there:
                return self.open[file].get_tensor(key)
            return self.open[file].get_slice(key)[common.within(there)]
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpointError(f"checkpoint file {path}: {key} cannot be read: {error}") from error
