"""Writing a checkpoint: each rank writes its parts, then rank 0 commits them all.

Nothing here communicates, so that a thread may do it while training goes on; the caller tells rank 0 when every rank
has written (or `Save.missing` does, on a shared file system). The order on the disk:

1. Rank 0 creates the directory `.step-NNNNNN.tmp-TOKEN`.
2. Each rank writes rank-NNNNN.safetensors there, waits until it is on the disk, and then writes rank-NNNNN.json with
   its size, digest and boxes.
3. Rank 0 writes manifest.json from those reports, waits until manifest and directory are on the disk, renames the
   directory to step-NNNNNN, waits for its parent, and replaces the run's `latest`.

Whenever a machine dies, every directory named step-NNNNNN is whole, and `latest` names one of them.
"""

from __future__ import annotations

import json
import platform
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.checkpoint import files, shard_file
from phalanx.checkpoint.boxes import Box
from phalanx.checkpoint.manifest import MANIFEST, Manifest, ShardFile, StoredTensor
from phalanx.checkpoint.parts import Part, whole_parts
from phalanx.checkpoint.retention import DAMAGED, Retention, remove_expired, remove_leftovers
from phalanx.checkpoint.validity import check, directory_of
from phalanx.data.files import write_atomic
from phalanx.errors import CheckpointError, RunError
from phalanx.launch import generation
from phalanx.units import gib

LATEST = "latest"


@dataclass(frozen=True)
class Save:
    """One checkpoint that is being written."""

    root: Path
    """The run's directory of checkpoints."""
    step: int
    directory: Path
    """The temporary directory that all ranks write to."""
    ranks: int
    """Number of ranks that write."""

    @classmethod
    def begin(cls, root: Path, step: int, ranks: int, need: int) -> Save | None:
        """Prepares the temporary directory, on rank 0, for a state of `need` bytes. Returns None if the checkpoint of
        this step exists and is whole; a damaged one is renamed first.

        One save at a time works in `root`: remains of interrupted ones are deleted. Raises RunError if there is too
        little space, the directory cannot be written, or a later attempt has taken over the run."""
        final = directory_of(root, step)
        with _failing(final):
            generation.check(root.parent)
            root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(root)
            if final.exists():
                try:
                    check(final)
                except CheckpointError:
                    files.set_aside(final, DAMAGED)
                else:
                    return None
            _require_space(root, need)
            directory = root / f".{final.name}.tmp-{secrets.token_hex(4)}"
            directory.mkdir()
        return cls(root, step, directory, ranks)

    @property
    def final(self) -> Path:
        return directory_of(self.root, self.step)

    def write(self, rank: int, parts: Iterable[Part]) -> None:
        """Writes this rank's parts and then its report. Raises RunError, with the rank and its host."""
        with _failing(self.final, f"rank {rank} on {platform.node()}: "):
            if not self.directory.is_dir():
                raise OSError(
                    f"{self.directory} is not there; all ranks need the same directory, on storage they share"
                )
            tensors: dict[str, Tensor] = {}
            boxes: dict[str, list[Any]] = {}
            for part in parts:
                tensors[part.box.key(part.tensor, part.shape)] = part.value
                dtype = shard_file.DTYPES[part.value.dtype]
                boxes.setdefault(part.tensor, [part.shape, dtype]).append((part.box.offsets, part.box.sizes))
            written = {}
            if tensors:
                file = self.directory / f"rank-{rank:05d}.safetensors"
                facts = shard_file.write(file, tensors)
                written = {"file": file.name, "bytes": facts.bytes, "sha256": facts.sha256}
            write_atomic(self._report(rank), json.dumps({**written, "tensors": boxes}).encode())

    def missing(self) -> list[int]:
        """Returns the ranks that have not finished writing, as far as this machine sees."""
        return [rank for rank in range(self.ranks) if not self._report(rank).is_file()]

    def commit(self, meta: dict[str, Any], retention: Retention) -> Path:
        """Makes the checkpoint valid, on rank 0, after all ranks have written; moves `latest`; removes old checkpoints.
        Returns its path. Raises RunError."""
        with _failing(self.final):
            if missing := self.missing():
                raise OSError(
                    f"rank {', '.join(map(str, missing))} wrote its part, but rank 0 does not see it in "
                    f"{self.directory}; all ranks need the same directory, on storage they share"
                )
            manifest = self._manifest(meta)
            for rank in range(self.ranks):
                self._report(rank).unlink()
            write_atomic(self.directory / MANIFEST, manifest.text().encode())
            generation.check(self.root.parent)
            files.rename(self.directory, self.final)
            write_atomic(self.root.parent / LATEST, f"{self.root.name}/{self.final.name}\n".encode())
        remove_expired(self.root, retention)
        return self.final

    def discard(self) -> None:
        """Deletes what was written of a checkpoint that failed, on rank 0, once no rank writes any more."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _report(self, rank: int) -> Path:
        return self.directory / f"rank-{rank:05d}.json"

    def _manifest(self, meta: dict[str, Any]) -> Manifest:
        """Returns the manifest of all ranks' parts. Raises OSError if they are not every element once."""
        shards: dict[str, ShardFile] = {}
        tensors: dict[str, StoredTensor] = {}
        for rank in range(self.ranks):
            report: Mapping[str, Any] = json.loads(self._report(rank).read_text(encoding="utf-8"))
            name = report.get("file", "")
            if name:
                shards[name] = ShardFile(report["bytes"], report["sha256"])
                size = (self.directory / name).stat().st_size
                if size != report["bytes"]:
                    raise OSError(f"rank {rank} wrote {report['bytes']} bytes to {name}, rank 0 sees {size}")
            for tensor, (shape, dtype, *boxes) in report["tensors"].items():
                found = tuple((name, Box(tuple(offsets), tuple(sizes))) for offsets, sizes in boxes)
                before = tensors[tensor].boxes if tensor in tensors else ()
                tensors[tensor] = StoredTensor(tuple(shape), dtype, before + found)
        wrong = [name for name, tensor in tensors.items() if not tensor.complete]
        if wrong:
            raise OSError(f"the ranks' parts are not every element once of {', '.join(wrong)}: a bug")
        return Manifest(self.final, self.step, True, meta, shards, tensors)


def save_tensors(
    root: Path, step: int, tensors: Mapping[str, Tensor], meta: dict[str, Any], retention: Retention | None = None
) -> Path:
    """Writes a checkpoint of whole tensors, which are finite, from one process. Returns its path. Raises RunError."""
    save = Save.begin(root, step, 1, sum(tensor.nbytes for tensor in tensors.values()))
    if save is None:
        return directory_of(root, step)
    try:
        save.write(0, whole_parts(tensors))
        return save.commit(meta, retention or Retention())
    except RunError:
        save.discard()
        raise


@contextmanager
def _failing(final: Path, where: str = "") -> Iterator[None]:
    """Turns a failure of the file system into a RunError that names the checkpoint."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"checkpoint {final} could not be written: {where}{error}; earlier checkpoints are untouched"
        ) from error


def _require_space(root: Path, need: int) -> None:
    free = shutil.disk_usage(root).free
    if free < need * 1.01 + 2**20:
        raise OSError(f"it needs {gib(need)}, and {root} has {gib(free)} free")
