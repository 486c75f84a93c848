"""Checkpoints of a run on an object store: which of them are committed, whole, and kept. Imports no torch.

    step-000100-TOKEN/rank-00000.safetensors ...    the files of a checkpoint, as they are on a disk
    step-000100-TOKEN/manifest.json
    step-000100.json                                the commit record: the folder, and whether it is whole

The commit record is written last, and only if there is none of this step (`ObjectStore.put_if_absent`). So exactly one
of several writers commits a step, and a folder that no record names is invisible, whatever it holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from phalanx.bounded import field, parse_json
from phalanx.checkpoint.inventory import Retention, WholeCheckpoint, name_of, val_loss_of
from phalanx.checkpoint.manifest import MANIFEST, Manifest
from phalanx.data.files import open_regular, sync
from phalanx.errors import CheckpointError, DamagedCheckpointError, JobError, PhalanxError, RunError
from phalanx.launch.watchdog import heartbeat

CHUNK_BYTES = 8 * 2**20
"""Bytes that are copied at a time to or from a mounted file system."""
_SHOWN = 300  # characters of a library's message
_POLL_S = 0.05

T = TypeVar("T")


class ObjectStore:
    """The objects below URL/FOLDER, by the rest of their names. Credentials come from the environment.

    Methods raise RunError, with the store and the reason, unless they say otherwise."""

    def __init__(self, url: str, folder: str):
        """Raises JobError if no installed library knows the URL."""
        self.url = f"{url.rstrip('/')}/{folder}"
        try:
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise JobError(
                f"checkpoint.remote: {url} needs a library that is not installed, or is no store: {error}; for S3: "
                "pip install 'phalanx[remote]'"
            ) from None
        except Exception as error:
            raise self._failure("cannot be opened", error) from None
        self.fs: Any = fs
        self.root = f"{root.rstrip('/')}/{folder}"
        self.mounted = _is_mounted(fs)

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Writes an object if there is none of its name. Returns whether it holds `content` now: a library may repeat
        a request whose answer was lost, and be refused by its own first one."""
        with self._failing(f"{name} could not be written"):
            try:
                if self.mounted:
                    _link(Path(self._path(name)), content)
                else:
                    self.fs.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return self._holds(name, content)
        return True

    def require_put_if_absent(self) -> None:
        """Raises JobError if the store lets a second writer replace an object that a first one has just committed."""
        name = f".probe-{secrets.token_hex(8)}"
        committed = self.put_if_absent(name, b"first")
        refused = committed and _is_conditional(self.fs) and not self.put_if_absent(name, b"second")
        self.remove([name])
        if not refused:
            raise JobError(
                f"checkpoint.remote: {self.url} cannot write an object only if it is absent, so two runs could both "
                "commit a checkpoint; S3, Google Cloud Storage, Azure and file:// can"
            )

    def read(self, name: str, most: int) -> bytes:
        """Returns an object of at most `most` bytes. Raises FileNotFoundError if there is none, ValueError if it is
        larger."""
        with self._failing(f"{name} could not be read", FileNotFoundError):
            content = self.fs.cat_file(self._path(name), start=0, end=most + 1)
        if len(content) > most:
            raise ValueError(f"it is larger than {most} bytes")
        return content

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of every object."""
        with self._failing("could not be listed"):
            self.fs.invalidate_cache()
            try:
                found = self.fs.find(self.root, detail=True)
            except FileNotFoundError:
                return {}
            return {path[len(self.root) + 1 :]: int(facts["size"]) for path, facts in found.items()}

    def upload(self, path: Path, name: str, progress: Callable[[], None]) -> None:
        """Copies a local file to an object; calls `progress`, which may raise, after every part."""
        with self._failing(f"{name} could not be written"):
            if self.mounted:
                Path(self._path(name)).parent.mkdir(parents=True, exist_ok=True)
                _copy(path, Path(self._path(name)), progress)
            else:
                self.fs.put_file(str(path), self._path(name), callback=_callback(progress))
        progress()

    def download(self, name: str, path: Path, progress: Callable[[], None]) -> None:
        """Copies an object to a new local file, durably; calls `progress` after every part. Raises FileNotFoundError if
        there is no such object."""
        with self._failing(f"{name} could not be read", FileNotFoundError):
            if self.mounted:
                _copy(Path(self._path(name)), path, progress)
            else:
                self.fs.get_file(self._path(name), str(path), callback=_callback(progress))
                sync(path)
        progress()

    def remove(self, names: Iterable[str]) -> None:
        """Deletes objects in this order; absent ones do not matter."""
        for name in names:
            with self._failing(f"{name} could not be deleted"), contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self._path(name))
                if self.mounted:
                    with contextlib.suppress(OSError):  # it still holds others
                        Path(self._path(name)).parent.rmdir()

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _holds(self, name: str, content: bytes) -> bool:
        try:
            return self.read(name, len(content)) == content
        except (FileNotFoundError, ValueError):
            return False

    @contextlib.contextmanager
    def _failing(self, what: str, *passed: type[Exception]) -> Iterator[None]:
        """Turns whatever a store's library raises, except `passed`, into a RunError."""
        try:
            yield
        except (PhalanxError, *passed):
            raise
        except Exception as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: Exception) -> RunError:
        return RunError(f"{self.url}: {what}: {type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}")


