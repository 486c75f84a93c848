"""Writing a checkpoint: each rank writes its parts, then rank 0 commits them all.

Nothing here communicates except through the directory, so that threads may do it while training goes on
(`checkpoint/writer.py`): ranks tell rank 0 that they have written, or failed, by a file. The order on the disk:

1. Rank 0 creates the directory `.step-NNNNNN.tmp-TOKEN`.
2. Each rank writes rank-NNNNN.safetensors there, waits until it is on the disk, and then writes rank-NNNNN.json with
   its size, digest and boxes.
3. Rank 0 writes manifest.json from those reports, waits until manifest and directory are on the disk, renames the
   directory to step-NNNNNN, waits for its parent, and replaces the run's `latest`.

Whenever a machine dies, every directory named step-NNNNNN is whole, and `latest` names one of them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from phalanx.checkpoint import shard_file
from phalanx.checkpoint.inventory import (
    DAMAGED,
    REMOVED,
    Retention,
    by_age,
    check,
    directory_of,
    remove_expired,
    remove_leftovers,
    rename,
    set_aside,
    space_for,
)
from phalanx.checkpoint.manifest import MANIFEST, Box, Manifest, ShardFile, StoredTensor
from phalanx.checkpoint.parts import Part
from phalanx.data.files import TEMPORARY, stripe, write_atomic
from phalanx.errors import CheckpointError, NotFiniteError, PhalanxError, RunError
from phalanx.launch import logs
from phalanx.units import gib

_FAILED = "failed-"


class Reports:
    """The reports of `ranks` ranks in a directory. Methods raise OSError unless they say otherwise."""

    def __init__(self, directory: Path, ranks: int):
        self.directory, self.ranks = directory, ranks

    def write(self, rank: int, content: Mapping[str, Any]) -> None:
        """Tells rank 0 that a rank has done its work."""
        _write_visibly(self.path(rank), json.dumps(content).encode())

    def read(self, rank: int) -> Mapping[str, Any]:
        """Returns what a rank has told."""
        return json.loads(self.path(rank).read_text(encoding="utf-8"))

    def missing(self) -> list[int]:
        """Returns the ranks that have not finished, as far as this machine sees."""
        return [rank for rank in range(self.ranks) if not self.path(rank).is_file()]

    def fail(self, rank: int, error: PhalanxError) -> None:
        """Tells rank 0 why a rank failed, as far as the file system allows. Raises nothing."""
        with contextlib.suppress(OSError):
            content = json.dumps({"error": type(error).__name__, "message": str(error)})
            _write_visibly(self.directory / f"{_FAILED}{rank:05d}", content.encode())

    def failure(self) -> PhalanxError | None:
        """Returns the error of the first rank that failed."""
        failed = min(self.directory.glob(f"{_FAILED}*"), default=None)
        if failed is None:
            return None
        found = json.loads(failed.read_text(encoding="utf-8"))
        kind = NotFiniteError if found["error"] == "NotFiniteError" else RunError
        return kind(found["message"])

    def path(self, rank: int) -> Path:
        """Returns the file of a rank's report."""
        return self.directory / f"rank-{rank:05d}.json"


def _write_visibly(path: Path, content: bytes) -> None:
    """Writes a message to rank 0, whole or not at all. It need not survive a power cut: then there is no rank 0."""
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    temporary.write_bytes(content)
    temporary.replace(path)


log = logging.getLogger(__name__)
_log_once = cache(log.info)

