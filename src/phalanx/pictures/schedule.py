"""A picture of a schedule: one row per rank, time to the right, one cell per action with the number of its micro-batch.
There is no background, and colours have middle lightness, for light and dark pages."""

from __future__ import annotations

import shutil
import string
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from phalanx.echo import echo
from phalanx.pictures.elements import COLOURS, END, NEUTRAL, SMALL, box, document, fill_of, heading, rule, text, ticks
from phalanx.schedule.check import in_flight
from phalanx.schedule.schedule import Action, Schedule
from phalanx.schedule.timing import Timing
from phalanx.units import counted, duration

if TYPE_CHECKING:  # which needs numpy
    from phalanx.simulate.slices import SliceCut

_KINDS = {
    "F": (COLOURS[0], "forward pass"),
    "B": (COLOURS[2], "backward pass"),
    "I": (COLOURS[6], "gradients of inputs"),
    "W": (COLOURS[4], "gradients of weights"),
}
_LEFT, _RIGHT, _MARGIN, _TOP = 72, 104, 16, 68  # pixels
_ROW, _CELL = 28, 22  # pixels from row to row, and of a cell's height
_WIDEST = 2400  # pixels of all cells, unless a unit of time would be narrower than a pixel
DIGIT = 6.2
"""Pixels of a digit in a cell."""


def svg(timing: Timing) -> str:
    """Draws a timed schedule as an SVG document."""
    schedule, duration = timing.schedule, timing.duration
    # Wide enough for the longest number in the shortest cell, if the picture does not become too wide.
    longest = max(len(number(action, schedule)) for program in schedule.programs for action in program)
    unit = max(1.0, min(max(16.0, longest * DIGIT + 7), _WIDEST / duration))
    bottom = _TOP + schedule.ranks * _ROW
    legend, title = list(_keys(schedule)), f"{schedule.name}: {size(schedule)}"
    costs = ", ".join(f"{kind} takes {timing.costs[kind]:g}" for kind in _used(schedule))
    foot = f"time: for one stage {costs}; messages take none"
    words = max(8.5 * len(title), 7 * len(summary(timing)), 7 * len(foot))
    width = max(_LEFT + duration * unit + _RIGHT, _MARGIN + words, legend[-1][0])
    height = bottom + 72
    parts = [
        heading(_MARGIN, 24, title),
        text(_MARGIN, 43, summary(timing)),
        text(_LEFT + duration * unit + 10, _TOP - 8, "peak in flight"),
    ]
    for rank, most in enumerate(in_flight(schedule)):
        parts.extend(_rank(timing, rank, most, unit))
    for tick in ticks(0, duration, max(2, int(duration * unit / 90))):
        x = _LEFT + tick * unit
        parts.append(rule(x, bottom, x, bottom + 4))
        parts.append(text(x, bottom + 16, f"{tick:g}", "text-anchor='middle'"))
    parts.append(f"<text x='{_MARGIN}' y='{bottom + 36}'>{foot}</text>")
    parts.append(f"<g class='keys' transform='translate(0 {bottom + 48})'>{''.join(key for _, key in legend)}</g>")
    return document(title, width, height, parts)


def summary(timing: Timing) -> str:
    """Formats the figures of a schedule in one line."""
    bubble, streamed = timing.bubble, timing.bubble_without_flush
    differs = f"; {streamed:.1%} without a flush" if bubble - streamed > 1e-9 else ""
    return (
        f"bubble {bubble / (1 + bubble):.1%} of the step ({bubble:.1%} of the busy time{differs}); "
        f"length {timing.duration:g} units"
    )


def _used(schedule: Schedule) -> list[str]:
    """Returns the kinds of a schedule's actions, F first."""
    found = {action.kind for program in schedule.programs for action in program}
    return [kind for kind in _KINDS if kind in found]


def variants(schedule: Schedule) -> tuple[list[list[int]], int]:
    """Returns, by direction and stage, the index of the stage on its rank, those of a second direction after those of
    the first; shades distinguish them. Also returns their number."""
    found: list[list[int]] = []
    first = 0
    for placement in schedule.placements:
        before = Counter[int]()
        found.append([])
        for rank in placement:
            found[-1].append(first + before[rank])
            before[rank] += 1
        first = 1 + max(found[-1])
    return found, first


