"""A picture of a simulated step: two rows per pipeline rank, its device above, its messages below, and where something
is offloaded three lanes of its host; time to the right. There is no background, and colours have middle lightness, for
light and dark pages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import chain, count
from types import MappingProxyType
from typing import NamedTuple, cast

from phalanx.errors import JobError
from phalanx.pictures import schedule as schedule_picture
from phalanx.pictures.elements import COLOURS, END, Scale, across, box, document, fill_of, heading, rule, text, ticks
from phalanx.pictures.elements import seconds as duration
from phalanx.pictures.page import figure, html_page
from phalanx.pictures.panels import Panel, panels_svg
from phalanx.schedule.schedule import Action, Kind
from phalanx.simulate.goodput import Goodput, at, best
from phalanx.simulate.timeline import HOST_ROWS, Span, Timeline, TimeShares, span_name
from phalanx.units import counted

# Spans as the cells of a picture: cut to a window of time; cells too narrow to be seen are merged.
NARROWEST = 0.7
"""Width in pixels of the narrowest cell."""


@dataclass(frozen=True)
class Window:
    """The seconds of a step that are shown, and their scale in pixels."""

    begin: float
    end: float
    unit: float

    def cut(self, spans: Sequence[Span]) -> Iterator[Span]:
        """Yields the spans inside the window. The exposed part of a pass is at its end."""
        for span in spans:
            start, end = max(span.start, self.begin), min(span.end, self.end)
            if start == span.start and end == span.end and span.seconds > 0:
                yield span
            elif end - start > 1e-9 * (self.end - self.begin):  # not a span that lies inside only by rounding
                exposed = min(end - start, max(0.0, end - (span.end - span.exposed)))
                yield span._replace(start=start, seconds=end - start, exposed=exposed)

    def x(self, seconds: float) -> float:
        return (seconds - self.begin) * self.unit


class Cell(NamedTuple):
    """One box of one colour. Lengths are in pixels, except `top` and `height`, which are shares of the row's height."""

    x: float
    width: float
    top: float
    height: float
    exposed: float
    """Exposed part, at its right end."""
    spans: tuple[Span, ...]
    """The spans that it stands for, all of one colour."""


def cells(spans: Sequence[Span], window: Window, narrow: float, colour: Callable[[Span], Hashable]) -> Iterator[Cell]:
    """Yields the cells of one row. Neighbours narrower than `narrow` pixels share a column a few pixels wide, in which
    the height of each colour is its share of the time."""
    column: list[Span] = []
    for span in window.cut(spans):
        is_narrow = span.seconds * window.unit < narrow
        if column and not (is_narrow and _joins(column, span, window, narrow)):
            yield from _column(column, window, colour)
            column = []
        if is_narrow:
            column.append(span)
        else:
            yield _cell(span, window)
    yield from _column(column, window, colour)


def _joins(column: Sequence[Span], span: Span, window: Window, narrow: float) -> bool:
    """Returns whether a narrow span belongs to the column before it. Columns stay narrow, so changes stay visible."""
    gap, width = span.start - column[-1].end, span.end - column[0].start
    return gap * window.unit < narrow and width * window.unit < max(10.0, narrow)


def _cell(span: Span, window: Window) -> Cell:
    width = max(NARROWEST, span.seconds * window.unit)
    return Cell(window.x(span.start), width, 0.0, 1.0, span.exposed * window.unit, (span,))


def _column(column: Sequence[Span], window: Window, colour: Callable[[Span], Hashable]) -> Iterator[Cell]:
    if len(column) == 1:
        yield _cell(column[0], window)
    if len(column) < 2:
        return
    x, seconds = window.x(column[0].start), max(span.end for span in column) - column[0].start
    # Simultaneous messages to several ranks add up to more than the time.
    whole = max(seconds, sum(span.seconds for span in column))
    width = max(NARROWEST, seconds * window.unit)
    by_colour: defaultdict[Hashable, list[Span]] = defaultdict(list)
    for span in column:
        by_colour[colour(span)].append(span)
    top = 1.0
    for _, spans in sorted(by_colour.items(), key=lambda item: str(item[0])):
        filled = sum(span.seconds for span in spans)
        top -= filled / whole
        exposed = sum(span.exposed for span in spans) / filled * width
        yield Cell(x, width, top, filled / whole, exposed, tuple(spans))