def with_patience(timeout_s: float, store: str, work: Callable[[Callable[[], None]], T]) -> T:
    """Calls `work(progress)` in a thread and returns its result, or raises its error. The process is shown to be alive
    meanwhile. Raises RunError if `progress` is not called for `timeout_s`; the thread is left alone."""
    outcome: Future[T] = Future()
    last = time.monotonic()

    def progress() -> None:
        nonlocal last
        last = time.monotonic()

    def run() -> None:
        try:
            outcome.set_result(work(progress))
        except BaseException as error:  # raised again in the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"store {store}", daemon=True).start()
    while not wait([outcome], _POLL_S).done:
        heartbeat.beat()
        if time.monotonic() - last > timeout_s:
            raise RunError(f"{store}: hangs: no progress for {timeout_s:g} s (checkpoint.timeout_s)")
    return outcome.result()


def _is_mounted(fs: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def _is_conditional(fs: Any) -> bool:
    """Returns whether a library leaves it to the store whether an object is absent: fsspec's own way is to look first,
    which two writers may do at the same time."""
    from fsspec.spec import AbstractFileSystem

    return _is_mounted(fs) or fs.async_impl or type(fs).pipe_file is not AbstractFileSystem.pipe_file


def _callback(progress: Callable[[], None]) -> Any:
    from fsspec.callbacks import Callback

    class Progress(Callback):
        def call(self, *_: Any, **__: Any) -> None:
            progress()

    return Progress()


def _copy(source: Path, target: Path, progress: Callable[[], None]) -> None:
    with open(source, "rb") as there, open(open_regular(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as here:
        while chunk := there.read(CHUNK_BYTES):
            here.write(chunk)
            progress()
        here.flush()
        os.fsync(here.fileno())
    sync(target.parent)


def _link(path: Path, content: bytes) -> None:
    """Makes a file with its whole content. Raises FileExistsError if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


FORMAT = "phalanx-remote-checkpoint"
VERSION = 1
_MOST_BYTES = 64 * 2**10
_RECORD = re.compile(r"step-([0-9]{6,12})\.json")
_FOLDER = re.compile(r"step-([0-9]{6,12})-[0-9a-f]{16}")


@dataclass(frozen=True)
class CommitRecord:
    """What makes a checkpoint on a store valid."""

    step: int
    folder: str
    objects: int
    """Objects in the folder."""
    bytes: int
    """Bytes of them together."""
    val_loss: float | None
    """The validation loss that was measured at this very step."""

    @classmethod
    def of(cls, manifest: Manifest, folder: str, manifest_bytes: int) -> CommitRecord:
        size = sum(file.bytes for file in manifest.files.values())
        loss = val_loss_of(manifest)
        return cls(manifest.step, folder, len(manifest.files) + 1, size + manifest_bytes, loss)

    @property
    def name(self) -> str:
        """The record's own object."""
        return f"{name_of(self.step)}.json"

    def text(self) -> bytes:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode()


class RemoteCheckpoints:
    """The checkpoints of one run on a store. Methods raise RunError if the store fails."""

    def __init__(self, store: ObjectStore):
        self.store = store

    @classmethod
    def of(cls, url: str, run: str) -> RemoteCheckpoints:
        """Returns the checkpoints of a run, below URL/RUN. Raises JobError if no installed library knows the URL."""
        return cls(ObjectStore(url, run))

    def steps(self) -> list[int]:
        """Returns the steps that have a commit record, the newest first."""
        return [step for step, _ in _records(self.store.sizes())]

    def newest(self, before: int | None, above: int, report: Callable[[str], None]) -> CommitRecord | None:
        """Returns the newest checkpoint above step `above` (if given, below `before`) of which all objects are there
        with their sizes, or None if there is none at all. Damaged ones are reported.

        Raises CheckpointError if there are some, and every one of them is damaged."""
        sizes, wrong = self.store.sizes(), ""
        for step, _ in _records(sizes):
            if step <= above or (before is not None and step >= before):
                continue
            try:
                return self.check(step, sizes)
            except CheckpointError as error:
                wrong = str(error)
                report(f"{error}; trying the one before it")
        if wrong:
            raise CheckpointError(f"no newer checkpoint in {self.store.url} is whole; the oldest: {wrong}")
        return None

    def find(self, step: int) -> CommitRecord | None:
        """Returns the checkpoint of a step, None if it was not committed. Raises DamagedCheckpointError."""
        sizes = self.store.sizes()
        return self.check(step, sizes) if f"{name_of(step)}.json" in sizes else None

    def check(self, step: int, sizes: Mapping[str, int]) -> CommitRecord:
        """Returns a committed checkpoint whose objects are all among `sizes`. Raises DamagedCheckpointError if they are
        not; CheckpointError if another version of the program wrote it."""
        where = f"checkpoint {self.store.url}/{name_of(step)}.json"
        try:
            record = _parse(self.store.read(f"{name_of(step)}.json", _MOST_BYTES), step)
        except (FileNotFoundError, ValueError) as error:
            raise DamagedCheckpointError(f"{where} is damaged: {error}") from None
        if (found := _contents(record.folder, sizes)) != (record.objects, record.bytes):
            raise DamagedCheckpointError(
                f"{where} has {record.objects} objects with {record.bytes} bytes; in {record.folder}/ are {found[0]} "
                f"with {found[1]}"
            )
        return record

    def commit(self, record: CommitRecord) -> bool:
        """Makes a checkpoint valid whose objects are all there. Returns False if the step has another one, and deletes
        the objects. A damaged one of this step gives way: should two writers find it, one of their checkpoints stays
        visible, which is whole. Raises DamagedCheckpointError if an object is not there."""
        sizes = self.store.sizes()
        if _contents(record.folder, sizes) != (record.objects, record.bytes):
            raise DamagedCheckpointError(f"{self.store.url}/{record.folder}/ does not hold what was written to it")
        if record.name in sizes:
            try:
                self.check(record.step, sizes)
            except DamagedCheckpointError:
                self.store.remove([record.name])
        if self.store.put_if_absent(record.name, record.text()):
            return True
        self.remove_folder(record.folder)
        return False

    def remove_folder(self, folder: str) -> None:
        """Deletes the objects of a checkpoint that has no commit record."""
        self.store.remove([name for name in self.store.sizes() if name.startswith(f"{folder}/")])

    def remove_expired(self, policy: Retention, progress: Callable[[], None] = lambda: None) -> None:
        """Deletes the checkpoints that `policy` does not keep, their records first; calls `progress` after each one.
        Folders without a record are treated as damaged checkpoints: one of an upload that goes on is newer than what
        is kept."""
        sizes = self.store.sizes()
        whole: list[WholeCheckpoint[list[str]]] = []
        damaged: list[tuple[int, list[str]]] = []
        folders: dict[str, list[str]] = {}
        for name in sizes:
            folder, slash, _ = name.partition("/")
            if slash and _FOLDER.fullmatch(folder):
                folders.setdefault(folder, []).append(name)
        for step, name in _records(sizes):
            try:
                record = self.check(step, sizes)
            except DamagedCheckpointError:
                damaged.append((step, [name]))  # its objects follow as a folder without a record
            else:
                whole.append(WholeCheckpoint([name, *folders.pop(record.folder)], step, record.val_loss))
        damaged += [(int(folder.split("-")[1]), names) for folder, names in folders.items()]
        for names in policy.expired(whole, damaged):
            for name in names:
                self.store.remove([name])
                progress()


def manifest_of(record: CommitRecord) -> str:
    """Returns the object with a checkpoint's manifest."""
    return f"{record.folder}/{MANIFEST}"


def folder_of(step: int, token: str) -> str:
    """Returns the folder of one attempt to upload a checkpoint, by a token of 16 hexadecimal digits."""
    return f"{name_of(step)}-{token}"


def _contents(folder: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Returns the number of objects in a folder, and their bytes."""
    found = [size for name, size in sizes.items() if name.startswith(f"{folder}/")]
    return len(found), sum(found)


def _records(sizes: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Yields step and name of the commit records, the newest first."""
    named = ((int(match[1]), name) for name in sizes if (match := _RECORD.fullmatch(name)))
    yield from sorted(((step, name) for step, name in named if name == f"{name_of(step)}.json"), reverse=True)


def _parse(content: bytes, step: int) -> CommitRecord:
    """Returns the record of a step. Raises ValueError; CheckpointError for one of another version of the program."""
    raw: Any = parse_json(content)
    if field(raw, "format", str) != FORMAT:
        raise ValueError("it is no commit record")
    if (version := field(raw, "version", int)) != VERSION:
        raise CheckpointError(f"the commit record of step {step} has version {version}; this program reads {VERSION}")
    folder = field(raw, "folder", str)
    match = _FOLDER.fullmatch(folder)
    if not match or int(match[1]) != step or field(raw, "step", int) != step:
        raise ValueError(f"it does not name a folder of step {step}")
    loss = None if raw.get("val_loss") is None else field(raw, "val_loss", float)
    return CommitRecord(step, folder, field(raw, "objects", int), field(raw, "bytes", int), loss)
