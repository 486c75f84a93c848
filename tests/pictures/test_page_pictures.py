"""The pictures of a plan: well-formed, of the plan's own figures, and no text over another."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.pictures.elements import log_ticks
from phalanx.pictures.plan_page import ABOVE, memory_picture, space_picture, time_picture
from phalanx.units import gib
from pictures.test_prediction_picture import assert_apart, of_kind, words
from plan.plans import hopeless, plan


def test_bars_are_as_long_as_their_parts() -> None:
    best = plan().best
    for drawn, values in (
        (time_picture(best), [each.prediction.parts.items() for each in best]),
        (memory_picture(best), [each.prediction.fullest.parts() for each in best]),
    ):
        root = ET.fromstring(drawn)
        assert_apart(root)
        rows = of_kind(root, "}g", "row")
        assert len(rows) == len(best)
        scales = []
        for row, parts in zip(rows, values, strict=True):
            boxes = of_kind(row, "}rect")
            assert len(boxes) == sum(1 for _, size in parts if size)
            length = sum(float(each.get("width", 0)) for each in boxes)
            scales.append(length / sum(size for _, size in parts))
        assert scales == pytest.approx([scales[0]] * len(scales), rel=1e-3)


def test_the_mark_stands_at_the_simulated_time() -> None:
    root = ET.fromstring(time_picture(plan().best))
    for row, each in zip(of_kind(root, "}g", "row"), plan().best, strict=True):
        boxes, (mark,) = of_kind(row, "}rect"), of_kind(row, "}line", "mark")
        left = float(boxes[0].get("x", 0))
        length = sum(float(box.get("width", 0)) for box in boxes)
        share = (float(mark.get("x1", 0)) - left) / length
        assert share == pytest.approx(each.seconds / each.prediction.step_time_s, abs=1e-3)


def test_the_limit_lies_before_what_does_not_fit() -> None:
    least = hopeless().nearest
    assert least
    for shown, fits in ((plan().best, True), ((least,), False)):
        root = ET.fromstring(memory_picture(shown))
        limit, *_ = of_kind(root, "}line", "limit")
        ends = [float(box.get("x", 0)) + float(box.get("width", 0)) for box in of_kind(root, "}rect")]
        assert (max(ends) <= float(limit.get("x1", 0))) == fits


def test_the_map_has_a_dot_a_layout_and_rings_the_best() -> None:
    root = ET.fromstring(space_picture(plan()))
    assert_apart(root)
    dots = of_kind(root, "}circle", "point")
    bytes_limit = plan().best[0].prediction.memory_limit
    near = [point for point in plan().points if point.peak <= ABOVE * bytes_limit]
    assert 0 < len(dots) == len(near) < len(plan().points)
    assert (
        f"; {len(plan().points) - len(near)} others of the sample need more than {gib(ABOVE * bytes_limit)}"
        in words(root)[1]
    )
    assert sum(dot.get("fill") == "none" for dot in dots) == sum(not point.fits for point in near)
    (limit,) = of_kind(root, "}line", "limit")
    for dot, point in zip(dots, sorted(near, key=lambda point: point.fits), strict=True):
        if abs(point.peak / bytes_limit - 1) > 1e-3:  # a full device's allocator gives back: peak and limit are one
            assert (float(dot.get("cy", 0)) > float(limit.get("y1", 0))) == (point.peak < bytes_limit)
    usual = [each.candidate.prediction.fullest.peak for each in plan().alternatives if each.candidate]
    assert len(of_kind(root, "}path", "diamond")) == 1 + sum(peak <= ABOVE * bytes_limit for peak in usual)
    assert "best" in words(root)
    assert set(Counter(point.family for point in near)) <= set(words(root))
    assert f"memory per device: {gib(bytes_limit)}" in words(root)


def test_the_map_where_nothing_fits_and_where_there_is_nothing() -> None:
    assert "needs least" in words(ET.fromstring(space_picture(hopeless())))
    with pytest.raises(ValueError, match="no layouts"):
        space_picture(replace(hopeless(), points=(), nearest=None))


@given(low=st.floats(1e-6, 1e6), factor=st.floats(1.05, 1e9))
def test_logarithmic_ticks_are_few_and_inside(low: float, factor: float) -> None:
    found = log_ticks(low, low * factor)
    assert 1 <= len(found) <= 12
    assert found == sorted(found)
    assert all(low * (1 - 1e-6) <= tick <= low * factor * (1 + 1e-6) for tick in found)
