"""The pictures of runs: curves, fits, heat maps, profiles and goodput."""

import math
import xml.etree.ElementTree as ET
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.cluster import Accelerator, Cluster, Link
from phalanx.cost.communication import RankGroup
from phalanx.cost.fit import AttentionTiming, ProductTiming, StreamTiming, Transfer, device_rows
from phalanx.pictures import profile
from phalanx.pictures.curves import WIDTH, Chart, Curve, svg
from phalanx.pictures.heat_map import MOST_ROWS, NUMBERED_ROWS, divergence_map, heat_map, histograms
from phalanx.pictures.panels import Panel, device_svg, link_svg, panels_svg
from phalanx.pictures.timeline import SIZES, goodput_svg
from phalanx.simulate.goodput import LLAMA_3_RATE

# Curves over steps: well-formed, thinned, and readable where values are equal, few or far apart.


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


# The picture of a fit: well-formed, every measurement a dot, every fit a line.

DEVICE = Accelerator("a & b", fp32_tflops=0.2, ceiling=1.0, bandwidth_gbs=40, launch_us=5)


def elements(svg: str, name: str) -> list[ET.Element]:
    return [element for element in ET.fromstring(svg).iter() if element.tag.endswith(name)]


def test_a_device_has_a_dot_for_each_measurement_and_a_line_for_each_family():
    products = [ProductTiming(f"family {n % 2}", n, n, n, 1e-9 * n**2) for n in (64, 65, 512, 513)]
    attentions = [AttentionTiming(n, 8, 64, back, 1e-3) for n in (128, 256) for back in (False, True)]
    streams = [StreamTiming("copy", 1e6, 1e-4), StreamTiming("copy", 2e8, 1e-2), StreamTiming("tiny add", 1e3, 1e-6)]
    svg = device_svg("a & b", products, attentions, streams, device_rows(DEVICE, "fp32", products, attentions, streams))
    assert len([dot for dot in elements(svg, "circle") if dot.get("class") == "measured"]) == 4 + 4 + 2
    assert len(elements(svg, "polyline")) == 2 + 2 + 1
    texts = {element.text for element in elements(svg, "text")}
    assert {"a & b", "family 0", "family 1", "forward", "backward", "copy"} <= texts
    assert "tiny add" not in texts  # one point is no line


def test_links_have_a_row_for_each_collective_and_a_line_for_each_group():
    machine = Cluster(devices_per_node=4, intra=Link(2.0, 50, 1.0))
    groups = [
        (
            machine,
            [Transfer(name, size, RankGroup(n), 1e-3) for name in ("send", "all_reduce") for size in (1024, 2**20)],
        )
        for n in (2, 4)
    ]
    svg = link_svg("links", groups)
    assert svg.count("class='panel'") == 4
    assert len(elements(svg, "polyline")) == 8
    assert all(len((line.get("points") or "").split()) == 7 for line in elements(svg, "polyline"))
    assert svg.count("class='measured'") == 16


@given(st.floats(1e-6, 1e9), st.floats(1.01, 1e9), st.sampled_from((2, 10)))
def test_axes_have_some_labels_and_not_too_many(low, factor, base):
    """Both axes have the same values; labels of the y axis have powers of ten."""
    points = {"p": [(low, low), (low * factor, low * factor)]}
    drawn = elements(panels_svg("a", [Panel("", "bytes", "rate", points, dots=points, log=base)]), "text")
    labels = [(e.get("text-anchor"), float(e.get("x") or 0), float(e.get("y") or 0)) for e in drawn if e.text]
    upright = [y - 4 for anchor, _, y in labels if anchor == "end"]
    across = [x for anchor, x, y in labels if anchor == "middle" and y == 276]
    for places, end in ((upright, 260), (across, 400)):
        assert len(places) <= 10
        assert factor < 5 or len(places) >= 2
        assert all(-0.1 <= place <= end + 0.1 for place in places)


