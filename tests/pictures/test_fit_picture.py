"""The picture of a fit: well-formed, every measurement a dot, every fit a line."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.cluster import Accelerator, Cluster, Link
from phalanx.cost.communication import RankGroup
from phalanx.cost.fit import AttentionTiming, ProductTiming, StreamTiming, Transfer, device_rows
from phalanx.pictures.panels import Panel, device_svg, link_svg, panels_svg

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
