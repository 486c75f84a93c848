"""Curves over steps: well-formed, thinned, and readable where values are equal, few or far apart."""

from xml.etree import ElementTree

import pytest

from phalanx.pictures.curves import WIDTH, Chart, Curve, svg


def drawn(points, **options) -> ElementTree.Element:
    chart = Chart("a <title>", [Curve("loss & more", points)], lambda value: f"{value:.3g}", **options)
    return ElementTree.fromstring(svg(chart, alone=True))


def lines(root) -> list[str]:
    return [each.get("points", "") for each in root.iter("{http://www.w3.org/2000/svg}polyline")]


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(0, 0.0), (1, 0.0)], [(1, 1e-12), (2, 1e12)]])
@pytest.mark.parametrize("zero", [False, True])
def test_few_and_equal_points(points, zero):
    assert lines(drawn(points, from_zero=zero, robust=True))


def test_a_long_curve_is_thinned_but_keeps_its_extremes():
    points = [(step, 100.0 if step == 5000 else 1.0) for step in range(100_000)]
    root = drawn(points)
    assert max(len(line.split()) for line in lines(root)) <= 240
    assert root.find(".//{http://www.w3.org/2000/svg}polygon") is not None
    assert len(ElementTree.tostring(root)) < 30_000


def test_an_outlier_leaves_a_robust_picture():
    points = [(step, 1000.0 if step == 1 else step / 100) for step in range(1, 101)]
    labels = [text.text for text in drawn(points, robust=True).iter("{http://www.w3.org/2000/svg}text")]
    assert "0.5" in labels
    assert "1000" not in labels


def test_the_legend_has_as_many_lines_as_its_names_need():
    names = [f"run-{at} (micro_batch={at}, recompute=selective)" for at in range(7)]
    curves = [Curve(name, [(1, 2.0), (2, 1.0)], at) for at, name in enumerate(names)]
    root = ElementTree.fromstring(svg(Chart("many", curves, lambda value: f"{value:.3g}")))
    shown = [text for text in root.iter("{http://www.w3.org/2000/svg}text") if (text.text or "").startswith("run-")]
    assert [text.text for text in shown] == [f"{name} 1" for name in names]
    assert all(float(text.get("x", 0)) + 6.6 * len(text.text or "") <= WIDTH for text in shown)
    assert len({text.get("y") for text in shown}) == 7


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="no points"):
        drawn([])