def test_one_size_is_a_picture_too():
    svg = link_svg(
        "one", [(Cluster(devices_per_node=2, intra=Link(1, 1)), [Transfer("send", 1024, RankGroup(2), 1e-3)])]
    )
    assert svg.count("class='measured'") == 2
    with pytest.raises(ValueError):
        link_svg("none", [])


# Heat maps and rows of histograms: well-formed, inside the picture, and no label covers another.

SVG = "{http://www.w3.org/2000/svg}"
LETTER = 6.8  # pixels of a letter, generously


def boxes(root):
    """Returns the extent of every text: left, top, right, bottom, words."""
    found = []
    for text in root.iter(f"{SVG}text"):
        words = text.text or ""
        size = float(text.get("font-size", "12"))
        x, y, width = float(text.get("x", 0)), float(text.get("y", 0)), len(words) * LETTER * size / 12
        left = {"middle": x - width / 2, "end": x - width}.get(text.get("text-anchor", ""), x)
        found.append((left, y - 0.75 * size, left + width, y, words))
    return found


def assert_legible(svg):
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width")), float(root.get("height"))
    texts = boxes(root)
    for left, top, right, bottom, words in texts:
        assert left >= -1, words
        assert right <= width + 1, words
        assert top >= 0, words
        assert bottom <= height, words
    for number, one in enumerate(texts):
        for other in texts[:number]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (one, other)
    return root


def square(count):
    return [[math.nan if a == b else 1.0 + (a * 7 + b) % 5 for b in range(count)] for a in range(count)]


@pytest.mark.parametrize("count", [2, 4, NUMBERED_ROWS, 11, 32, MOST_ROWS, 200])
def test_a_heat_map_is_legible(count):
    ranks = {rank: f"a-long-host-name-{rank // 4}" for rank in range(count)}
    root = assert_legible(heat_map("Bandwidth", square(count), ranks, "{:.3g}".format, unit="GB/s", slow=[(0, 1)]))
    cells = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "cell"]
    drawn = min(count, MOST_ROWS)
    assert len(cells) == drawn * (drawn - 1)
    assert sum(box.get("class") == "slow" for box in root.iter(f"{SVG}rect")) == (1 if count <= MOST_ROWS else 0)


def depth(root, sender, receiver):
    for box in root.iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None and (title.text or "").startswith(f"{sender} → {receiver} "):
            return float(box.get("fill-opacity"))
    raise AssertionError("no such cell")


def test_better_pairs_are_darker():
    values = [[math.nan, 1.0, 8.0], [2.0, math.nan, 4.0], [1.0, 1.0, math.nan]]
    ranks = dict.fromkeys(range(3), "h")
    more = ElementTree.fromstring(heat_map("b", values, ranks, str, unit="GB/s"))
    less = ElementTree.fromstring(heat_map("l", values, ranks, str, unit="µs", more_is_better=False))
    assert depth(more, 0, 1) < depth(more, 1, 0) < depth(more, 1, 2) < depth(more, 0, 2) == 1
    assert depth(less, 0, 1) > depth(less, 1, 0) > depth(less, 1, 2) > depth(less, 0, 2)


def test_small_differences_look_small():
    values = [[math.nan, 1.0], [1.01, math.nan]]
    root = ElementTree.fromstring(heat_map("b", values, {5: "h", 9: "h"}, str, unit="GB/s"))
    assert depth(root, 9, 5) - depth(root, 5, 9) < 0.05


def test_nothing_measured_is_a_picture_too():
    values = [[math.nan] * 2] * 2
    assert "class='cell'" not in heat_map("b", values, {0: "<&>", 1: "h"}, str, unit="GB/s")


