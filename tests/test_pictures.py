"""Line plots: well-formed, every line there, inside its panel, and round numbers at the axes."""

from xml.etree import ElementTree

import pytest

from phalanx.pictures.canvas import Panel, svg
from phalanx.pictures.elements import COLOURS, TEXT, TEXT_ON_DARK, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_every_panel_has_its_lines_and_a_name_has_one_colour():
    lines = {"bsp & co": [(0, 4.0), (100, 2.5)], "asp": [(0, 4.0), (50, 3.0), (100, 1.5)]}
    panels = [Panel("a", "steps", "loss", lines), Panel("b", "seconds", "loss", {"asp": [(0.5, 4.0), (3.0, 1.5)]})]
    root = ElementTree.fromstring(svg("Loss <of two>", panels))
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
    assert "polyline" in svg("one", [Panel("a", "x", "y", {"p": [(1.0, 1.0)]})])
    with pytest.raises(ValueError, match="panel 'a' has no points"):
        svg("none", [Panel("a", "x", "y", {})])


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_digits_have_the_contrast_of_wcag():
    assert contrast(TEXT, "#ffffff") >= 4.5
    assert contrast(TEXT_ON_DARK, "#1e2226") >= 4.5  # the cards of dark pages
    assert min(contrast(colour, "#ffffff") for colour in COLOURS) >= 4.5
    assert min(contrast(colour, "#14171a") for colour in COLOURS) >= 3
