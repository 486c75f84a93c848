"""Boxes of flattened tensors, the parts that ranks write, and the differences between two states."""

import math
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoint.contents import save_tensors
from checkpoint.test_save import SHARDS
from phalanx.checkpoint import diff
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.diff import MISSING, FieldDifference, compare
from phalanx.checkpoint.inventory import Retention
from phalanx.checkpoint.manifest import MOST_DIVIDED, Box, flat_boxes, tiles
from phalanx.checkpoint.parts import HeldTensor, Part, is_finite, shares
from phalanx.checkpoint.save import Save
from phalanx.config.model import ModelConfig
from phalanx.errors import DamagedCheckpointError
from phalanx.parallel.parameter_shards import ParameterShard, cut
from phalanx.partition.tensor_slices import slice_of

# Boxes: ranges of flattened tensors as rectangular parts.


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


# The parts that ranks write: every element once, evenly over those that hold the same.

MODEL = ModelConfig(n_layers=1, d_model=16, n_heads=4, n_kv_heads=2, seq_len=8)
LARGER = {
    "embed.weight": (13, 16),  # padded to equal slices
    "blocks.0.attn.wq.weight": (16, 16),
    "blocks.0.attn.wk.weight": (8, 16),  # two heads on four tensor ranks
    "blocks.0.attn.wo.weight": (16, 16),  # cut by columns
    "blocks.0.attn_norm.weight": (16,),  # whole everywhere
}
WHOLE = {name: torch.randn(shape) for name, shape in LARGER.items()}


def state_of(replica, replicas, shard, shards, tp_rank, tp):
    """What the rank at a place of a mesh holds: like a bucket's share, a range of each flattened slice."""
    for name, shape in LARGER.items():
        slices = tuple(slice_of(name, shape, MODEL, tp, rank) for rank in range(tp))
        flat = cut(WHOLE[name], slices[tp_rank]).reshape(-1)
        first, end = (flat.numel() * number // shards for number in (shard, shard + 1))
        value = flat[first:end].clone()
        yield HeldTensor(name, ParameterShard(name, slices, tp_rank, first, value), value, replica, replicas)


def owned(state):
    return [part for share in shares(state) for part in share.parts()]


@pytest.mark.parametrize(
    ("replicas", "shards", "tp"), [(1, 1, 1), (3, 1, 1), (1, 3, 2), (2, 1, 4), (2, 3, 4), (5, 2, 2)]
)
def test_all_ranks_together_write_every_element_once_and_equally_many_bytes(replicas, shards, tp):
    counts = {name: torch.zeros(shape) for name, shape in LARGER.items()}
    written: dict[tuple[int, int], list[int]] = {}
    for replica in range(replicas):
        for shard in range(shards):
            for tp_rank in range(tp):
                parts = owned(state_of(replica, replicas, shard, shards, tp_rank, tp))
                written.setdefault((shard, 0), []).append(sum(part.value.nbytes for part in parts))
                for part in parts:
                    place = part.box.within(Box.of(part.shape))
                    counts[part.tensor][place] += 1
                    assert torch.equal(part.value, WHOLE[part.tensor][place])
    assert all((count == 1).all() for count in counts.values())
    row = 16 * 4
    for sizes in written.values():
        assert max(sizes) - min(sizes) <= 6 * row, (
            "three kinds of sharing, each cut at a row's end; padding is not written"
        )


def test_a_copy_on_another_rank_of_a_pipeline_is_not_written():
    [held, *_] = state_of(0, 1, 0, 1, 0, 1)
    held.shard.copy = True
    assert not owned([held])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_single_bad_element_is_found(dtype, bad):
    tensor = torch.ones(1000, dtype=dtype)
    assert is_finite(tensor)
    tensor[777] = bad
    assert not is_finite(tensor)


def test_what_is_empty_or_whole_numbers_is_finite():
    assert is_finite(torch.empty(0))
    assert is_finite(torch.arange(3))


# Differences between two states: found, measured and placed, in any boxes and types.

W = torch.arange(24.0).view(4, 6)


def save(folder, tensors, meta=None):
    return save_tensors(folder / "checkpoints", 1, tensors, meta or {})


def difference(a, b, **options):
    with open_source(a) as left, open_source(b) as right:
        return compare(left, right, **options)


def values(tmp_path, a, b):
    found = difference(save(tmp_path / "a", {"w": a}), save(tmp_path / "b", {"w": b}))
    return found.tensors[0].values if found.tensors else None


def test_boxes_of_other_ranks_make_no_difference(tmp_path):
    whole = save(tmp_path / "a", {"w": W})
    columns = Save.begin(tmp_path / "b" / "checkpoints", 1, 3, W.nbytes)
    assert columns is not None
    for rank in range(3):
        box = Box((0, 2 * rank), (4, 2))
        columns.write(rank, [Part("w", (4, 6), box, W[:, 2 * rank : 2 * rank + 2])])
    found = difference(whole, columns.commit({}, Retention()))
    assert found.is_empty
    assert found.equal == 1


@given(st.integers(0, 23), st.floats(-1e3, 1e3))
def test_the_largest_difference_is_measured_and_placed(place, change):
    other = W.clone().double()
    other.view(-1)[place] += change
    found = diff.values(W.double(), other)
    if other.view(-1)[place] == W.view(-1)[place]:
        assert found is None
        return
    assert found is not None
    assert found.elements == 1
    assert found.at == (place // 6, place % 6)
    assert (found.a, found.b) == (W.view(-1)[place], other.view(-1)[place])
    assert found.max_abs == abs(found.a - found.b)
    assert found.max_rel == pytest.approx(found.max_abs / max(abs(found.a), abs(found.b)))


def test_large_tensors_are_compared_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(diff, "CHUNK_ELEMENTS", 5)
    other = W.clone()
    other[1, 2], other[3, 4] = 9.0, 30.0
    found = values(tmp_path, W, other)
    assert found is not None
    assert (found.elements, found.max_abs, found.at, found.b) == (2, 8.0, (3, 4), 30.0)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), None),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), (1, math.inf, math.inf)),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf]), (1, math.inf, math.inf)),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), (1, 0.0, 0.0)),
        (torch.tensor([3, 7]), torch.tensor([3, 5]), (1, 2.0, 2 / 7)),
        (torch.tensor([True, False]), torch.tensor([True, True]), (1, 1.0, 1.0)),
    ],
    ids=str,
)
def test_bits_decide_whether_elements_are_equal(tmp_path, a, b, expected):
    found = values(tmp_path, a, b)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.elements, found.max_abs, found.max_rel) == pytest.approx(expected)
    assert found.at == (1,)


