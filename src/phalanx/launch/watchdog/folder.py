"""The private folder of a launch, in memory where the machine has such a file system.

Heartbeats are stored into mapped files. On a disk, a store can wait while the kernel writes the page back, and a
checkpoint keeps the disk busy for long; /dev/shm is never written back.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "phalanx_launch_"

_IN_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 64 * 2**20
_LOCK = "lock"
_UNLOCKED_S = 300.0  # from a folder's creation to its lock, at most


@contextmanager
def private_folder() -> Iterator[Path]:
    """Provides an empty folder of mode 0700, which is removed afterwards."""
    folder = new_folder()
    try:
        with owned(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_folder() -> Path:
    """Creates an empty folder of mode 0700; its owner should soon hold it by `owned`. Folders whose owners were killed
    are removed."""
    root = _IN_MEMORY if _has_room(_IN_MEMORY) else None
    if root is not None:
        _remove_leftovers(root)
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Holds a folder, so that it does not count as left over. The kernel ends that with the process."""
    with (folder / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _has_room(root: Path) -> bool:
    try:
        space = os.statvfs(root)
    except OSError:
        return False
    return os.access(root, os.W_OK | os.X_OK) and space.f_bavail * space.f_frsize > _ROOM_BYTES


def _remove_leftovers(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid() and _is_left_over(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left_over(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _UNLOCKED_S
