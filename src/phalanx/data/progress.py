"""Progress of long operations: a bar on a terminal, otherwise an occasional plain line; always on standard error."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from phalanx.echo import echo, visible
from phalanx.units import seconds

Progress = Callable[[str, int, int], None]
"""Callback with the current activity, the amount done, and the total; (text, 0, 0) only prints a message."""

LINE_AFTER_S = 2.0
"""Seconds between the first plain lines; later ones come after a fifth of the time so far."""


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
    started: dict[str, float] = {}
    next_line: dict[str, float] = {}

    def show(what: str, done: int, total: int) -> None:
        if not total:
            echo(what, file=sys.stderr, flush=True)
            return
        now = time.monotonic()
        began = started.setdefault(what, now)
        if done < total and (now < next_line.setdefault(what, began + LINE_AFTER_S) or 1000 * done < total):
            return  # "0%" says nothing
        if next_line.get(what) == math.inf:
            return
        share = done / total
        percent = f"{100 * share:.1f}" if share < 0.01 else 100 * done // total
        left = f" ({seconds((now - began) / share * (1 - share))} left)" if 0.01 <= share < 1 else ""
        echo(f"{what}: {percent}%{left}", file=sys.stderr, flush=True)
        next_line[what] = now + max(LINE_AFTER_S, (now - began) / 5) if done < total else math.inf

    return show
