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
def logging_to(terminal: Terminal, level: str, rank: int, file: Path | None) -> Iterator[None]:
    """Sends the package's log lines to the terminal on rank 0, to standard error on the others, and a dated copy to
    `file`. If many ranks share one standard error (file is None), only rank 0 and warnings are shown."""
    logger = logging.getLogger("phalanx")
    handlers: list[logging.Handler] = [_AboveTheBar(terminal) if rank == 0 else logging.StreamHandler(sys.stderr)]
    handlers[0].setFormatter(_Visible("%(message)s" if rank == 0 or file else f"[rank {rank}] %(message)s"))
    if rank and not file:
        handlers[0].setLevel(logging.WARNING)
    if rank == 0 and file:
        handlers.append(_LogFile(file))
        handlers[1].setFormatter(_Visible("%(asctime)s %(message)s"))
    logger.setLevel(level.upper())
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.propagate = True
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
