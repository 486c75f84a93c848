"""Keeps a run's report.html up to date, on rank 0: a process of its own renews it while the run trains, and rank 0
itself writes it at the end. Training neither waits for it nor fails with it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

FIRST_S, EVERY_S = 20.0, 60.0
"""Seconds until the first report, and between two."""
SHARE = 50
"""A report that takes long is renewed less often: it has at most one second in so many."""
_LONGEST_S = 600.0


class RunReport:
    """The report of one run. A context manager around the run."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._renew, name="phalanx-report", daemon=True)

    def __enter__(self) -> RunReport:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._process:
            with suppress(OSError):
                self._process.kill()
        from phalanx.report.write import write_report

        try:
            write_report(self.directory)
        except Exception as error:  # what only describes a run must never end it
            log.warning("report: %s was not written: %s: %s", self.directory, type(error).__name__, error)

    def _renew(self) -> None:
        pause = FIRST_S
        while not self._ended.wait(pause):
            began = time.monotonic()
            try:
                self._process = _start(self.directory)
                self._process.wait(_LONGEST_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                log.warning("report: it is not renewed before the end of the run: %s", error)
                return
            finally:
                if self._process and self._process.poll() is None:
                    self._process.kill()
            pause = max(EVERY_S, SHARE * (time.monotonic() - began))


def _start(directory: Path) -> subprocess.Popen[bytes]:
    """Starts the process that writes the report once, with the lowest priority, in a session of its own: Ctrl-C is for
    the trainer."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx.report.write", str(directory.absolute())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
