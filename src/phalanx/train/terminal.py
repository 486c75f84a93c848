"""Shows a run: a live bar and log lines on a terminal, plain lines elsewhere, a copy in the rank's own log."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from phalanx.echo import echo, shortened, visible
from phalanx.launch.outcome import describe
from phalanx.train.append import AppendedFile


class Terminal:
    """The live bar of a run on standard error; nothing if that is no terminal. A context manager."""

    def __init__(self, steps: int, visible: bool):
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            disable=not (visible and self.console.is_terminal),
        )
        self.task = self.bar.add_task("training", total=steps, shown="")

    def __enter__(self) -> Terminal:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, step: int, loss: float, tps: float) -> None:
        """Moves the bar and shows the loss and the tokens per second per device beside it."""
        self.bar.update(self.task, completed=step, shown=f"loss: {loss:.4f}  tps: {tps:,.0f}")

    def print(self, line: str) -> None:
        """Prints a line above the bar."""
        self.console.print(visible(line), markup=False)


class _AboveTheBar(logging.Handler):
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
    handler: logging.Handler = _AboveTheBar(terminal) if rank == 0 else logging.StreamHandler(sys.stderr)
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