@pytest.mark.parametrize("count", [1, 2, 32, 50])
def test_histograms_are_legible(count):
    rows = {
        f"rank {rank} (a-host-with-a-very-long-name)": [10 + rank + n % 3 for n in range(20)] for rank in range(count)
    }
    root = assert_legible(histograms("Time of a step", "milliseconds", rows, [next(iter(rows))]))
    medians = [path for path in root.iter(f"{SVG}path") if path.get("class") == "median"]
    assert len(medians) == min(count, 32)


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=40))
def test_every_value_is_in_a_bin(values):
    root = ElementTree.fromstring(histograms("t", "ms", {"rank 0": values}))
    tips = [box.find(f"{SVG}title") for box in root.iter(f"{SVG}rect")]
    counts = [int((tip.text or "").split(": ")[1].split(" of ")[0]) for tip in tips if tip is not None]
    assert sum(counts) == len(values)


def test_no_values_are_refused():
    with pytest.raises(ValueError, match="no values"):
        histograms("t", "ms", {"rank 0": []})


# The picture of a profile: a bar per rank whose parts fill the step, and two bars for each compared part.

PARTS = {"forward": 0.03, "backward": 0.05, "tp exposed": 0.01, "pp waiting": 0.01}
DOCUMENT = {
    "steps": [10, 12],
    "layout": "tp=2,pp=2",
    "ranks": [{"rank": rank, "shares": {"step": 0.1, "parts": PARTS}} for rank in range(3)],
    "compared": {
        "rank": 1,
        "cluster": "local",
        "parts": [
            {"name": "forward", "predicted_s": 0.015, "measured_s": 0.03, "ratio": 2.0},
            {"name": "waiting", "predicted_s": 0.0, "measured_s": 0.01, "ratio": None},
            {"name": "step", "predicted_s": 0.015, "measured_s": 0.04, "ratio": 40 / 15},
        ],
    },
}


def groups(text, name):
    return [g for g in ElementTree.fromstring(text).iter(f"{SVG}g") if g.get("class") == name]


def test_bars_have_the_length_of_their_parts():
    rows = groups(profile.svg(DOCUMENT), "rank")
    assert len(rows) == 3
    widths = [float(rect.get("width", 0)) for rect in rows[0].iter(f"{SVG}rect")]
    assert [round(width / sum(widths), 3) for width in widths] == [0.3, 0.5, 0.1, 0.1]
    first, second = groups(profile.svg(DOCUMENT), "part")[0].iter(f"{SVG}rect")
    assert abs(float(second.get("width", 0)) / float(first.get("width", 1)) - 2) < 0.01


def test_a_profile_without_a_prediction_has_its_ranks_only():
    text = profile.svg({**DOCUMENT, "compared": None, "steps": [3, 3]})
    assert groups(text, "part") == []
    assert "Profile of step 3: tp=2,pp=2" in text


def test_the_axes_of_exposed_communication_differ_in_colour():
    parts = {**PARTS, "pp exposed": 0.005, "pp waiting": 0.005}
    text = profile.svg({**DOCUMENT, "ranks": [{"rank": 0, "shares": {"step": 0.1, "parts": parts}}]})
    (row,) = groups(text, "rank")
    colours = [(rect.get("fill"), rect.get("fill-opacity")) for rect in row.iter(f"{SVG}rect")]
    assert len(set(colours)) == len(parts)


# The picture of productive time: a line a size and a dot at its best, inside the panel.


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


@pytest.mark.parametrize(("modules", "ranks"), [(3, 1), (20, 4), (400, 64)])
def test_a_map_of_a_divergence_is_legible_and_frames_the_first(modules, ranks):
    first = f"blocks.{modules - 2}.attn.wo"
    row = [0.0, *[None] * (ranks - 1)]
    table = {
        way: {f"blocks.{n}.attn.wo": row if n < modules - 2 else [1e-3] * ranks for n in range(modules)}
        for way in ("forward", "backward")
    }
    root = assert_legible(divergence_map("tp=2", ["step 1", "all tokens " * 30], table, ("forward", first), 1e-9))
    frames = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "first"]
    assert [box[0].text for box in frames] == [f"the first that differs: {first}"]
    drawn = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "cell"]
    assert len(drawn) == 2 * (min(modules, 60) - 2 + 2 * ranks)
