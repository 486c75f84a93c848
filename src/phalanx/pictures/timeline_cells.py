"""Spans as the cells of a picture: cut to a window of time; cells too narrow to be seen are merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.simulate.timeline import Span

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