def test_scalars_and_empty_tensors(tmp_path):
    found = values(tmp_path, torch.tensor(1.0), torch.tensor(2.0))
    assert found is not None
    assert found.at == ()
    assert values(tmp_path / "e", torch.empty(0, 3), torch.empty(0, 3)) is None


def test_missing_tensors_shapes_types_and_fields_are_named(tmp_path):
    a = {"only a": W, "shape": W, "type": W, "same": W}
    b = {"only b": W, "shape": W.t().contiguous(), "type": W.double(), "same": W}
    left = save(tmp_path / "a", a, {"job": {"lr": 1, "x": math.nan}, "samples": 5})
    right = save(tmp_path / "b", b, {"job": {"lr": 2, "x": math.nan}, "samples": 5, "new": [1]})
    found = difference(left, right)
    assert found.equal == 1
    assert {each.name: (each.a is None, each.b is None, each.values) for each in found.tensors} == {
        "only a": (False, True, None),
        "only b": (True, False, None),
        "shape": (False, False, None),
        "type": (False, False, None),
    }
    assert found.fields == (FieldDifference("job.lr", 1, 2), FieldDifference("new", MISSING, [1]))
    assert not difference(left, right, fields=False).fields
    assert difference(left, right, pattern="same", fields=False).is_empty


def test_a_type_with_less_precision_is_measured(tmp_path):
    one = save(tmp_path / "a", {"w": W + 0.001})
    save_file({"w": (W + 0.001).bfloat16()}, tmp_path / "w.safetensors")
    [found] = difference(one, tmp_path / "w.safetensors").tensors
    assert found.values is not None
    assert 0 < found.values.max_rel < 2**-7


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    one, two = save(tmp_path / "a", {"w": W}), save(tmp_path / "b", {"w": W})
    with open_source(one) as left, open_source(two) as right:
        (two / SHARDS).write_bytes(b"x" * 20)
        with pytest.raises(DamagedCheckpointError, match=f"{SHARDS}: w cannot be read"):
            compare(left, right)
