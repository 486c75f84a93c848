"""Differences between two states: found, measured and placed, in any boxes and types."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoint.test_validity import SHARDS
from phalanx.checkpoint import diff
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.diff import MISSING, FieldDifference, compare
from phalanx.checkpoint.inventory import Retention
from phalanx.checkpoint.manifest import Box
from phalanx.checkpoint.parts import Part
from phalanx.checkpoint.save import Save, save_tensors
from phalanx.errors import DamagedCheckpointError

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
    found = diff._values(W.double(), other)
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