LATEST = "latest"
KEEP_ALL = Retention()
MAKE_ROOM = "free some space, lower checkpoint.keep, or choose another run.dir"
_MODE = 0o775  # less what the umask takes: colleagues may read, and not everybody may write


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
    def named(cls, root: Path, step: int, ranks: int, token: str) -> Save:
        """Returns the save whose directory all ranks know by a token that they have agreed on."""
        return cls(root, step, root / f".{directory_of(root, step).name}.tmp-{token}", ranks)

    @classmethod
    def begin(
        cls,
        root: Path,
        step: int,
        ranks: int,
        need: int,
        token: str = "",
        retention: Retention = KEEP_ALL,
        stripes: int | Literal["auto"] = "auto",
    ) -> Save | None:
        """Prepares the temporary directory, on rank 0, for a state of `need` bytes, on Lustre with files of so many
        `stripes`. Returns None if the checkpoint of this step exists and is whole; a damaged one is renamed first.

        One save at a time works in `root`: remains of interrupted ones are deleted. Raises RunError if there is too
        little space, the directory cannot be written, or a later attempt has taken over the run; warns if there is too
        little for all that `retention` keeps."""
        final = directory_of(root, step)
        save = cls.named(root, step, ranks, token or secrets.token_hex(4))
        with _failing(final):
            logs.check(root.parent)
            root.mkdir(_MODE, parents=True, exist_ok=True)
            remove_leftovers(root)
            if final.exists():
                try:
                    check(final)
                except CheckpointError:
                    set_aside(final, DAMAGED)
                else:
                    return None
            _require_space(root, need, retention)
            save.directory.mkdir(_MODE)
        if message := stripe(save.directory, stripes, ranks, need):
            _log_once(message.replace(str(save.directory), str(root)))
        return save

    @property
    def final(self) -> Path:
        return directory_of(self.root, self.step)

    @property
    def reports(self) -> Reports:
        return Reports(self.directory, self.ranks)

    def write(
        self,
        rank: int,
        parts: Iterable[Part],
        progress: Callable[[], None] = lambda: None,
        check: Callable[[Part], None] = lambda part: None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes this rank's parts and then its report, with `meta` if it is given; calls `check` before a part's
        elements are read, which may wait or raise, and `progress` after every chunk. Raises RunError, with the rank and
        its host."""
        by_key: dict[str, Part] = {}
        boxes: dict[str, list[Any]] = {}
        for part in parts:
            by_key[part.box.key(part.tensor, part.shape)] = part
            dtype = shard_file.DTYPES[part.value.dtype]
            boxes.setdefault(part.tensor, [part.shape, dtype]).append((part.box.offsets, part.box.sizes))
        tensors = {key: part.value for key, part in by_key.items()}
        size = gib(sum(tensor.nbytes for tensor in tensors.values()))
        with _failing(self.final, f"rank {rank} on {platform.node()}, which writes {size}: "):
            if not self.directory.is_dir():
                raise OSError(
                    f"{self.directory} is not there; all ranks need the same directory, on storage they share"
                )
            written = {}
            if tensors:
                file = self._shard(rank)
                facts = shard_file.write(file, tensors, progress, lambda key: check(by_key[key]))
                written = {"file": file.name, "bytes": facts.bytes, "xxh3_128": facts.digest}
            stated = {"meta": meta} if meta is not None else {}
            self.reports.write(rank, {**written, **stated, "tensors": boxes})

    def missing(self) -> list[int]:
        """Returns the ranks that have not finished writing, as far as this machine sees."""
        return self.reports.missing()

    def fail(self, rank: int, error: PhalanxError) -> None:
        """Tells rank 0 why a rank failed to write, as far as the file system allows."""
        with contextlib.suppress(OSError):
            self._shard(rank).unlink(missing_ok=True)  # on a full disk it makes room for the message
        self.reports.fail(rank, error)

    def failure(self) -> PhalanxError | None:
        """Returns the error of the first rank that failed to write. Raises RunError if the directory cannot be read."""
        with _failing(self.final):
            return self.reports.failure()

    def bytes_seen(self) -> int:
        """Returns the bytes that all ranks have written so far, as far as this machine sees. Raises RunError."""
        with _failing(self.final), os.scandir(self.directory) as entries:
            return sum(entry.stat().st_size for entry in entries if not entry.name.endswith(TEMPORARY))

    def commit(
        self, meta: dict[str, Any], retention: Retention, still_wanted: Callable[[], bool] = lambda: True
    ) -> Path:
        """Makes the checkpoint valid, on rank 0, after all ranks have written; moves `latest`; removes old checkpoints.
        Returns its path. `still_wanted` is asked last of all. Raises RunError."""
        with _failing(self.final):
            if missing := self.missing():
                raise OSError(
                    f"rank {', '.join(map(str, missing))} wrote its part, but rank 0 does not see it in "
                    f"{self.directory}; all ranks need the same directory, on storage they share"
                )
            manifest = self._manifest(meta)
            for rank in range(self.ranks):
                self.reports.path(rank).unlink()
            write_atomic(self.directory / MANIFEST, manifest.text().encode())
            if not still_wanted():
                raise OSError("it was given up")
        return self.publish(retention)

    def publish(self, retention: Retention) -> Path:
        """Gives the directory, which is complete, its final name; moves `latest`; removes old checkpoints. Returns the
        checkpoint's path. Raises RunError."""
        with _failing(self.final):
            logs.check(self.root.parent)
            rename(self.directory, self.final)
        try:
            write_atomic(self.root.parent / LATEST, f"{self.root.name}/{self.final.name}\n".encode())
        except OSError as error:
            log.warning(
                "checkpoint %s is whole, but the pointer %s could not be moved to it: %s; resuming does not need it",
                self.final,
                self.root.parent / LATEST,
                error,
            )
        remove_expired(self.root, retention)
        return self.final

    def discard(self) -> None:
        """Deletes what was written of a checkpoint that failed, on rank 0. Ranks that still write find no directory."""
        hidden = self.directory.with_name(f"{REMOVED}{self.directory.name}")
        with contextlib.suppress(OSError):
            self.directory.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _shard(self, rank: int) -> Path:
        return self.directory / f"rank-{rank:05d}.safetensors"

    def _manifest(self, meta: dict[str, Any]) -> Manifest:
        """Returns the manifest of all ranks' parts. Raises OSError if they are not every element once."""
        manifest = manifest_of_reports(self.final, self.step, map(self.reports.read, range(self.ranks)), meta)
        for name, file in manifest.files.items():
            if (size := (self.directory / name).stat().st_size) != file.bytes:
                raise OSError(f"a rank wrote {file.bytes} bytes to {name}, rank 0 sees {size}")
        if wrong := [name for name, tensor in manifest.tensors.items() if not tensor.complete]:
            raise OSError(f"the ranks' parts are not every element once of {', '.join(wrong)}: a bug")
        return manifest


def manifest_of_reports(path: Path, step: int, reports: Iterable[Mapping[str, Any]], meta: dict[str, Any]) -> Manifest:
    """Returns the manifest of all ranks' reports, in the order of the ranks. Whether it is complete is not checked."""
    shards: dict[str, ShardFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for report in reports:
        if name := report.get("file", ""):
            shards[name] = ShardFile(report["bytes"], report["xxh3_128"])
        for tensor, (shape, dtype, *boxes) in report["tensors"].items():
            found = tuple((name, Box(tuple(offsets), tuple(sizes))) for offsets, sizes in boxes)
            before = tensors[tensor].boxes if tensor in tensors else ()
            tensors[tensor] = StoredTensor(tuple(shape), dtype, before + found)
    return Manifest(path, step, True, meta, shards, tensors)


class _TooLittleSpaceError(OSError):
    """The checkpoint would not fit; nothing was written."""


@contextmanager
def _failing(final: Path, where: str = "") -> Iterator[None]:
    """Turns a failure of the file system into a RunError that names the checkpoint."""
    try:
        yield
    except OSError as error:
        free, advice = "", ""
        if isinstance(error, _TooLittleSpaceError) or error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f": {MAKE_ROOM}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                free = f" ({gib(shutil.disk_usage(final.parent).free)} are free)"
        raise RunError(
            f"checkpoint {final} could not be written: {where}{error}{free}; earlier checkpoints are untouched{advice}"
        ) from error


def _require_space(root: Path, need: int, retention: Retention) -> None:
    """Raises OSError if a checkpoint of `need` bytes does not fit. Warns if it is the first one, and those kept at the
    same time will not fit: the `keep` newest, and the next one while it is written."""
    free = shutil.disk_usage(root).free
    if free < space_for(need):
        raise _TooLittleSpaceError(f"it needs {gib(need)}, and {root} has {gib(free)} free")
    kept = retention.keep + 1
    if retention.keep and free < space_for(need, kept) and not by_age(root):
        log.warning(
            "checkpoints: %s has %s free, and checkpoint.keep=%d needs %s: %d × %s, the next one while it is written "
            "included; %s",
            *(root, gib(free), retention.keep, gib(kept * need), kept, gib(need), MAKE_ROOM),
        )
