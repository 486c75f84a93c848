"""What blocks keep: held against every way to choose."""

from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.refine import EqualBlocks, fill

number = st.integers(0, 20).map(float)


@st.composite
def groups(draw):
    things = draw(st.integers(1, 3))
    figures = st.tuples(*[number] * things)
    return [EqualBlocks(draw(st.integers(1, 4)), draw(figures), draw(figures)) for _ in range(draw(st.integers(1, 3)))]


def ways(group: EqualBlocks):
    return [n for n in product(range(group.blocks + 1), repeat=len(group.bytes)) if sum(n) == group.blocks]


def total(numbers, figures) -> float:
    return sum(sum(n * each for n, each in zip(*pair, strict=True)) for pair in zip(numbers, figures, strict=True))


@given(groups(), st.integers(0, 200))
def test_it_is_the_fastest_of_all_that_fit(some, room):
    every = list(product(*map(ways, some)))
    fitting = [one for one in every if total(one, [group.bytes for group in some]) <= room]
    best = min((total(one, [group.seconds for group in some]) for one in fitting), default=inf)
    found = fill(some, room)
    if found is None:
        assert not fitting
        return
    assert found.numbers in fitting
    assert found.seconds == pytest.approx(total(found.numbers, [group.seconds for group in some]))
    assert found.seconds == pytest.approx(best)
