"""Text to values: what is accepted, what is refused and in which words."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.values import convert

Schedule = Literal["cosine", "linear"]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("12", int, 12),
        ("1e6", int, 1_000_000),
        ("1_000", int, 1000),
        ("3e-4", float, 3e-4),
        ("2", float, 2.0),
        ("yes", bool, True),
        ("Off", bool, False),
        ("no", str, "no"),
        ("cosine", Schedule, "cosine"),
        ("3", Literal[1, 2, 3], 3),
        ("0.9,0.95", tuple[float, float], (0.9, 0.95)),
        ("(0.9, 0.95)", tuple[float, float], (0.9, 0.95)),
        (["0.9", "0.95"], tuple[float, float], (0.9, 0.95)),
    ],
)
def test_accepted(text, kind, value):
    assert convert(text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("1.5", int, "expected a whole number, found '1.5'"),
        ("x", float, "expected a number, found 'x'"),
        ("nan", float, "expected a number, found 'nan'"),
        ("inf", int, "expected a whole number, found 'inf'"),
        ("maybe", bool, "expected true or false, found 'maybe'"),
        ("cosin", Schedule, "expected one of cosine, linear, found 'cosin'; did you mean cosine?"),
        ("1", tuple[float, float], "expected 2 values, found 1"),
        (["1", "2"], int, "expected a whole number, not a list"),
    ],
)
def test_refused(text, kind, message):
    with pytest.raises(ValueError) as caught:
        convert(text, kind)
    assert str(caught.value) == message


@given(st.integers())
def test_every_whole_number_survives(value):
    assert convert(str(value), int) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_survives(value):
    assert convert(repr(value), float) == value
