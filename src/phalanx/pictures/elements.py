"""The elements of every picture: an SVG document, its text, lines and boxes, and round numbers for axes.

Pictures have no background. Shapes have colours of middle lightness, for light and dark pages; text has a colour for
each, with a contrast of at least 4.5 : 1 (WCAG 2.2, 1.4.3). NEUTRAL is for lines and shapes: as text it is too pale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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


def fill_of(colour: str, pale: bool = False) -> str:
    """Returns a colour as attributes; pale with a border for what nothing uses."""
    return f"fill='{colour}' fill-opacity='.25' stroke='{colour}' stroke-width='.5'" if pale else f"fill='{colour}'"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def digits(value: float) -> str:
    """Formats a number to three digits, larger ones in full."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def seconds(value: float) -> str:
    """Formats a time in a suitable unit, to three digits."""
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if value >= 0.9995 * s), ("µs", 1e-6))
    return f"{digits(value / size)} {unit}"
