"""Standard output and error that neither block nor end a run: what their reader does not take is dropped.

A terminal stopped with Ctrl-S, a pipe that nobody reads, a reader that has gone (`| head`) or a full disk would
otherwise stop rank 0 in the middle of a step, and with it every rank. The files of a run's logs keep every line.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

LIMIT = 1 << 18  # bytes that may wait for a slow reader
LINGER_S = 3.0  # seconds for which the end of a run waits for a slow reader
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)  # EIO: the terminal was closed


@contextmanager
def unblocked() -> Iterator[None]:
    """Replaces sys.stdout and sys.stderr by streams that never block and never fail, inside the `with` block.

    At the end of the block what still waits is written, for at most LINGER_S. An inner block does nothing. Streams
    without a file descriptor (of tests) stay as they are.
    """
    before = sys.stdout, sys.stderr
    if any(isinstance(stream, UnblockedStream) for stream in before):
        yield
        return
    outlets: dict[tuple[int, int, int], Outlet] = {}
    sys.stdout, sys.stderr = (_unblocked(stream, outlets) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        end = time.monotonic() + LINGER_S
        for outlet in outlets.values():
            outlet.close(end - time.monotonic())


def _unblocked(stream: TextIO, outlets: dict[tuple[int, int, int], Outlet]) -> TextIO:
    try:
        stream.flush()
        descriptor = stream.fileno()
        status = os.fstat(descriptor)
    except (OSError, ValueError, AttributeError):  # closed, or not a file
        return stream
    file = status.st_dev, status.st_ino, status.st_rdev
    if file not in outlets:  # two streams of one terminal share a queue: their lines keep their order
        outlets[file] = Outlet(descriptor, stat.S_ISREG(status.st_mode))
    return cast(TextIO, UnblockedStream(stream, outlets[file]))


class UnblockedStream(io.TextIOBase):
    def __init__(self, stream: TextIO, outlet: Outlet):
        self._stream, self._outlet = stream, outlet

    def write(self, text: str, /) -> int:
        self._outlet.put(text.encode(self.encoding, "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Does nothing: the outlet writes as soon as it can."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # pyrefly: ignore[bad-override]
        return self._stream.encoding or "utf-8"


class Outlet:
    """Writes to a file descriptor without ever blocking or failing its callers.

    A thread takes the bytes from a bounded queue. It is a daemon and calls os.write, which holds no lock of Python's:
    the process can end while it is blocked. A regular file needs no thread, and its lines survive a kill.
    """

    def __init__(self, descriptor: int, is_regular: bool = False, limit: int = LIMIT):
        self.lost = 0  # lines dropped since the last note about dropped lines
        # A descriptor of its own: the thread may outlast the caller's, whose number then means another file.
        self._descriptor, self._is_regular, self._limit = os.dup(descriptor), is_regular, limit
        self._queue: deque[bytes] = deque()
        self._waiting = 0  # bytes, with those that are being written
        self._ends_line = True
        self._dropping = self._torn = self._gone = self._closed = self._abandoned = False
        self._changed = threading.Condition()
        if not is_regular:
            threading.Thread(target=self._pump, name="phalanx-output", daemon=True).start()

    def put(self, data: bytes) -> None:
        """Writes the bytes soon, or drops them: too many are waiting, or the reader has gone."""
        if self._is_regular and not self._closed:
            self._write(data)
            return
        with self._changed:  # its lock is reentrant: signal handlers print, too
            if self._gone or self._closed or not data:
                return
            starts_line, self._ends_line = self._ends_line, data.endswith(b"\n")
            # Once it drops, it goes on with a whole line, when half the queue is free.
            limit = self._limit // 2 if self._dropping and starts_line else self._limit
            full = self._waiting + len(data) > limit
            self._torn |= full and not self._dropping and not starts_line
            self._dropping = full or (self._dropping and not starts_line)
            if self._dropping:
                self.lost += data.count(b"\n")
                return
            self._note_lost()
            self._append(data)

    def close(self, seconds: float) -> None:
        """Waits until all is written, for at most so many seconds; drops the rest."""
        with self._changed:
            self._note_lost()
            self._closed = True
            self._changed.notify_all()
            self._abandoned = not self._changed.wait_for(lambda: self._gone or not self._waiting, max(seconds, 0.0))
            self._queue.clear()
        if self._is_regular:
            os.close(self._descriptor)

    def _note_lost(self) -> None:
        if self.lost:
            note = f"phalanx: {self.lost:,} lines dropped here, which nobody read in time; the run's logs hold them\n"
            self._append(b"\n" * self._torn + note.encode())
            self.lost, self._torn = 0, False

    def _append(self, data: bytes) -> None:
        self._queue.append(data)
        self._waiting += len(data)
        self._changed.notify_all()

    def _pump(self) -> None:
        while not self._gone and (data := self._next()):
            has_reader = self._write(data)
            with self._changed:
                self._waiting -= len(data)
                self._gone = not has_reader
                self._changed.notify_all()
        os.close(self._descriptor)

    def _next(self) -> bytes:
        """Waits for bytes, and returns all there are; none after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            data = b"".join(self._queue)
            self._queue.clear()
            return data

    def _write(self, data: bytes) -> bool:
        """Writes the bytes, however long that takes, and returns whether there still is a reader. A full disk loses
        them."""
        left = memoryview(data)
        while left and not self._abandoned:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another program has set the terminal to O_NONBLOCK
                select.select([], [self._descriptor], [])
            except OSError as error:
                return error.errno not in _GONE
        return True