@cache
def shade(kind: str, variant: int, count: int) -> tuple[str, str]:
    """Returns the colours of a cell and of its text: the higher the variant, the lighter."""
    lighter = (0.5 if count == 2 else 0.66) * variant / max(1, count - 1)
    channels = (int(_KINDS[kind][0][place : place + 2], 16) for place in (1, 3, 5))
    fill = "#" + "".join(f"{round(channel + (255 - channel) * lighter):02x}" for channel in channels)
    return fill, "#ffffff" if lighter < 0.2 else "#1a1a1a"


def size(schedule: Schedule) -> str:
    """Formats the size of a schedule."""
    count = schedule.micro_batches
    words = [counted(schedule.ranks, "rank"), f"{count} micro-batch{'' if count == 1 else 'es'}"]
    if schedule.stages != schedule.ranks:
        words.append(counted(schedule.stages, "stage"))
    if schedule.slices > 1:
        words.append(f"{schedule.slices} slices per sequence")
    if schedule.steps > 1:
        words.append(f"{schedule.steps} steps")
    return ", ".join(words)


def number(action: Action, schedule: Schedule) -> str:
    """Returns the label of a cell."""
    return f"{action.micro}.{action.slice}" if schedule.slices > 1 else str(action.micro)


def _rank(timing: Timing, rank: int, most: int, unit: float) -> Iterator[str]:
    """Yields a rank's row: a pale line over the whole time, whose uncovered parts are the bubble, and its cells."""
    schedule = timing.schedule
    top = _TOP + rank * _ROW
    middle, text = top + _CELL / 2, top + _CELL / 2 + 4
    right = _LEFT + timing.duration * unit
    found, count = variants(schedule)
    yield f"<g class='rank'><text x='{_MARGIN}' y='{text:g}'>rank {rank}</text>"
    yield (
        f"<line x1='{_LEFT}' y1='{middle:g}' x2='{right:.1f}' y2='{middle:g}' stroke='{NEUTRAL}' "
        f"stroke-opacity='.18' stroke-width='{_CELL}'/>"
    )
    yield "<g text-anchor='middle' font-size='11'>"
    gap = min(1.0, unit / 8)
    for action, start in zip(schedule.programs[rank], timing.starts[rank], strict=True):
        cost = timing.costs[action.kind]
        x, width = _LEFT + start * unit, cost * unit
        fill, ink = shade(action.kind, found[schedule.direction(action.micro)][action.stage], count)
        label = number(action, schedule)
        yield (
            f"<rect x='{x + gap / 2:.2f}' y='{top}' width='{width - gap:.2f}' height='{_CELL}' fill='{fill}'>"
            f"<title>{action}: {start:g} to {start + cost:g}</title></rect>"
        )
        if len(label) * DIGIT + 2 <= width:
            yield f"<text x='{x + width / 2:.1f}' y='{text:g}' fill='{ink}'>{label}</text>"
    yield "</g>"
    if schedule.steps > 1:
        for end in _updates(timing, rank):
            x = _LEFT + end * unit
            yield _update(x, top)
    yield f"<text x='{right + 10:.1f}' y='{text:g}'>{most}</text></g>"


