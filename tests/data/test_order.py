"""The order is a permutation for every size, every epoch has its own, and any position can be computed alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.loader import order_key, permute, sample_ids


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_permute_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    taken = permute(np.arange(n), n, order_key(seed, epoch))
    assert taken.dtype == np.int64
    assert np.array_equal(np.sort(taken), np.arange(n))


@given(n=st.integers(1, 2**62), data=st.data())
def test_any_position_can_be_asked_alone(n: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8)))
    key = order_key(7, 3)
    together = permute(index, n, key)
    assert ((together >= 0) & (together < n)).all()
    assert together.tolist() == [int(permute(np.array(i), n, key)) for i in index]
    assert len(set(together.tolist())) == len(set(index.tolist()))


def test_shape_is_kept_and_outside_is_refused() -> None:
    key = order_key(0, 0)
    assert permute(np.arange(12).reshape(3, 4), 50, key).shape == (3, 4)
    assert permute(np.empty(0, np.int64), 50, key).shape == (0,)
    with pytest.raises(ValueError, match=r"outside \[0, 50\): 3 \.\. 50"):
        permute(np.array([3, 50]), 50, key)
    with pytest.raises(ValueError, match="outside"):
        permute(np.array([-1]), 50, key)


@pytest.mark.parametrize("n", [2, 3, 7, 10])
def test_every_place_is_equally_likely(n: int) -> None:
    trials = 2000
    counts = np.zeros((n, n))
    for seed in range(trials):
        counts[np.arange(n), permute(np.arange(n), n, order_key(seed, 0))] += 1
    expected = trials / n
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert chi2 < freedom + 6 * np.sqrt(2 * freedom)


def test_neighbours_are_not_kept_together() -> None:
    n = 10_000
    taken = permute(np.arange(n), n, order_key(1, 0))
    assert abs(np.corrcoef(taken[:-1], taken[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(np.arange(n), taken)[0, 1]) < 0.04


def test_order_is_fixed_for_good() -> None:
    """A change here would make every run that resumes read other samples."""
    assert permute(np.arange(10), 10, order_key(1337, 0)).tolist() == [0, 4, 9, 2, 3, 6, 1, 7, 8, 5]


@given(first=st.integers(0, 500), count=st.integers(1, 120), n=st.integers(1, 60), seed=st.integers(0, 100))
def test_sample_ids_do_not_depend_on_where_one_starts(first: int, count: int, n: int, seed: int) -> None:
    whole = sample_ids(0, first + count, n, seed)
    assert np.array_equal(sample_ids(first, count, n, seed), whole[first:])


def test_each_epoch_visits_every_sample_once_in_its_own_order() -> None:
    n = 100
    epochs = sample_ids(0, 3 * n, n, seed=1).reshape(3, n)
    assert (np.sort(epochs, axis=1) == np.arange(n)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert not np.array_equal(epochs[0], sample_ids(0, n, n, seed=2))