_OTHERS = {
    "optimizer": (COLOURS[1], "optimizer"),
    "send": (COLOURS[5], "message to another stage"),
    "gather": (COLOURS[3], "gather parameters"),
    "reduce": (COLOURS[7], "reduce gradients"),
    "update": (COLOURS[1], "update on the host"),
    "down": (COLOURS[6], "copy between device and host"),
    "up": (COLOURS[6], "copy between device and host"),
}
_LARGEST = 1_000_000  # approximate upper bound on a document's bytes
_MOST, _FEWER = 32, 16  # most ranks shown, and the number if the document would be too large
_LEFT, _MARGIN, _TOP = 72, 16, 76  # pixels
_NARROW, _WIDE, _PASS = 800, 1600, 22  # pixels of the plot: at least, at most, and per pass in between
_COLUMNS = {"busy": 48, "exposed": 112, "idle": 164, "peak in flight": 254}
"""Distances of a rank's figures from the right end of the plot."""
_COLUMNS_WITH_HOST = {"busy": 48, "exposed": 112, "idle": 164, "waits for host": 254, "peak in flight": 344}
"""The same where something is offloaded."""
_SHARES = {"busy": "busy", "exposed": "communication", "idle": "idle", "waits for host": "host"}
"""The fields of TimeShares with those figures."""
_LANE = 8
"""Pixels from one lane of a rank's host to the next."""
_TO_THE_LEFT = "text-anchor='end'"
_DARKER = "fill='#000' fill-opacity='.38'"


MAX_DRAWN_PASSES = 120
"""Passes per rank up to which a picture shows the whole step."""


def page(timeline: Timeline) -> str:
    """Returns a step as a page; of one with very many passes, the beginning and the end."""
    return html_page(
        "Step", f"One step, simulated: {duration(timeline.seconds)}", "", figure(ends_svg(timeline), "map")
    )


def ends_svg(timeline: Timeline, about: str = "") -> str:
    """Draws a step; of one with more than MAX_DRAWN_PASSES passes per rank, its beginning and its end."""
    passes = max(map(len, timeline.schedule.programs))
    if passes <= MAX_DRAWN_PASSES:
        return svg(timeline, about=about)
    part = timeline.seconds * MAX_DRAWN_PASSES / 2 / passes
    return "".join(svg(timeline, *window, about) for window in ((0, part), (timeline.seconds - part, None)))


def svg(
    timeline: Timeline,
    begin: float | None = None,
    end: float | None = None,
    about: str = "",
    marks: Mapping[int, str] = MappingProxyType({}),
    slowed: str = "",
) -> str:
    """Draws a step, or its seconds from `begin` to `end`, as an SVG document of less than a megabyte.

    Args:
        about: names the model and the machine.
        marks: what slows a rank or its link, in a few letters; these ranks are always shown.
        slowed: the same in words, for the line below the title.

    Raises:
        JobError: the window is empty.
    """
    shown = Window(begin or 0.0, timeline.seconds if end is None else min(end, timeline.seconds), 1.0)
    if not 0 <= shown.begin < shown.end:
        raise JobError(
            f"nothing happens from {shown.begin:g} s to {shown.end if end is None else end:g} s: the step takes "
            f"{timeline.seconds:g} s; give a beginning before that, and an end after the beginning"
        )
    # First fewer ranks, with whole passes; then a coarser scale of time.
    ways = chain([(_MOST, NARROWEST)], ((_FEWER, NARROWEST * 2**more) for more in count()))
    shares = [timeline.shares(rank) for rank in range(timeline.schedule.ranks)]
    return next(drawn for way in ways if (drawn := _Picture(timeline, shares, shown, marks, *way).draw(about, slowed)))


