"""Digests: any flipped bit and any two values that change places give another one, and equal bits the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.train.replicas import Difference, digests, words

CPU = torch.device("cpu")
KINDS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
SIZES = st.integers(1, 3000)


def digest(tensor: torch.Tensor) -> int:
    return int(digests([tensor], CPU).item())


def drawn(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(size=SIZES, dtype=st.sampled_from([*KINDS]), place=st.floats(0, 0.999), bit=st.integers(0, 63))
def test_any_flipped_bit_changes_the_digest(size, dtype, place, bit):
    tensor = drawn(size, dtype)
    before, bits = digest(tensor), tensor.view(KINDS[dtype])
    width = 8 * tensor.element_size()
    bits[int(place * size)] ^= torch.tensor(1 << bit % width if bit % width < width - 1 else -(1 << (width - 1)))
    assert digest(tensor) != before
    assert not torch.equal(words(tensor), words(drawn(size, dtype)))


@given(size=st.integers(2, 3000), places=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)))
def test_values_that_change_places_change_the_digest(size, places):
    tensor = drawn(size, torch.float32)
    one, other = (int(place * size) for place in places)
    assume(tensor[one] != tensor[other])
    before = digest(tensor)
    tensor[[one, other]] = tensor[[other, one]]
    assert digest(tensor) != before


@given(size=st.integers(4, 3000), bits=st.lists(st.integers(0, 31), min_size=2, max_size=3), data=st.data())
def test_the_same_bit_flipped_in_two_or_three_places_changes_the_digest(size, bits, data):
    """Sign bits cancel in a plain sum of words."""
    tensor = drawn(size, torch.float32)
    before = digest(tensor)
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=len(bits), max_size=len(bits), unique=True))
    tensor[places] *= -1
    assert digest(tensor) != before


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_digest_depends_neither_on_where_a_tensor_lies_nor_on_those_beside_it(dtype):
    around = drawn(2001, dtype)
    part = around[7:1000]
    alone = digest(part.clone())
    assert digest(part) == alone
    assert digests([around, part, None, part[:0]], CPU)[1:3].tolist() == [alone, 0]
    assert digest(around[:1998].view(2, 999).t()) == digest(around[:1998].view(2, 999).t().contiguous())


def test_a_majority_is_more_than_half():
    of = {
        (1, 1, 2): ([0, 1], [2]),
        (1, 2): ([], [0, 1]),
        (1, 1, 2, 2): ([], [0, 1, 2, 3]),
        (5, 1, 5, 5): ([0, 2, 3], [1]),
    }
    for found, (good, suspects) in of.items():
        difference = Difference(0, "parameter", "w", dict(enumerate(found)))
        assert (difference.good, difference.suspects) == (good, suspects)
