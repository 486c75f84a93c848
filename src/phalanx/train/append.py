"""Files that a run appends lines to, and that never end it: while the disk is full, lines wait in memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from phalanx.data.files import open_regular

MOST_WAITING = 10_000
"""Lines that wait in memory for the disk; later ones are lost."""
_BLOCK = 1 << 16


class AppendedFile:
    """A text file, one line at a time, each written at once. A context manager.

    A line that cannot be written waits in memory and is tried again with the next one; the first failure, and the lines
    lost in the end, are reported. A last line that a killed process has left half-written is removed.
    Raises RunError if the path is a link or no regular file.
    """

    def __init__(self, path: Path, report: Callable[[str], None]):
        self.path, self.lost = path, 0
        self._report, self._failed = report, False
        self._descriptor = -1
        self._waiting: deque[bytes] = deque()
        self._write()

    def __enter__(self) -> AppendedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, line: str) -> None:
        """Appends a line, given without its newline."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(f"{line}\n".encode(errors="backslashreplace"))
        else:
            self.lost += 1
        self._write()

    def close(self) -> None:
        """Closes the file, after a last try to write the lines that wait."""
        self._write()
        self.lost += len(self._waiting)
        self._waiting.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self.lost:
            self._report(f"{self.path}: {self.lost:,} lines could not be written and are lost")

    def _write(self) -> None:
        try:
            if self._descriptor < 0:
                self._descriptor = open_regular(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
                _remove_half_line(self._descriptor)
            while self._waiting:
                written = os.write(self._descriptor, self._waiting[0])
                if rest := self._waiting[0][written:]:  # the disk became full within the line
                    self._waiting[0] = rest
                else:
                    self._waiting.popleft()
        except OSError as error:
            if not self._failed:
                self._report(
                    f"{self.path} cannot be written: {error.strerror}; training goes on, and its lines wait in memory"
                )
            self._failed = True
        else:
            if self._failed:
                self._report(f"{self.path} can be written again")
            self._failed = False


def _remove_half_line(descriptor: int) -> None:
    end = os.fstat(descriptor).st_size
    if not end or os.pread(descriptor, 1, end - 1) == b"\n":
        return
    while end:
        start = max(0, end - _BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            os.ftruncate(descriptor, start + newline + 1)
            return
        end = start
    os.ftruncate(descriptor, 0)
