"""Atomic file writes, files opened without following links, and a lock between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import RunError

TEMPORARY = ".tmp"
"""Suffix of files being written; a leftover belongs to a killed process."""


def open_regular(path: Path, flags: int) -> int:
    """Opens a regular file with `flags` of os.open and returns its descriptor. A new one has the mode that the umask
    allows, but is never written by everybody.

    Raises RunError if the path is a link, a FIFO or a device: whoever can create names in a shared folder could make a
    program write to any file of its user, or wait for ever. Raises OSError as os.open does.
    """
    try:
        # O_NONBLOCK: a FIFO without a reader must not block; regular files ignore it.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o664)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise RunError(_not_regular(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunError(_not_regular(path))
    return descriptor


def _not_regular(path: Path) -> str:
    kind = "a link" if path.is_symlink() else "not a regular file"
    return f"{path} is {kind}, and nothing is written through it; remove it"


def write_atomic(path: Path, content: bytes) -> None:
    """Writes `content` so that `path` holds either its old content or all of the new one, even after a crash. The file
    is a new one, as readable as the umask lets it be; a link at `path` is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # of a killed process with the same number
    try:
        with open(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut
    finally:
        os.close(folder)


@contextmanager
def locked(path: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Holds an exclusive lock on `path`; calls `waiting(holder's pid)` once if another process holds it.

    The kernel releases the lock when its holder dies, so a leftover lock file blocks nobody.
    """
    with path.open("a+", encoding="ascii", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            waiting(file.read(100).strip())
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
