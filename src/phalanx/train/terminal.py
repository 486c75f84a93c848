"""Shows a run: the live view and log lines on a terminal, plain lines elsewhere, a copy in the rank's own log."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from phalanx.config.job import Job
from phalanx.echo import echo, shortened, visible, wrapped
from phalanx.errors import PhalanxError
from phalanx.launch.verdict import describe
from phalanx.launch.watchdog import heartbeat
from phalanx.report.live import LiveView, RunFollower, Screen
from phalanx.train.run_directory import AppendedFile

log = logging.getLogger(__name__)


COLOURS = {
    "step": "red",
    "loss": "green",
    "val_loss": "green",
    "grad_norm": "yellow",
    "memory": "turquoise2",
    "tps": "blue",
    "tps_total": "blue",
    "tflops": "cyan",
    "mfu": "magenta",
}
"""The colours of a step's line on a terminal, as in torchtitan."""
_PAIR = re.compile(r"(\w+): [^ ]+")
_EVERY_S = 1.0  # between two frames of the live view


class Terminal:
    """Standard error of a rank: on a terminal the live view of `job`, with the lines above it; elsewhere plain lines,
    which they are without a job, too. A context manager."""

    def __init__(self, job: Job | None = None):
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.job = job
        self.has_screen = job is not None and job.run.live and Screen(self.console).is_possible

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        heartbeat.screen(False)

    @contextlib.contextmanager
    def live(self, directory: Path) -> Iterator[None]:
        """Shows the live view of the run in `directory` for the length of a `with` block, if this terminal can."""
        if not self.has_screen:
            yield
            return
        try:
            follower = RunFollower(directory, self.job)
            follower.view()
        except (PhalanxError, OSError, ValueError) as error:
            log.warning("no live view: %s", error)
            yield
            return
        said = len(follower.nodes.messages)

        def view() -> LiveView:
            nonlocal said
            found, messages = follower.view(), follower.nodes.messages
            for _, line in messages[said:]:
                self.print(f"phalanx: {line}")  # the launcher leaves it to this rank
            said = len(messages)
            return found

        heartbeat.screen(True)
        try:
            with Screen(self.console).live(view, _EVERY_S, transient=True):
                yield
        finally:
            heartbeat.screen(False)

    def print(self, line: str) -> None:
        """Prints a line, above the live view."""
        line = visible(line)
        if not self.has_screen:
            self.console.print(line, markup=False)
            return
        text = Text(wrapped(line, self.console.width))
        if line.startswith("step: "):
            for pair in _PAIR.finditer(text.plain):
                if colour := COLOURS.get(pair[1]):
                    text.stylize(colour, *pair.span())
        self.console.print(text, soft_wrap=False)


class _AboveTheView(logging.Handler):
    def __init__(self, terminal: Terminal):
        super().__init__()
        self.terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self.terminal.print(self.format(record))


class _Visible(logging.Formatter):
    """A line of a log, which may hold names and messages from files."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(shortened(super().format(record)))


class _LogFile(logging.Handler):
    """A copy of the lines in a file; the terminal shows if it cannot be written."""

    def __init__(self, path: Path):
        super().__init__()
        self.file = AppendedFile(path, lambda message: echo(message, file=sys.stderr))

    def emit(self, record: logging.LogRecord) -> None:
        self.file.append(self.format(record))

    def close(self) -> None:
        self.file.close()
        super().close()


@contextlib.contextmanager
def logging_to(terminal: Terminal, level: str, rank: int, file: Path | None, shown: bool = True) -> Iterator[None]:
    """Sends the package's log lines to the terminal on rank 0, to standard error on the others, and rank 0's with their
    date to `file`. Other ranks have either a standard error of their own, which is `file`, or share one (file is None):
    then their lines have the rank in front, and unless they are `shown` only critical ones come there."""
    handler: logging.Handler = _AboveTheView(terminal) if rank == 0 else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible("%(message)s" if rank == 0 or file else f"[rank {rank}] %(message)s"))
    if rank and not file and not shown:
        handler.setLevel(logging.CRITICAL)
    logger = logging.getLogger("phalanx")
    logger.setLevel(level.upper())
    logger.propagate = False
    try:
        with _attached(handler), copied_to(file if rank == 0 else None):
            yield
    finally:
        logger.propagate = True


@contextlib.contextmanager
def copied_to(file: Path | None) -> Iterator[None]:
    """Appends the package's log lines with their date to a file; does nothing without one."""
    if file is None:
        yield
        return
    handler = _LogFile(file)
    handler.setFormatter(_Visible("%(asctime)s %(message)s"))
    with _attached(handler):
        yield


@contextlib.contextmanager
def error_copied_to(file: Path | None) -> Iterator[None]:
    """Appends the error that ends the `with` block to a file: of several ranks that fail only one prints why."""
    try:
        yield
    except Exception as error:
        if file:
            _, message, trace = describe(error)
            with AppendedFile(file, lambda problem: echo(problem, file=sys.stderr)) as log:
                log.append(visible(f"phalanx: {trace or message}"))
        raise


@contextlib.contextmanager
def _attached(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("phalanx")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


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
