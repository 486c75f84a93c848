"""The integers of the self-test: exact in bf16 at any number of ranks, and every rank counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.machine.collectives import CONTRIBUTORS, EXACT, extreme, integers, total


@given(ranks=st.integers(1, 400), n=st.integers(0, 50), start=st.integers(0, 1000))
def test_every_partial_sum_is_exact_in_bf16(ranks, n, start):
    narrow, exact = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int64)
    for rank in range(ranks):
        exact += integers(rank, ranks, n, start)
        narrow += integers(rank, ranks, n, start).to(torch.bfloat16)
    assert torch.equal(narrow.to(torch.int64), exact)
    assert torch.equal(total(ranks, n, start), exact)
    assert bool((exact < EXACT).all())


@given(ranks=st.integers(2, 200), rank=st.integers(0, 199))
def test_every_rank_changes_some_element(ranks, rank):
    """A rank whose contribution got lost is noticed."""
    assert bool(integers(rank % ranks, ranks, 512).any())


def test_ranks_contribute_different_values():
    for ranks in (2, 3, 8, CONTRIBUTORS):
        rows = torch.stack([integers(rank, ranks, 31) for rank in range(ranks)])
        assert len({tuple(row.tolist()) for row in rows}) == ranks
        assert torch.equal(extreme(ranks, 31, largest=True), rows.amax(0))
        assert torch.equal(extreme(ranks, 31, largest=False), rows.amin(0))


def test_a_part_of_a_contribution_is_that_of_the_whole():
    assert torch.equal(integers(2, 5, 100)[30:40], integers(2, 5, 10, 30))


def test_averages_need_room():
    assert bool((total(8, 9, unit=8) % 8 == 0).all())
    with pytest.raises(ValueError, match="multiples of 64 from 16 ranks do not stay below 256"):
        integers(0, 64, 1, unit=64)
