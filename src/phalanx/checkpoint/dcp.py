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
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from phalanx.bounded import open_regular, parse_json
from phalanx.checkpoint import dcp_metadata
from phalanx.checkpoint.boxes import Box
from phalanx.checkpoint.dcp_metadata import METADATA
from phalanx.checkpoint.manifest import Manifest, StoredTensor
from phalanx.checkpoint.reader import TORCH_DTYPES, Reader
from phalanx.echo import shortened
from phalanx.errors import DamagedCheckpointError, JobError

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
        tensors, files, self.places, others = dcp_metadata.read(path)
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
            reason = str(error).partition("\n")[0]
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
        for number, items in enumerate(_grouped(plan.items)):
            prefix = type(plan.storage_data)(f"__{number}_")
            part = dataclasses.replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _grouped(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Returns the items in groups of FILE_BYTES, or of one larger tensor, in their order."""
    groups: list[list[WriteItem]] = []
    size = 0
    for item in items:
        data = item.tensor_data
        nbytes = prod(data.size) * data.properties.dtype.itemsize if data else 0
        if not groups or size + nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += nbytes
    return groups


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
