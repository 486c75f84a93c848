import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.exposed import larger, quotient, rounded, smaller

NUMBER = st.just(0.0) | st.floats(1e-6, 1e12)
NUMBERS = st.lists(st.tuples(NUMBER, NUMBER), min_size=1)


@given(NUMBERS)
def test_an_array_s_elements_are_what_the_numbers_are(pairs):
    first, second = np.array(pairs).T
    for function in (larger, smaller, quotient):
        assert function(first, second).tolist() == [function(one, other) for one, other in pairs]
    assert rounded(first).tolist() == [rounded(one) for one, _ in pairs]


def test_numbers_stay_python_s():
    assert all(type(found) is float for found in (larger(1.0, 2.0), smaller(1.0, 2.0), quotient(1.0, 0.0)))
    assert larger(1.0, np.array([0.5, 2.0])).tolist() == [1.0, 2.0]
