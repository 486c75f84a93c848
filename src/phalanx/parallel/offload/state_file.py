"""Optimizer state in a file of a local disk: direct reads and writes, and a memory map for everything else.

The file has no name: it is unlinked as soon as it is open. So nothing can collide with it, nobody else can open it, and
the kernel frees its space when the process ends, however that happens. Updates bypass the page cache (O_DIRECT), where
the file system takes that: state that passes once per step would only displace what others use. Checkpoints, digests
and loading see the same bytes through the map; Linux keeps both coherent on local file systems.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import secrets
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import OffloadError
from phalanx.units import gib

ALIGNMENT = 4096
"""Bytes to which direct I/O aligns places in the file, lengths and memory."""


class StateFile:
    """A file of `size` bytes in a folder, whose space is reserved. Raises OffloadError."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, padded(max(1, size))
        path = folder / f".phalanx-{secrets.token_hex(8)}"
        with self._failing("made"):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._plain = os.open(path, flags, 0o600)
            weakref.finalize(self, os.close, self._plain)
            try:
                os.posix_fallocate(self._plain, 0, self.size)
                self._direct = _open_direct(path)
            finally:
                path.unlink()
            if self._direct is not None:
                weakref.finalize(self, os.close, self._direct)
            self._map = mmap.mmap(self._plain, self.size)
        self.mapped = torch.frombuffer(self._map, dtype=torch.uint8)
        """All bytes of the file (size,)."""
        _FILES[self.mapped.untyped_storage().data_ptr()] = self

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._direct is not None

    def read(self, into: Tensor, place: int) -> None:
        """Reads bytes from a place, a multiple of ALIGNMENT, as `into` is in length and address. Raises
        OffloadError."""
        view, done = into.numpy().data, 0
        with self._failing("read"):
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], place + done)
                if not count:
                    raise OSError(errno.EIO, f"it ends at byte {place + done:,} of {self.size:,}")
                done += count
            if self._direct is None:
                os.posix_fadvise(self._plain, place, done, os.POSIX_FADV_DONTNEED)

    def write(self, source: Tensor, place: int) -> None:
        """Writes bytes to a place, aligned as for `read`. Raises OffloadError."""
        view, done = source.numpy().data, 0
        with self._failing("written"):
            while done < len(view):
                done += os.pwritev(self._descriptor, [view[done:]], place + done)
            if self._direct is None:  # pages leave the cache only once they are on the disk
                os.fdatasync(self._plain)
                os.posix_fadvise(self._plain, place, done, os.POSIX_FADV_DONTNEED)

    def speed(self, buffer: Tensor) -> float:
        """Returns the bytes per second of writing the buffer to the file's beginning and reading it back, which
        overwrites what is there. Raises OffloadError."""
        size = min(len(buffer), self.size)
        began = time.perf_counter()
        self.write(buffer[:size], 0)
        self.read(buffer[:size], 0)
        return 2 * size / (time.perf_counter() - began)

    def will_read(self, place: int, size: int) -> None:
        """Begins to read bytes into the page cache, for someone who is about to read them through the map."""
        with suppress(OSError):
            os.posix_fadvise(self._plain, place, size, os.POSIX_FADV_WILLNEED)

    @property
    def _descriptor(self) -> int:
        return self._plain if self._direct is None else self._direct

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        """Turns a failure of the file system into an OffloadError."""
        try:
            yield
        except OSError as error:
            raise OffloadError(
                f"optimizer state in {self.folder} on {platform.node()} ({gib(self.size)}, layout.offload_to) cannot "
                f"be {action}: {error.strerror or error}. Checkpoints are whole: once the disk works, or with another "
                "folder or offload_to=cpu, the same command resumes from the newest"
            ) from error


_FILES: weakref.WeakValueDictionary[int, StateFile] = weakref.WeakValueDictionary()
"""By the address of their maps, the files of this process."""


def file_of(storage: torch.UntypedStorage) -> StateFile | None:
    """Returns the file that a storage maps; None for memory."""
    return _FILES.get(storage.data_ptr()) if _FILES else None


def will_read(tensor: Tensor) -> None:
    """Begins to read a tensor that maps a file; does nothing for others."""
    if file := file_of(tensor.untyped_storage()):
        file.will_read(int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes)


def padded(size: int) -> int:
    """Returns a number of bytes, rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _open_direct(path: Path) -> int | None:
    """Opens a file for direct I/O. Returns None if the file system does not take it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    with mmap.mmap(-1, ALIGNMENT) as page:
        try:
            os.preadv(descriptor, [page], 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.EINVAL:  # some refuse at the first read, or need a larger alignment
                return None
            raise
    return descriptor
