"""The least squares of relative errors: a line's two ends, and what does not belong to it."""

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.fit import least_squares


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_the_least_squares_find_both_ends_of_a_line(alpha, beta):
    sizes = [1e-3, 1.0, 1e3]
    points = [(x, alpha + beta * x) for x in (size * alpha / beta for size in sizes)]
    found = least_squares(lambda a, b: [log((a + b * x) / y) for x, y in points], (1.0, 1.0))
    assert found == pytest.approx([alpha, beta], rel=1e-3)


def test_what_does_not_belong_hardly_bends_the_rest():
    values = [1.0] * 8 + [50.0]
    (found,) = least_squares(lambda a: [log(a / value) for value in values], (20.0,))
    assert found == pytest.approx(1.0, rel=0.02)


def test_what_no_error_depends_on_stays_where_it_was():
    found = least_squares(lambda a, b: [log(a / 3)], (1.0, 7.0))
    assert found == pytest.approx([3.0, 7.0])
