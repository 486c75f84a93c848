"""Line plots: well-formed, every line there, inside its panel, and round numbers at the axes."""

from xml.etree import ElementTree

import pytest

from phalanx.pictures.elements import (
    COLOURS,
    DARK_PAGE,
    ON_CELL,
    PAGE,
    TEXT,
    TEXT_ON_DARK,
    box,
    document,
    text,
    ticks,
)
from phalanx.pictures.panels import Panel, panels_svg
from pictures.contrast import contrast, contrasts, rgb

SVG = "{http://www.w3.org/2000/svg}"


def test_every_panel_has_its_lines_and_a_name_has_one_colour():
    lines = {"bsp & co": [(0, 4.0), (100, 2.5)], "asp": [(0, 4.0), (50, 3.0), (100, 1.5)]}
    panels = [Panel("a", "steps", "loss", lines), Panel("b", "seconds", "loss", {"asp": [(0.5, 4.0), (3.0, 1.5)]})]
    root = ElementTree.fromstring(panels_svg("Loss <of two>", panels))
    first, second = root.findall(f"{SVG}g[@class='panel']")
    shown = [[line.get("stroke") for line in panel.iter(f"{SVG}polyline")] for panel in (first, second)]
    assert len(set(shown[0])) == 2
    assert shown[1] == [shown[0][1]]
    assert [text.text for text in root.findall(f"{SVG}text")] == ["Loss <of two>", "bsp & co", "asp"]
    for line in root.iter(f"{SVG}polyline"):
        places = [tuple(map(float, point.split(","))) for point in (line.get("points") or "").split()]
        assert all(0 <= x <= 400 and 0 <= y <= 260 for x, y in places)
        assert places[0][1] < places[-1][1], "a falling loss falls"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 100, [0, 20, 40, 60, 80, 100]), (1.13, 1.9, [1.2, 1.4, 1.6, 1.8]), (0, 3, [0, 1, 2, 3])],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_one_point_is_a_plot_and_none_is_refused():
    assert "polyline" in panels_svg("one", [Panel("a", "x", "y", {"p": [(1.0, 1.0)]})])
    with pytest.raises(ValueError, match="panel 'a' has no points"):
        panels_svg("none", [Panel("a", "x", "y", {})])


def test_text_and_digits_have_the_contrast_of_wcag():
    light, dark = rgb(PAGE), rgb(DARK_PAGE)
    assert contrast(rgb(TEXT), light) >= 4.5
    assert contrast(rgb(TEXT_ON_DARK), dark) >= 4.5
    assert contrast(rgb(TEXT_ON_DARK), rgb("#1e2226")) >= 4.5  # the cards of dark pages
    assert min(contrast(rgb(colour), light) for colour in COLOURS) >= 4.5
    assert min(contrast(rgb(colour), dark) for colour in COLOURS) >= 3


def test_contrast_is_that_of_the_topmost_ground():
    """A pale cell on a page, text on the page, and lines that only look like cells."""
    parts = [
        box(0, 0, 40, 20, "fill='#3b76c4' fill-opacity='.5'"),
        text(10, 14, "cell", ON_CELL),
        text(100, 14, "page", "text-anchor='end'"),
        "<g transform='translate(50 50)'>",
        box(0, 0, 9, 9, "fill='#000'") + text(1, 8, "low", "fill='#333'"),
        "</g>",
    ]
    svg = document("a", 200, 100, parts)
    light, dark = (dict(contrasts(svg, dark=mode)) for mode in (False, True))
    blue = tuple((1 + part) / 2 for part in rgb("#3b76c4"))
    assert light["cell"] == pytest.approx(contrast((0.0, 0.0, 0.0), (blue[0], blue[1], blue[2])))
    assert light["page"] == pytest.approx(contrast(rgb(TEXT), rgb(PAGE)))
    assert dark["page"] == pytest.approx(contrast(rgb(TEXT_ON_DARK), rgb(DARK_PAGE)))
    assert light["low"] == dark["low"] < 2
