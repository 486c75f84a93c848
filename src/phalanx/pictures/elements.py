"""The kit of every picture: an SVG document, its text, lines and boxes; scales, axes with round numbers; units.

Pictures have no background. Shapes have colours of middle lightness, for light and dark pages; text has a colour for
each, with a contrast of at least 4.5 : 1 (WCAG 2.2, 1.4.3). NEUTRAL is for lines and shapes: as text it is too pale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#3b76c4", "#c4513d", "#2b8550", "#8e5fc0", "#a16916", "#1a808f", "#bd4a8a", "#6f7b1d")
"""Colours of shapes: white digits on them have a contrast of at least 4.5 : 1, they on white and on black of 3 : 1."""
NEUTRAL = "#808890"
TEXT, TEXT_ON_DARK = "#59636e", "#9aa4af"
"""Colours of text on light and on dark pages."""
PAGE, DARK_PAGE = "#ffffff", "#14171a"
"""Grounds of light and of dark pages."""
ON_CELL = "class='ink'"
"""The style of text on a cell of any colour and opacity: black on light pages, white on dark ones."""
_LIGHT = f"svg{{fill:{TEXT}}}.ink{{fill:#000}}"
_DARK = f"svg{{fill:{TEXT_ON_DARK}}}.ink{{fill:#fff}}"
_BOTH = "svg{color-scheme:light dark}"
"""A browser that shows the file by itself then gives it the ground that its colours of text are made for."""
STYLE = f"<style>{_BOTH}{_LIGHT}@media(prefers-color-scheme:dark){{{_DARK}}}</style>"
FONT = "font-family='system-ui, sans-serif'"
MIDDLE, END, SMALL, BOLD = "text-anchor='middle'", "text-anchor='end'", "font-size='11'", "font-weight='600'"
"""Styles of text."""
LIMIT = COLOURS[1]
DASHES = f"stroke='{LIMIT}' stroke-width='2' stroke-dasharray='6 4'"
"""Line of a device's memory, in every picture of memory."""
LETTER = 6.6
"""Pixels of a letter of size 11, generously."""


def document(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """Returns an SVG document of `width` × `height` pixels that consists of `parts` and is called `title`."""
    size = f"viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' height='{height:.0f}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' {FONT} font-size='12' fill='{TEXT}'>{STYLE}"
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>\n"])


def for_ground(svg: str, dark: bool) -> str:
    """Returns a document that ignores the reader's preference: for a dark ground, or for a light one."""
    only = svg.replace(STYLE, f"<style>{_DARK if dark else _LIGHT}</style>")
    return only.replace(f"font-size='12' fill='{TEXT}'", f"font-size='12' fill='{TEXT_ON_DARK}'") if dark else only


def heading(x: float, y: float, title: str) -> str:
    """Returns the visible title of a picture."""
    return text(x, y, title, "font-size='15' font-weight='600'")


def text(x: float, y: float, words: str, style: str = "") -> str:
    """Returns words whose baseline begins at a point; `style` are further attributes."""
    return f"<text x='{x:.1f}' y='{y:.1f}'{style and f' {style}'}>{escape(words)}</text>"


def rule(x1: float, y1: float, x2: float, y2: float, style: str = "") -> str:
    """Returns a line in the neutral colour."""
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{NEUTRAL}'{style and f' {style}'}/>"


def box(x: float, y: float, width: float, height: float, style: str, tip: str = "") -> str:
    """Returns a rectangle with the tooltip `tip`."""
    drawn = f"<rect x='{x:.1f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}' {style}"
    return f"{drawn}><title>{escape(tip)}</title></rect>" if tip else f"{drawn}/>"


def circle(x: float, y: float, radius: float, style: str, tip: str = "") -> str:
    """Returns a dot or a ring with the tooltip `tip`."""
    drawn = f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius:g}' {style}"
    return f"{drawn}><title>{escape(tip)}</title></circle>" if tip else f"{drawn}/>"


def limit_line(x1: float, y1: float, x2: float, y2: float, tip: str = "") -> str:
    """Returns the dashed line of what a device has."""
    drawn = f"<line class='limit' x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' {DASHES}"
    return f"{drawn}><title>{escape(tip)}</title></line>" if tip else f"{drawn}/>"


