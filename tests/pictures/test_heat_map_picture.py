"""Heat maps and rows of histograms: well-formed, inside the picture, and no label covers another."""

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.pictures.heat_map import MOST_ROWS, NUMBERED_ROWS, heat_map, histograms

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
