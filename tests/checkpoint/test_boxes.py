"""Boxes: ranges of flattened tensors as rectangular parts."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.manifest import MOST_DIVIDED, Box, flat_boxes, tiles

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_hold_a_range_of_the_flattened_tensor_in_order(shape, data):
    elements = prod(shape)
    start = data.draw(st.integers(0, elements))
    stop = data.draw(st.integers(start, elements))
    whole = torch.arange(elements).view(shape)
    boxes = list(flat_boxes(shape, start, stop))
    held = [whole[box.within(Box.of(shape))].reshape(-1) for box in boxes]
    assert torch.cat([torch.empty(0), *held]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.fits(shape) for box in boxes)


@given(SHAPES, st.data())
def test_an_intersection_is_what_two_boxes_have_in_common(shape, data):
    def box() -> Box:
        offsets = [data.draw(st.integers(0, n - 1)) for n in shape]
        return Box(tuple(offsets), tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))

    whole, one, two = torch.zeros(shape, dtype=torch.int64), box(), box()
    for each in (one, two):
        whole[each.within(Box.of(shape))] += 1
    common = one.intersection(two)
    assert (whole == 2).sum() == (common.elements if common else 0)
    if common:
        assert torch.zeros(one.sizes)[common.within(one)].shape == common.sizes
        assert (whole[common.within(Box.of(shape))] == 2).all()


@pytest.mark.parametrize(
    ("box", "fits"),
    [
        (Box((0, 1), (2, 2)), True),
        (Box((0, 2), (2, 2)), False),
        (Box((-1, 0), (1, 1)), False),
        (Box((0,), (2,)), False),
        (Box((0, 0), (-1, 2)), False),
    ],
    ids=str,
)
def test_a_box_outside_of_a_tensor_is_noticed(box, fits):
    assert box.fits((2, 3)) == fits


def test_keys_name_the_tensor_and_the_indices():
    assert Box.of((4, 3)).key("w", (4, 3)) == "w"
    assert Box((2, 0), (2, 3)).key("w", (4, 3)) == "w[2:4,0:3]"
    assert Box((), ()).key("scalar", ()) == "scalar"


@st.composite
def tilings(draw, shape):
    """Boxes that tile a tensor of `shape`, by cuts of cuts."""
    boxes = [Box.of(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.sizes[dim]))
        boxes += [box.moved(dim, 0, cut), box.moved(dim, cut, box.sizes[dim] - cut)]
    return boxes


@given(SHAPES, st.data())
def test_boxes_tile_a_tensor_exactly_if_they_hold_every_element_once(shape, data):
    boxes = data.draw(tilings(shape))
    assert tiles(boxes, shape)
    for _ in range(data.draw(st.integers(1, 3))):  # a moved box often keeps the number of elements
        number = data.draw(st.integers(0, len(boxes) - 1))
        if shape:
            box, dim = boxes[number], data.draw(st.integers(0, len(shape) - 1))
            boxes[number] = box.moved(dim, data.draw(st.integers(-2, 2)), box.sizes[dim])
    inside = [box for box in boxes if box.fits(shape)]
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in inside:
        counts[box.within(Box.of(shape))] += 1
    assert tiles(inside, shape) == bool((counts == 1).all())


def test_overlapping_boxes_whose_elements_add_up_do_not_tile():
    assert not tiles([Box((0, 0), (1, 4)), Box((0, 2), (2, 2))], (2, 4))
    assert not tiles([Box((0,), (2,)), Box((0,), (2,))], (4,))
    assert tiles([], (0, 3))
    assert tiles([Box((0, 0), (0, 3)), Box((0, 0), (0, 3))], (0, 3))


def test_many_boxes_and_many_dimensions_are_checked():
    """Comparing all pairs of these boxes would take minutes."""
    grid = [Box((row, column, 0), (1, 1, 7)) for row in range(200) for column in range(200)]
    assert tiles(grid, (200, 200, 7))
    assert not tiles([*grid[:-1], grid[0]], (200, 200, 7))
    shape = (2,) * 64
    halves = [Box.of(shape).moved(dim, 0, 1) for dim in range(MOST_DIVIDED + 1)]
    assert not tiles([*halves, *halves], shape)
