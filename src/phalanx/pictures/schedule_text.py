"""A schedule as a grid of characters: one row per rank, each action as wide as its time, in bands as wide as the
terminal.

`F3` is the forward pass of micro-batch 3, `F3b` that of the rank's second stage (or of the second direction), `F3.1`
that of slice 1; dots are bubbles.
"""

from __future__ import annotations

import shutil
import string
import sys
from collections.abc import Iterator
from typing import NamedTuple

from phalanx.echo import echo
from phalanx.pictures.schedule import shade, variants
from phalanx.schedule.schedule import Action, Schedule
from phalanx.schedule.timing import Timing

_TICK = 5  # units of time between the numbers above a band
_MOST_LINES = 600


class _Interval(NamedTuple):
    """An interval of a rank's time in whole units: an action, or idle time."""

    begin: int
    end: int
    label: str
    kind: str
    variant: int


def show(timing: Timing) -> None:
    """Prints the grid on standard output, in colours on a terminal."""
    width = shutil.get_terminal_size((120, 24)).columns
    if not sys.stdout.isatty():
        echo(text(timing, width))
        return
    from rich.console import Console  # imported here, because it is slow and a pipe needs none
    from rich.text import Text

    count = _count(timing.schedule)
    console = Console(highlight=False)
    for line in _lines(timing, width):
        printed = Text(no_wrap=True)
        for words, interval in line:
            if interval is None or not interval.label:
                printed.append(words, "" if interval is None else "dim")
            else:
                fill, ink = shade(interval.kind, interval.variant, count)
                printed.append(words[:-1].replace("-", " "), f"{ink} on {fill}")
                printed.append(" ")
        console.print(printed)


def text(timing: Timing, width: int = 120) -> str:
    """Returns the grid in plain characters, in bands of at most `width` of them, for times in whole units."""
    return "\n".join("".join(words for words, _ in line).rstrip() for line in _lines(timing, width))


def _lines(timing: Timing, width: int) -> Iterator[list[tuple[str, _Interval | None]]]:
    """Yields the lines, each in parts: the text, and the interval that it stands for (None: a heading)."""
    rows = [list(_intervals(timing, rank)) for rank in range(timing.schedule.ranks)]
    cell = 1 + max(len(interval.label) for row in rows for interval in row)
    names = [f"rank {rank}" for rank in range(len(rows))]
    left = 2 + max(map(len, names))
    units = max(1, (width - left) // cell)
    duration = round(timing.duration)
    bands = range(0, duration, units)
    if len(bands) * (len(rows) + 2) > _MOST_LINES:
        yield [(f"({len(bands)} bands of {len(rows)} ranks: too large for a terminal; --svg FILE draws it)", None)]
        return
    for begin in bands:
        end = min(begin + units, duration)
        ticks = range(-(-begin // _TICK) * _TICK, end, _TICK)
        heading = " " * left
        for tick in ticks:
            heading = heading.ljust(left + (tick - begin) * cell) + str(tick)
        if begin:
            yield []
        yield [(heading, None)]
        for name, row in zip(names, rows, strict=True):
            inside = [interval for interval in row if interval.begin < end and interval.end > begin]
            yield [(name.ljust(left), None), *((_words(interval, begin, end, cell), interval) for interval in inside)]


def _words(interval: _Interval, begin: int, end: int, cell: int) -> str:
    """Returns an interval's text in a band, with a space after it; its label is in the band where it begins."""
    wide = (min(end, interval.end) - max(begin, interval.begin)) * cell
    if not interval.label:
        return "." * (wide - 1) + " "
    label = interval.label if interval.begin >= begin else ""
    return label.ljust(wide - 1, "-") + " "


def _intervals(timing: Timing, rank: int) -> Iterator[_Interval]:
    schedule, clock = timing.schedule, 0
    found, count = variants(schedule), _count(schedule)
    for action, start in zip(schedule.programs[rank], timing.starts[rank], strict=True):
        begin, end = round(start), round(start + timing.costs[action.kind])
        if begin > clock:
            yield _Interval(clock, begin, "", "", 0)
        variant = found[schedule.direction(action.micro)][action.stage]
        yield _Interval(begin, end, _label(action, schedule, variant, count), action.kind, variant)
        clock = end
    if (duration := round(timing.duration)) > clock:
        yield _Interval(clock, duration, "", "", 0)


def _label(action: Action, schedule: Schedule, variant: int, count: int) -> str:
    letter = string.ascii_lowercase[variant % 26] if count > 1 else ""
    return f"{action.kind}{action.micro}{f'.{action.slice}' if schedule.slices > 1 else ''}{letter}"


def _count(schedule: Schedule) -> int:
    return 1 + max(variants(schedule)[-1])
