"""The picture of productive time: a line a size and a dot at its best, inside the panel."""

from xml.etree import ElementTree

from phalanx.pictures.timeline import SIZES, goodput_svg
from phalanx.simulate.goodput import LLAMA_3_RATE

SVG = "{http://www.w3.org/2000/svg}"


def test_each_size_has_its_line_with_a_dot_at_its_top():
    root = ElementTree.fromstring(goodput_svg(SIZES, LLAMA_3_RATE, (30.0, 3.0), 600.0))
    panels = root.findall(f"{SVG}g[@class='panel']")
    assert len(panels) == 2
    for panel in panels:
        dots = {dot.get("fill"): dot for dot in panel.iter(f"{SVG}circle")}
        lines = list(panel.iter(f"{SVG}polyline"))
        assert len(lines) == len(dots) == 4
        for line in lines:
            heights = [float(point.split(",")[1]) for point in (line.get("points") or "").split()]
            dot = dots[line.get("stroke")]
            assert abs(float(dot.get("cy", 0)) - min(heights)) < 1
            assert 0 <= float(dot.get("cx", -1)) <= 400


def test_what_is_best_outside_the_picture_has_no_dot():
    panel = ElementTree.fromstring(goodput_svg((1, 16384), LLAMA_3_RATE, (30.0, 3.0), 600.0))
    assert len(list(panel.iter(f"{SVG}circle"))) == 2
