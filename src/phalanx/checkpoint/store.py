"""The objects below one prefix of an object store, through fsspec. Imports no torch.

An object appears whole or not at all, and one of them can be written only if it is absent: that is all that committing
a checkpoint needs (`checkpoint/remote.py`). On S3, Google Cloud Storage and Azure the store itself decides
("If-None-Match: *"); on a mounted file system a hard link does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from phalanx.checkpoint import files
from phalanx.data.files import open_regular
from phalanx.errors import JobError, PhalanxError, RunError
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
                files.sync(path)
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
    result: list[T] = []
    errors: list[BaseException] = []
    last = [time.monotonic()]

    def progress() -> None:
        last[0] = time.monotonic()

    def run() -> None:
        try:
            result.append(work(progress))
        except BaseException as error:  # raised again in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name=f"store {store}", daemon=True)
    thread.start()
    while thread.is_alive():
        heartbeat.beat()
        thread.join(_POLL_S)
        if time.monotonic() - last[0] > timeout_s and thread.is_alive():
            raise RunError(f"{store}: hangs: no progress for {timeout_s:g} s (checkpoint.timeout_s)")
    if errors:
        raise errors[0]
    return result[0]


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
    files.sync(target.parent)


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
    files.sync(path.parent)