class _Picture:
    """One way to draw a timeline: at most `most` ranks, spans narrower than `narrow` pixels merged."""

    def __init__(
        self,
        timeline: Timeline,
        shares: Sequence[TimeShares],
        shown: Window,
        marks: Mapping[int, str],
        most: int,
        narrow: float,
    ):
        self.timeline, self.schedule, self.shares, self.narrow = timeline, timeline.schedule, shares, narrow
        self.marks = marks
        every = -(-self.schedule.ranks // most)
        self.ranks = sorted({*range(0, self.schedule.ranks, every), self.schedule.ranks - 1, *marks})
        self.left = max([_LEFT, *(_LEFT + 4 + _label_width(words) for words in marks.values())])
        self.every = every
        passes = max(sum(1 for _ in shown.cut(timeline.device[rank])) for rank in self.ranks)
        self.width = min(_WIDE, max(_NARROW, _PASS * passes))
        self.window = Window(shown.begin, shown.end, self.width / (shown.end - shown.begin))
        # Heights of the device's row, of a strip of the network's, and from rank to rank.
        self.device, self.strip, self.row = (20, 4, 38) if len(self.ranks) <= _FEWER + 1 else (14, 3, 26)
        self.columns = _COLUMNS_WITH_HOST if timeline.host else _COLUMNS
        self.lanes = _LANE * len(HOST_ROWS) if timeline.host else 0
        self.row += self.lanes
        self.bottom = _TOP + len(self.ranks) * self.row
        length = shown.end - shown.begin
        self.scale, self.unit = next(
            ((scale, unit) for scale, unit in ((1.0, "s"), (1e3, "ms")) if length * scale >= 1), (1e6, "µs")
        )
        self.numbered = self.shared = False
        """Whether cells have numbers, and whether passes share columns: known when they are drawn."""
        self.decimals = max(0, 4 - math.floor(math.log10(length * self.scale)))

    def draw(self, about: str, slowed: str) -> str | None:
        """Returns the document, or None if it is too large."""
        title = f"{about}{about and ': '}{self.schedule.name}, {schedule_picture.size(self.schedule)}"
        rows: list[str] = []
        for place, rank in enumerate(self.ranks):
            rows += self._rank(rank, _TOP + place * self.row)
            if rank in self.marks:
                rows += _marked(self.marks[rank], _TOP + place * self.row + (self.device - 13) / 2)
            if sum(map(len, rows)) > _LARGEST:
                return None
        below, right, height = self._below()
        width = max(self.left + self.width + max(self.columns.values()) + _MARGIN, right, _MARGIN + 9 * len(title))
        parts = [
            heading(_MARGIN, 24, title),
            text(_MARGIN, 43, "; ".join(filter(None, [self._summary(), slowed]))),
            *(text(self.left + self.width + end, _TOP - 10, name, _TO_THE_LEFT) for name, end in self.columns.items()),
            *rows,
            *self._axis(),
            *below,
        ]
        return document(title, width, height, parts)

    def _summary(self) -> str:
        timeline = self.timeline
        idle = max(range(self.schedule.ranks), key=lambda rank: self.shares[rank].idle)
        words = [f"{counted(self.schedule.steps, 'step')} in {duration(timeline.seconds)}"]
        words.append(f"rank {idle} is idle longest, {self.shares[idle].idle / timeline.seconds:.1%} of it")
        if self.window.end - self.window.begin < timeline.seconds:
            words.append(f"shown: {self._time(self.window.begin)} to {self._time(self.window.end)} {self.unit}")
        return "; ".join(words)

    def _time(self, seconds: float) -> str:
        return f"{seconds * self.scale:.{self.decimals}f}"

    @cached_property
    def _variants(self) -> tuple[list[list[int]], int]:
        return schedule_picture.variants(self.schedule)

    def _colours(self, span: Span) -> tuple[str, str]:
        """Returns the colours of a span's cell and of the text on it."""
        if span.kind in _OTHERS:
            return _OTHERS[span.kind][0], "#ffffff"
        found, count = self._variants
        return schedule_picture.shade(span.kind, found[self.schedule.direction(span.micro)][span.stage], count)

    def _rank(self, rank: int, top: float) -> Iterator[str]:
        middle = self.device / 2
        yield f"<g class='rank' transform='translate({self.left} {top:g})'>"
        yield text(_MARGIN - self.left, middle + 4, f"rank {rank}")
        yield f"<path d='M0 0h{self.width:g}v{self.device}H0z' fill-opacity='.18'/>"
        device = list(cells(self.timeline.device[rank], self.window, self.narrow, self._colours))
        yield from self._boxes(device, 0, self.device)
        yield from self._numbers(device, middle + 4)
        network = self.timeline.network[rank]
        for strip, kinds in enumerate((("send",), ("gather", "reduce"))):
            spans = [span for span in network if span.kind in kinds]
            at = self.device + 1 + strip * (self.strip + 1)
            yield from self._boxes(cells(spans, self.window, self.narrow, self._colours), at, self.strip)
        for lane, kind in enumerate(HOST_ROWS if self.lanes else ()):
            at = self.device + 1 + 2 * (self.strip + 1) + lane * _LANE
            spans = [span for span in self.timeline.host[rank] if span.kind == kind]
            yield f"<path d='M0 {at:g}h{self.width:g}v{_LANE - 2}H0z' fill-opacity='.08'/>"
            yield from self._boxes(cells(spans, self.window, self.narrow, self._colours), at, _LANE - 2)
        whole = self.timeline.seconds
        figures = [
            *(f"{getattr(self.shares[rank], _SHARES[name]) / whole:.1%}" for name in self.columns if name in _SHARES),
            f"{self.schedule.peak_live_activations(rank):g}",
        ]
        for right, shown in zip(self.columns.values(), figures, strict=True):
            yield text(self.width + right, middle + 4, shown, _TO_THE_LEFT)
        yield "</g>"

    def _boxes(self, found: Iterator[Cell] | Sequence[Cell], top: float, height: float) -> Iterator[str]:
        """Yields the cells colour by colour, and over them their exposed parts."""
        by_colour: defaultdict[str, list[str]] = defaultdict(list)
        exposed = []
        for cell in found:
            gap = min(1.0, cell.width / 8) if len(cell.spans) == 1 and cell.width > NARROWEST else 0.0
            y, high = top + cell.top * height, cell.height * height
            box = _box(cell.x + gap / 2, cell.width - gap, y, high)
            by_colour[self._colours(cell.spans[0])[0]].append(
                f"<path d='{box}'><title>{escape(self._words(cell))}</title></path>"
            )
            if cell.exposed > 0.5:
                exposed.append(_box(cell.x + cell.width - gap / 2 - cell.exposed, cell.exposed, y, high))
        for colour, boxes in by_colour.items():
            yield f"<g fill='{colour}'>{''.join(boxes)}</g>"
        if exposed:
            yield f"<path class='exposed' d='{''.join(exposed)}' {_DARKER} pointer-events='none'/>"

    def _words(self, cell: Cell) -> str:
        first, last = cell.spans[0], cell.spans[-1]
        name = span_name(self.timeline, first)
        if len(cell.spans) > 1:
            name = f"{len(cell.spans)} × {first.kind}" if first.micro >= 0 else f"{len(cell.spans)} times {first.kind}"
        words = f"{name}: {self._time(first.start)} to {self._time(last.end)} {self.unit}"
        inside = sum(span.exposed for span in cell.spans)
        return words + (f", {self._time(inside)} exposed" if inside else "")

    def _numbers(self, found: Sequence[Cell], y: float) -> Iterator[str]:
        by_ink: defaultdict[str, list[str]] = defaultdict(list)
        for cell in found:
            span = cell.spans[0]
            if len(cell.spans) > 1:
                self.shared = True
            elif self.narrow == NARROWEST and span.kind not in _OTHERS:
                action = Action(cast("Kind", span.kind), span.stage, span.micro, span.part)
                label = schedule_picture.number(action, self.schedule)
                if len(label) * schedule_picture.DIGIT + 2 <= cell.width:
                    at = f"x='{cell.x + cell.width / 2:.1f}' y='{y:g}'"
                    by_ink[self._colours(span)[1]].append(f"<text {at}>{label}</text>")
        self.numbered = self.numbered or bool(by_ink)
        for ink, texts in by_ink.items():
            yield f"<g class='numbers' text-anchor='middle' font-size='11' fill='{ink}'>{''.join(texts)}</g>"

    def _axis(self) -> Iterator[str]:
        y = self.bottom
        yield text(_MARGIN, y + 16, self.unit)
        low, high = self.window.begin * self.scale, self.window.end * self.scale
        for tick in ticks(low, high, self.width // 90):
            x = self.left + self.window.x(tick / self.scale)
            yield rule(x, y, x, y + 4)
            yield text(x, y + 16, f"{tick:g}", "text-anchor='middle'")

    def _below(self) -> tuple[list[str], float, float]:
        """Returns the text under the plot, its right end and its lower end."""
        words = ["Upper row: the device"]
        if self.numbered:
            words[0] += ", with the numbers of micro-batches"
        words.append("lower row: what the rank sends")
        if self.lanes:
            words.append("then copies to the host, the host, copies to the device")
        if self.shared:
            words.append("passes too narrow to be seen share a column, each kind as high as its share of the time")
        if len(self.ranks) < self.schedule.ranks:
            ordinal = {2: "2nd", 3: "3rd"}.get(self.every, f"{self.every}th")
            marked = ", the marked ones" if self.marks else ""
            words.append(f"of {self.schedule.ranks} ranks every {ordinal}{marked} and the last are shown")
        line, y = "; ".join(words), self.bottom + 40
        passes = list(schedule_picture.keys(self.schedule))
        others, right = self._other_keys()
        parts = [
            text(_MARGIN, y, line),
            f"<g class='keys' transform='translate(0 {y + 12})'>{''.join(key for _, key in passes)}</g>",
            f"<g class='keys' transform='translate(0 {y + 34})'>{others}</g>",
        ]
        return parts, max(7.0 * len(line), passes[-1][0], right), y + 64

    def _other_keys(self) -> tuple[str, float]:
        timeline = self.timeline
        spans = [span for rows in (timeline.device, timeline.network, timeline.host) for row in rows for span in row]
        kinds = {span.kind for span in spans}
        shown = dict.fromkeys(key for kind, key in _OTHERS.items() if kind in kinds)
        entries = [(colour, "", label) for colour, label in shown]
        if any(span.exposed for span in spans):
            over = "<path d='M{0:g} 0h7v14h-7z' " + _DARKER + "/>"
            entries.append((COLOURS[0], over, "darker: communication in a pass that nothing hides (exposed)"))
        x, parts = float(_MARGIN), []
        for colour, over, label in entries:
            parts.append(f"<rect x='{x:g}' y='0' width='14' height='14' fill='{colour}'/>{over.format(x + 7)}")
            parts.append(text(x + 20, 11, label))
            x += 32 + 7 * len(label)
        return "".join(parts), x


def _marked(words: str, top: float) -> Iterator[str]:
    """Yields the words on a label beside the name of a rank."""
    x, width = _LEFT - 6, _label_width(words)
    yield f"<rect class='mark' x='{x}' y='{top:g}' width='{width:g}' height='13' rx='2' fill='{COLOURS[1]}'/>"
    yield text(x + 4, top + 10, words, "font-size='10' font-weight='600' fill='#ffffff'")


def _label_width(words: str) -> float:
    return 8 + 6 * len(words)


def _box(x: float, width: float, top: float, height: float) -> str:
    return f"M{x:.1f} {top:.3g}h{width:.2f}v{height:.3g}h-{width:.2f}z"


SIZES = (1024, 4096, 16384, 100_000)
"""Numbers of devices of the jobs that are compared with the user's."""
_POINTS, _LONGEST = 160, 60.0  # points of a line, and minutes between checkpoints at its end


def goodput_svg(sizes: Sequence[int], failures_per_device_day: float, saves: Sequence[float], restart_s: float) -> str:
    """Returns a panel per cost of a checkpoint in seconds, with a line per number of devices, as an SVG document."""
    panels = []
    for save in saves:
        lines: dict[str, list[tuple[float, float]]] = {}
        marks: dict[str, tuple[float, float]] = {}
        for devices in sizes:
            name = f"{devices:,} devices"
            minutes = [_LONGEST * (number / _POINTS) ** 2 for number in range(8, _POINTS + 1)]
            found = [at(60 * minute, devices, failures_per_device_day, save, restart_s) for minute in minutes]
            lines[name] = [(minute, 100 * g.fraction) for minute, g in zip(minutes, found, strict=True)]
            top = best(devices, failures_per_device_day, save, restart_s)
            if minutes[0] <= top.interval_s / 60 <= _LONGEST:
                marks[name] = top.interval_s / 60, 100 * top.fraction
        panels.append(
            Panel(f"a checkpoint takes {save:g} s", "minutes between checkpoints", "% productive time", lines, marks)
        )
    rate = f"{failures_per_device_day:.3g} failures per device and day"
    return panels_svg(f"Productive time: {rate}, a restart takes {restart_s / 60:g} minutes", panels)


_LOST = {"saving": COLOURS[0], "rework": COLOURS[1], "restarting": COLOURS[2]}


def remedies_svg(title: str, remedies: Mapping[str, Goodput]) -> str:
    """Returns a row per remedy with the shares of time that are still lost, as an SVG document."""
    left, right, base = 250.0, 700.0, 66 + 24.0 * len(remedies)
    most = max(1 - each.fraction for each in remedies.values())
    scale = Scale(0, 1.05 * max(most, 1e-9), left, right)
    parts = [heading(16, 28, title)]
    for number, (name, each) in enumerate(remedies.items()):
        y, lost = 66 + 24.0 * number, 0.0
        parts.append(text(left - 8, y + 12, name, END))
        for part, colour in _LOST.items():
            share = getattr(each, part)
            parts.append(box(scale(lost), y, scale(share) - left, 15, fill_of(colour), f"{part} {share:.2%}"))
            lost += share
        parts.append(text(right + 70, y + 12, f"{each.fraction:.1%}", END))
    parts.append(text(right + 70, 56, "productive", END))
    marks = [(tick, f"{100 * tick:.3g}%") for tick in ticks(0, scale.high)]
    parts += across(scale, marks, 62, base + 6)
    for x, (part, colour) in zip((left, left + 110, left + 220), _LOST.items(), strict=True):
        parts += [box(x, 44, 12, 12, fill_of(colour)), text(x + 18, 54, f"lost to {part}")]
    return document(title, right + 90, base + 40, parts)