def polyline(points: Iterable[tuple[float, float]], style: str) -> str:
    """Returns a line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f"<polyline points='{path}' fill='none' {style}/>"


def interval(low: float, high: float, y: float) -> str:
    """Returns a horizontal line with an end mark at either end, for a range of eight of ten measurements."""
    path = f"M{low:.1f},{y - 4:.1f} v8 m0,-4 H{high:.1f} m0,-4 v8"
    return f"<path class='interval' d='{path}' fill='none' stroke='{NEUTRAL}' stroke-width='1.5'/>"


def group(name: str, parts: Iterable[str]) -> Iterator[str]:
    """Yields parts of a picture as one group of the class `name`."""
    yield f"<g class='{name}'>"
    yield from parts
    yield "</g>"


def shortened(words: str, letters: int) -> str:
    """Truncates a longer text."""
    return words if len(words) <= letters else f"{words[: letters - 1]}…"


def fill_of(colour: str, pale: bool = False) -> str:
    """Returns a colour as attributes; pale with a border for what nothing uses."""
    return f"fill='{colour}' fill-opacity='.25' stroke='{colour}' stroke-width='.5'" if pale else f"fill='{colour}'"


@dataclass(frozen=True)
class Scale:
    """One axis of a plot: values from `low` to `high` lie at the pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Returns the place of a value in pixels."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, log: bool = False) -> Scale:
        """Returns the scale of some values, which is never empty; a logarithmic one has a margin at both ends."""
        low, high = min(values), max(values)
        if log:
            room = max(1.02, (high / low) ** 0.06)
            return cls(low / room, high * room, start, end, log)
        return cls(low, high, start, end) if high > low else cls(low - 0.5, high + 0.5, start, end)


Marks = Iterable[tuple[float, str]]
"""Values at an axis with their labels."""


def across(scale: Scale, marks: Marks, top: float, bottom: float, style: str = MIDDLE) -> Iterator[str]:
    """Yields upright lines from `top` to `bottom`, with labels below them."""
    for value, label in marks:
        yield rule(scale(value), top, scale(value), bottom, "stroke-opacity='.2'")
        yield text(scale(value), bottom + 16, label, style)


def upwards(scale: Scale, marks: Marks, left: float, right: float) -> Iterator[str]:
    """Yields horizontal lines from `left` to `right`, with labels to their left."""
    for value, label in marks:
        yield rule(left, scale(value), right, scale(value), "stroke-opacity='.2'")
        yield text(left - 6, scale(value) + 4, label, END)


def axes(x: Scale, y: Scale, x_marks: Marks, y_marks: Marks, x_name: str, y_name: str) -> Iterator[str]:
    """Yields the lines, labels and names of a plot's two axes."""
    yield from across(x, x_marks, y.end, y.start)
    yield from upwards(y, y_marks, x.start, x.end)
    yield text((x.start + x.end) / 2, y.start + 38, x_name, MIDDLE)
    place = f"{x.start - 46:g} {(y.start + y.end) / 2:g}"
    yield f"<text transform='translate({place}) rotate(-90)' {MIDDLE}>{escape(y_name)}</text>"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 10, factors: Sequence[int] = (1, 2, 5)) -> list[float]:
    """Returns at most `most` round numbers for a logarithmic axis: `factors` times powers of ten, only powers if those
    are too many, and linear ones if they are too few."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]
    if len(found) > most:
        found = [tick for tick in found if abs(math.log10(tick) - round(math.log10(tick))) < 1e-9]
        return found[:: math.ceil(len(found) / most)]
    return found if len(found) > 2 else ticks(low, high, 7)


def short(value: float, form: str = ".3g") -> str:
    """Formats 1,000,000,000 as 1G, and 0.02 as it is."""
    for power, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power * (1 - 1e-9):
            return f"{value / power:{form}}{letter}"
    return f"{value:{form}}"


def binary(value: float) -> str:
    """Formats 65536 as 64Ki."""
    for power, letters in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if value >= power:
            return f"{value / power:g}{letters}"
    return f"{value:g}"


def digits(value: float) -> str:
    """Formats a number to three digits, larger ones in full."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def seconds(value: float) -> str:
    """Formats a time in a suitable unit, to three digits."""
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if value >= 0.9995 * s), ("µs", 1e-6))
    return f"{digits(value / size)} {unit}"
