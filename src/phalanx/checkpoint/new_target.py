"""A new file or folder that is written under a temporary name beside its own, and renamed once it is on the disk; and
a run's directory that holds one checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from phalanx.check.load import LoadedJob, as_yaml, origins_of
from phalanx.checkpoint import consolidated
from phalanx.checkpoint.consolidated import PlannedFile, plan
from phalanx.checkpoint.inventory import directory_of
from phalanx.checkpoint.manifest import MANIFEST, Box, Manifest, ShardFile, StoredTensor
from phalanx.checkpoint.parts import is_finite
from phalanx.checkpoint.save import LATEST
from phalanx.config.job import Job
from phalanx.data.files import sync, write_atomic
from phalanx.errors import CheckpointError, RunError
from phalanx.units import gib

MOST_FILE_BYTES = 5 * 2**30
_MARGIN_BYTES = 4 * 2**20


@dataclass(frozen=True)
class WrittenFiles:
    """The result of a conversion or an export."""

    target: Path
    step: int
    tensors: int
    bytes: int
    """Bytes of the tensors."""
    files: dict[str, int]
    """The bytes of every file."""
    notes: tuple[str, ...]
    """Remarks for the user."""


@dataclass
class NewTarget:
    """A target while it is being written."""

    directory: Path
    """The temporary directory."""
    product: Path
    """The path that is renamed at the end: the directory, or something in it."""


@contextlib.contextmanager
def written_beside(target: Path, need: int) -> Iterator[NewTarget]:
    """Provides a temporary directory, whose product becomes `target` at the end of the `with` block. Whatever ends the
    block before that leaves nothing, SIGTERM and SIGHUP too; what SIGKILL left is removed by the next attempt. Folders
    above `target` are made. Raises RunError if there is not enough space for `need` bytes, or if the file system
    fails."""
    temporary = f".{target.name}.tmp-"
    _remove_abandoned(target.parent, temporary)
    _require_space(target, need)
    directory = target.with_name(f"{temporary}{secrets.token_hex(4)}")
    missing = [folder for folder in target.parents if not folder.exists()]
    new = NewTarget(directory, directory)
    try:
        with _exiting_on_signals():
            directory.mkdir(parents=True)
            with _locked(directory):
                yield new
                sync(directory)
                if os.path.lexists(target) and not is_empty_folder(target):
                    raise FileExistsError(17, "it has come into being meanwhile", str(target))
                new.product.rename(target)
                sync(target.parent)
    except OSError as error:
        raise RunError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for folder in missing:
            with contextlib.suppress(OSError):  # it holds the product
                folder.rmdir()


@contextlib.contextmanager
def _exiting_on_signals() -> Iterator[None]:
    """Makes signals that would end the process at once raise SystemExit instead, so that `finally` clauses run. In
    threads other than the main one, which cannot set handlers, it does nothing."""
    signals = [signal.SIGTERM, signal.SIGHUP] if threading.current_thread() is threading.main_thread() else []
    unset = [each for each in signals if signal.getsignal(each) is signal.SIG_DFL]  # nohup ignores SIGHUP: left alone
    for each in unset:
        signal.signal(each, _exit)
    try:
        yield
    finally:
        for each in unset:
            signal.signal(each, signal.SIG_DFL)


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Locks a directory against other processes until the end of the `with` block. Yields whether it could: not if
    another process holds the lock, or if the file system has none. Raises OSError if the directory cannot be opened."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        locked = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path, temporary: str) -> None:
    """Removes the temporary directories of processes that were killed."""
    for directory in folder.glob(f"{glob.escape(temporary)}*"):
        with contextlib.suppress(OSError), _locked(directory) as abandoned:
            if abandoned:
                shutil.rmtree(directory, ignore_errors=True)


def is_empty_folder(path: Path) -> bool:
    """Returns whether `path` is a folder, and no link to one, without entries."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def target_problems(target: Path) -> Iterator[str]:
    """Yields why nothing new can be written at `target`."""
    if os.path.lexists(target):
        yield f"{target} exists, and nothing is overwritten: name another target, or remove it"
    else:
        yield from parent_problems(target)


def parent_problems(target: Path) -> Iterator[str]:
    """Yields why the folders above `target` cannot be made."""
    if not (existing := _existing_parent(target)).is_dir():
        yield f"{target}: {existing} is no folder; name another target"


def write_run(
    directory: Path,
    target: Path,
    manifest: Manifest,
    job: Job,
    tensors: Mapping[str, StoredTensor],
    read: Callable[[str], Tensor],
    progress: Callable[[int], None],
    *,
    origin: str,
    most_bytes: float = MOST_FILE_BYTES,
) -> None:
    """Writes a run with one checkpoint to `directory`, which is to become `target`: config.yaml, `latest`, shard files
    and their manifest.

    Args:
        manifest: has the step and the metadata.
        tensors: in the types to be written; `read` returns one of them at a time.
        origin: where the values of config.yaml come from.

    Raises CheckpointError for a tensor with NaN or infinity, OSError."""

    def finite(name: str) -> Tensor:
        tensor = read(name)
        if not is_finite(tensor):
            raise CheckpointError(f"{manifest.path}: {name} holds NaN or infinity, and no checkpoint may")
        return tensor

    checkpoint = directory_of(directory / "checkpoints", manifest.step)
    checkpoint.mkdir(parents=True)
    planned = plan(tensors, most_bytes, lambda number, _: f"rank-{number - 1:05d}.safetensors")
    shards = consolidated.write(checkpoint, planned, finite, None, progress)
    written = manifest_of(checkpoint, planned, shards, manifest.step, manifest.meta)
    write_atomic(checkpoint / MANIFEST, written.text().encode())
    sync(checkpoint.parent)
    run = dataclasses.replace(job.run, dir=str(target.parent), name=target.name)
    job = dataclasses.replace(job, run=run)
    text = as_yaml(LoadedJob(job, origins_of(job, origin)))
    write_atomic(directory / "config.yaml", text.encode())
    write_atomic(directory / LATEST, f"checkpoints/{checkpoint.name}\n".encode())


def manifest_of(
    path: Path, planned: list[PlannedFile], shards: dict[str, ShardFile], step: int, meta: dict[str, Any]
) -> Manifest:
    """Returns the manifest of consolidated files."""
    tensors = {
        name: dataclasses.replace(tensor, boxes=((file.name, Box.of(tensor.shape)),))
        for file in planned
        for name, tensor in file.tensors.items()
    }
    return Manifest(path, step, True, meta, shards, tensors)


def _require_space(target: Path, need: int) -> None:
    existing = _existing_parent(target)
    free, needed = shutil.disk_usage(existing).free, round(need * 1.01) + _MARGIN_BYTES
    if free < needed:
        raise RunError(
            f"{target} could not be written: it needs {gib(needed)}, and {existing} has {gib(free)} free; nothing "
            "was written: free some space, or name another folder"
        )


def _existing_parent(target: Path) -> Path:
    return next(folder for folder in target.parents if os.path.lexists(folder))
