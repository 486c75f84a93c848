"""The contrast of every text of a picture with the ground below it, on a light and on a dark page (WCAG 2.2, 1.4.3)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.etree import ElementTree

from phalanx.pictures.elements import DARK_PAGE, PAGE, TEXT, TEXT_ON_DARK

Colour = tuple[float, float, float]
Point = tuple[float, float]
_NUMBER = r"(-?[\d.]+)"
_MOVED = re.compile(rf"translate\({_NUMBER}[ ,]*{_NUMBER}\)")
_BOX = re.compile(rf"M{_NUMBER}[ ,]{_NUMBER}h{_NUMBER}v{_NUMBER}")
_NAMED = {"white": "#ffffff", "black": "#000000"}


class Shape(NamedTuple):
    """A painted polygon."""

    corners: list[Point]
    fill: str
    opacity: float


@dataclass
class _Drawing:
    shapes: list[Shape] = field(default_factory=list)
    texts: list[tuple[str, str, Point, int]] = field(default_factory=list)
    """Words, colour, where they stand, and the number of shapes that were painted before."""


def contrasts(svg: str, *, dark: bool) -> Iterator[tuple[str, float]]:
    """Yields every text of a document with its contrast."""
    drawing = _Drawing()
    _walk(ElementTree.fromstring(svg), (0.0, 0.0), "text", drawing)
    ink = {"text": TEXT_ON_DARK if dark else TEXT, "ink": "#ffffff" if dark else "#000000"}
    for words, colour, at, below in drawing.texts:
        ground = rgb(DARK_PAGE if dark else PAGE)
        for shape in drawing.shapes[:below]:
            if _holds(shape.corners, at):
                over = rgb(ink.get(shape.fill, shape.fill))
                ground = _blended(ground, over, shape.opacity)
        yield words, contrast(rgb(ink.get(colour, colour)), ground)


def _blended(under: Colour, over: Colour, opacity: float) -> Colour:
    red, green, blue = (below + (above - below) * opacity for below, above in zip(under, over, strict=True))
    return red, green, blue


def contrast(one: Colour, other: Colour) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: Colour) -> float:
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def rgb(colour: str) -> Colour:
    digits = _NAMED.get(colour, colour)[1:]
    whole = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    return int(whole[:2], 16) / 255, int(whole[2:4], 16) / 255, int(whole[4:], 16) / 255


def _walk(element: ElementTree.Element, at: Point, fill: str, drawing: _Drawing) -> None:
    """Collects what an element paints; `at` is where its coordinates begin, `fill` the colour that it inherits: "text"
    is that of the page."""
    tag = element.tag.rpartition("}")[2]
    if moved := _MOVED.search(element.get("transform", "")):
        at = at[0] + float(moved[1]), at[1] + float(moved[2])
    fill = "text" if tag == "svg" else element.get("fill", fill)
    if element.get("class") == "ink":
        fill = "ink"
    if tag == "text":
        size, anchor = float(element.get("font-size", 12)), element.get("text-anchor", "start")
        x = float(element.get("x", 0)) + {"start": 2, "middle": 0, "end": -2}[anchor]
        place = at[0] + x, at[1] + float(element.get("y", 0)) - 0.35 * size
        drawing.texts.append((element.text or "", fill, place, len(drawing.shapes)))
    elif fill != "none":
        opacity = float(element.get("fill-opacity", 1))
        for corners in _outlines(tag, element):
            drawing.shapes.append(Shape([(x + at[0], y + at[1]) for x, y in corners], fill, opacity))
    for child in element:
        _walk(child, at, fill, drawing)


def _outlines(tag: str, element: ElementTree.Element) -> Iterator[list[Point]]:
    if tag == "rect":
        yield _box(*(float(element.get(name, 0)) for name in ("x", "y", "width", "height")))
    elif tag == "polygon":
        numbers = [float(number) for number in re.findall(_NUMBER, element.get("points", ""))]
        yield list(zip(numbers[::2], numbers[1::2], strict=True))
    elif tag == "path":
        for found in _BOX.findall(element.get("d", "")):
            yield _box(*map(float, found))


def _box(x: float, y: float, width: float, height: float) -> list[Point]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _holds(corners: list[Point], point: Point) -> bool:
    """Whether a point is inside a polygon: a ray from it crosses the outline an odd number of times."""
    x, y = point
    inside = False
    for (x1, y1), (x2, y2) in zip(corners, [*corners[1:], corners[0]], strict=True):
        if (y1 > y) != (y2 > y) and x < x1 + (y - y1) / (y2 - y1) * (x2 - x1):
            inside = not inside
    return inside
