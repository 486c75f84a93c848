"""Progress of long operations: a bar on a terminal, otherwise an occasional plain line; always on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from phalanx.echo import echo, visible

Progress = Callable[[str, int, int], None]
"""Callback with the current activity, the amount done, and the total; (text, 0, 0) only prints a message."""

LINE_EVERY_S = 2.0


@contextmanager
def stderr_progress() -> Iterator[Progress]:
    """Provides a Progress that shows itself on standard error inside the `with` block."""
    if sys.stderr.isatty():
        with _bar() as progress:
            yield progress
    else:
        yield _lines()


def silent(what: str, done: int, total: int) -> None:
    """Shows nothing; a Progress for callers that want none."""


def meter(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """Returns a function that adds an amount to what is done, and shows it. Threads may share it."""
    lock, done = Lock(), 0

    def add(amount: int) -> None:
        nonlocal done
        with lock:
            done = min(done + amount, total)
            progress(what, done, total)

    return add


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if not total:
                bars.console.print(visible(what), markup=False, highlight=False)
                return
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show


def _lines() -> Progress:
    shown_at = 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if not total:
            echo(what, file=sys.stderr, flush=True)
        elif done >= total or now - shown_at >= LINE_EVERY_S:
            echo(f"{what}: {100 * done // total}%", file=sys.stderr, flush=True)
            shown_at = now

    return show
