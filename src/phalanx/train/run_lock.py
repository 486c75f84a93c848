"""The lock of a run directory: one trainer at a time, whatever the filesystem and the host.

The lock is the kernel's (flock) on the file .lock: it ends with its holder, however that ends. The content of the file
names the holder, and its modification time is the holder's heartbeat: they take the place of flock where it does not
exist or does not reach other hosts (NFS with local locks).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.data.files import open_regular
from phalanx.errors import RunError
from phalanx.launch.lifeline import process_state

LOCK = ".lock"
HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of a holder."""
SILENCE_S = 3 * HEARTBEAT_S
"""Seconds without a heartbeat after which a holder on another host counts as gone."""
SETTLE_S = 2.0
"""Where flock cannot be relied on: seconds after which the file must still name the process that wrote its name."""
_NAMING_S = 1.0  # the holder writes its name right after it has the lock
_POLL_S = 0.05
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass(frozen=True)
class Holder:
    """A process that uses a run directory, as its .lock names it."""

    host: str
    pid: int
    since: str
    """Local time at which it took the lock."""
    ticks: int
    """When the process started, in clock ticks since its host's boot: tells it from a later one with the same pid."""

    @classmethod
    def this_process(cls) -> Holder:
        """Returns this process as a holder."""
        return cls(platform.node(), os.getpid(), time.strftime("%Y-%m-%dT%H:%M:%S%z"), _start_of(os.getpid()))

    @classmethod
    def read(cls, descriptor: int) -> Holder | None:
        """Returns the holder that an open lock file names, or None if it names none."""
        try:
            found = json.loads(os.pread(descriptor, 4096, 0))
            return cls(str(found["host"]), int(found["pid"]), str(found["since"]), int(found["ticks"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def write(self, descriptor: int) -> None:
        """Writes the holder to an open lock file."""
        content = json.dumps(asdict(self)).encode()
        os.ftruncate(descriptor, os.pwrite(descriptor, content, 0))

    @property
    def is_here(self) -> bool:
        """True if it was started on this host."""
        return self.host == platform.node()

    @property
    def is_gone(self) -> bool:
        """True if it was started on this host and has ended."""
        return self.is_here and _start_of(self.pid) != self.ticks

    def __str__(self) -> str:
        host, since = (ascii(text)[1:-1][:100] for text in (self.host, self.since))  # whoever wrote them
        return f"process {self.pid} on {host} since {since}"


@contextmanager
def locked(directory: Path, *, fresh: bool = False) -> Iterator[Path | None]:
    """Holds the lock of a run directory, which is created if it does not exist. With `fresh` the directory is new: one
    that holds anything is renamed to NAME.1, NAME.2, ... and that path is yielded (otherwise None).

    A directory that was created and in which nothing was written is removed again, as after a mistyped data.path.

    The rename happens under the old directory's lock, and the new directory appears with its own lock held already: at
    no instant can another trainer enter either of them.

    Raises RunError that names the holder if another process uses the directory, OSError if it cannot be written.
    """
    is_new = not os.path.lexists(directory)
    descriptor, renamed = _take(directory), None
    try:
        while fresh and os.listdir(directory) != [LOCK]:
            descriptor, renamed = _start_over(directory, descriptor)
        with _heartbeat(descriptor):
            yield renamed
    finally:
        with suppress(OSError):  # whoever waits for this lock finds out, as after a rename
            if is_new and os.listdir(directory) == [LOCK] and _is_at(directory / LOCK, descriptor):
                os.unlink(directory / LOCK)
                os.rmdir(directory)
        _release(descriptor)


def _take(directory: Path) -> int:
    """Locks the directory's lock file and returns its descriptor."""
    while True:
        _make(directory)
        try:
            descriptor = open_regular(directory / LOCK, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            continue  # the directory was renamed just now
        try:
            _lock(descriptor, directory)
            if _is_at(directory / LOCK, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        _release(descriptor)  # it is the lock of a directory that was renamed in the meantime


def _make(directory: Path) -> None:
    """Creates the directory if it does not exist, also while another process renames it.

    `mkdir` with `exist_ok` fails if the directory is there when it is created and gone when it is looked at.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        with suppress(FileNotFoundError):  # renamed: whoever opens the lock file finds out and comes back
            if not stat.S_ISDIR(directory.lstat().st_mode):
                raise


def _lock(descriptor: int, directory: Path) -> None:
    """Locks the open lock file and writes this process into it. Raises RunError if another process holds it."""
    trusted = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(directory, _named(descriptor)) from None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        trusted = False
    last, me = Holder.read(descriptor), Holder.this_process()
    if last and last.is_here and not trusted and not last.is_gone:
        raise _in_use(directory, last)
    if last and not last.is_here:
        # It did not end cleanly, or the lock does not reach its host.
        if _beats(directory / LOCK):
            raise _in_use(directory, last)
        trusted = False
    me.write(descriptor)
    if not trusted:
        # Another process may have written its name at the same time: the last of them has the lock (M. Fischer's
        # algorithm, in Lamport, "A fast mutual exclusion algorithm", 1987).
        time.sleep(SETTLE_S)
        winner = _holder_at(directory / LOCK)
        if winner and winner != me:
            raise _in_use(directory, winner)


def _start_over(directory: Path, old: int) -> tuple[int, Path]:
    """Renames the directory, whose lock is `old`, and puts an empty one in its place. Returns the new lock's descriptor
    and the path of the renamed directory."""
    empty = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
    new, renamed = _take(empty), None
    try:
        renamed = _rename(directory)
        # If another process has made an empty directory in the meantime, this replaces it, and it finds our lock there.
        empty.rename(directory)
    except OSError:
        _release(new)
        (empty / LOCK).unlink()
        empty.rmdir()
        if renamed is None:
            raise
        try:
            new = _take(directory)
        except RunError as error:
            raise RunError(f"{error}; the run that was there before is now {renamed}") from None
    _release(old)
    return new, renamed


def _rename(directory: Path) -> Path:
    """Renames a directory to NAME.1, NAME.2, ...: starting over deletes nothing."""
    number = 1
    while os.path.lexists(renamed := directory.with_name(f"{directory.name}.{number}")):
        number += 1
    return directory.rename(renamed)


def _release(descriptor: int) -> None:
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


@contextmanager
def _heartbeat(descriptor: int) -> Iterator[None]:
    """Renews the modification time of the open lock file inside the `with` block."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_S):
            with suppress(OSError):
                os.utime(descriptor)

    thread = threading.Thread(target=beat, name="phalanx-run-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)


def _beats(path: Path) -> bool:
    """Returns whether a lock file's heartbeat is seen within SILENCE_S. Clocks of hosts are not compared."""
    first, end = _modified(path), time.monotonic() + SILENCE_S
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        if _modified(path) != first:
            return True
    return False


def _modified(path: Path) -> int:
    """Returns the modification time in ns. The file is opened for it: NFS then asks the server."""
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _holder_at(path: Path) -> Holder | None:
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        return Holder.read(descriptor)
    finally:
        os.close(descriptor)


def _named(descriptor: int) -> Holder | None:
    """Returns the holder of a lock that is held; waits a moment for one that has not written its name yet."""
    end = time.monotonic() + _NAMING_S
    while ((holder := Holder.read(descriptor)) is None or holder.is_gone) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return holder


def _in_use(directory: Path, holder: Holder | None) -> RunError:
    elsewhere = f"; if it ended without a trace, delete {directory / LOCK}" if holder and not holder.is_here else ""
    return RunError(
        f"{directory} is in use by {holder or 'another process'}; wait for it, or choose another run.name{elsewhere}"
    )


def _is_at(path: Path, descriptor: int) -> bool:
    """Returns whether `path` is the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _start_of(pid: int) -> int:
    """Returns when a process of this host started, in clock ticks since boot; -1 if it has ended."""
    process = process_state(pid)
    return -1 if process is None or process.state in "ZX" else process.start_ticks