def _updates(timing: Timing, rank: int) -> Iterator[float]:
    """Yields the end of a rank's last backward pass in each optimizer step."""
    schedule = timing.schedule
    ends: dict[int, float] = {}
    for action, start in zip(schedule.programs[rank], timing.starts[rank], strict=True):
        if action.kind in ("B", "W"):
            ends[action.micro * schedule.steps // schedule.micro_batches] = start + timing.costs[action.kind]
    yield from ends.values()


def _update(x: float, top: float) -> str:
    """Returns the mark of an optimizer step: a line with a head, in the neutral colour for light and dark pages."""
    return (
        f"<path class='update' d='M{x - 4:.1f},{top - 3:g} h8 l-4,5 z M{x:.1f},{top:g} v{_CELL}' fill='{COLOURS[1]}' "
        f"stroke='{COLOURS[1]}' stroke-width='2'/>"
    )


def keys(schedule: Schedule) -> Iterator[tuple[float, str]]:
    """Yields the legend of the passes: each entry, and where it ends."""
    _, count = variants(schedule)
    x = float(_MARGIN)
    for kind in _used(schedule):
        squares = "".join(
            f"<rect x='{x + 15 * variant:g}' y='0' width='14' height='14' fill='{shade(kind, variant, count)[0]}'/>"
            for variant in range(count)
        )
        x += 15 * count + 5
        label = f"{kind}: {_KINDS[kind][1]}"
        key = f"{squares}<text x='{x:g}' y='11'>{label}</text>"
        x += 7 * len(label) + 12
        yield x, key
    if count > 1:
        by = "direction" if len(schedule.placements) > 1 else "stage of the rank"
        label = f"the lighter, the later the {by}" if count > 2 else f"lighter: second {by}"
        yield x + 7 * len(label), f"<text x='{x:g}' y='11'>{label}</text>"


def _keys(schedule: Schedule) -> Iterator[tuple[float, str]]:
    """Yields the entries of the legend, and where each ends."""
    x = float(_MARGIN)
    for x, key in keys(schedule):
        yield x, key
    if schedule.steps > 1:
        label = "optimizer step"
        yield x + 20 + 7 * len(label), f"{_update(x + 6, -4)}<text x='{x + 16:g}' y='11'>{label}</text>"


_TICK = 5  # units of time between the numbers above a band
_MOST_LINES = 600


class _Interval(NamedTuple):
    """An interval of a rank's time in whole units: an action, or idle time."""

    begin: int
    end: int
    label: str
    kind: str
    variant: int


def print_grid(timing: Timing) -> None:
    """Prints the grid on standard output, in colours on a terminal."""
    width = shutil.get_terminal_size((120, 24)).columns
    if not sys.stdout.isatty():
        echo(grid(timing, width))
        return
    from rich.console import Console  # imported here, because it is slow and a pipe needs none
    from rich.text import Text

    _, count = variants(timing.schedule)
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


def grid(timing: Timing, width: int = 120) -> str:
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
    label = interval.label if interval.begin >= begin else ""
    return label.ljust(wide - 1, "-" if interval.label else ".") + " "


def _intervals(timing: Timing, rank: int) -> Iterator[_Interval]:
    schedule, clock = timing.schedule, 0
    found, count = variants(schedule)
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


_SLICES_LEFT, _WIDTH, _SLICES_ROW = 90.0, 820.0, 16.0
_MOST_ROWS = 16
"""Ranks in a picture; of a longer pipeline only the first."""


def slices_svg(cuts: dict[str, SliceCut], where: str) -> str:
    """Returns the first micro-batch under every cut, on one scale of time; `where` names model and machine."""
    drawn = {name: list(_passes(cut)) for name, cut in cuts.items()}
    longest = max(start + seconds for passes in drawn.values() for *_, start, seconds in passes)
    parts, top = [heading(16, 28, f"{where}: the first micro-batch in slices, on the slowest stage's times")], 60.0
    for name, passes in drawn.items():
        cut, rows = cuts[name], min(cuts[name].ranks, _MOST_ROWS)
        tokens = ", ".join(map(str, cut.tokens[:12])) + (", …" if len(cut.tokens) > 12 else "")
        parts.append(text(16, top, f"{name}: {duration(cut.latency)} per step; tokens {tokens}"))
        parts += [
            text(_SLICES_LEFT - 8, top + 20 + rank * _SLICES_ROW, f"rank {rank}", f"{END} {SMALL}")
            for rank in range(rows)
        ]
        for kind, rank, number, start, seconds in passes:
            if rank < rows:
                tip = f"{kind} of slice {number}: {cut.tokens[number]} tokens, {duration(seconds)}"
                x, width = _SLICES_LEFT + _WIDTH * start / longest, max(0.3, _WIDTH * seconds / longest - 0.5)
                parts.append(
                    box(x, top + 9 + rank * _SLICES_ROW, width, _SLICES_ROW - 3, fill_of(COLOURS[kind == "B"]), tip)
                )
        top += rows * _SLICES_ROW + 44
    return document(where, _SLICES_LEFT + _WIDTH + 24, top, parts)


def _passes(cut: SliceCut) -> Iterator[tuple[str, int, int, float, float]]:
    """Yields kind, rank, slice, start and seconds of the passes of one micro-batch."""
    free, last = [0.0] * cut.ranks, range(len(cut.tokens))
    for kind, order, ranks, times in (
        ("F", last, range(cut.ranks), cut.forward),
        ("B", reversed(last), reversed(range(cut.ranks)), cut.backward),
    ):
        through = [*ranks]
        for number in order:
            before = 0.0
            for rank in through:
                start = max(before, free[rank])
                before = free[rank] = start + times[number]
                yield kind, rank, number, start, times[number]
