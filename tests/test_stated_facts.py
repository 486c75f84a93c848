"""An entry that states too little, too much or the wrong kind of thing is refused with every problem at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import pytest

from phalanx import facts
from phalanx.config.constraints import Interval
from phalanx.errors import ExtensionError
from phalanx.facts import Lazy, stated


@dataclass(frozen=True)
class Inner:
    size: Annotated[int, Interval(1)] = 1


@stated
@dataclass(frozen=True)
class Entry:
    title: str
    cost: Callable[[int, float], float]
    kind: Literal["one", "two"]
    code: Lazy
    ratio: float = 1.0
    flag: bool = False
    names: tuple[str, ...] = ()
    more: Lazy | None = None
    inner: Inner = field(default_factory=Inner)


GOOD = Entry("a title", lambda n, x: n * x, "one", "package.module:name")


def test_a_complete_entry_has_no_problems():
    assert list(facts.problems(GOOD)) == []
    assert list(facts.problems(replace(GOOD, code=len, more="a.b:C.d", ratio=2, names=("x",)))) == []


def test_a_constructor_names_every_missing_unknown_and_wrong_fact():
    with pytest.raises(ExtensionError) as caught:
        Entry("", kind="three", titel="x", ratoi=2)
    known = "(known: title, cost, kind, code, ratio, flag, names, more, inner)"
    assert caught.value.problems == [
        "Entry states too little; missing: cost, code",
        f"Entry: no fact 'titel'; did you mean title? {known}",
        f"Entry: no fact 'ratoi'; did you mean ratio? {known}",
        "Entry: kind must be one of 'one', 'two', is 'three'",
        "Entry: title must not be empty",
    ]


def test_a_constructor_refuses_a_fact_stated_twice_and_too_many():
    with pytest.raises(ExtensionError, match="title is stated twice"):
        Entry("a", len, "one", len, title="b")
    with pytest.raises(ExtensionError, match="10 facts without a name; it has 9"):
        Entry("a", lambda n, x: x, "one", len, 1.0, False, (), None, Inner(), 5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"title": ""}, "title must not be empty"),
        ({"title": None}, "title must be text, is None"),
        ({"cost": 3}, "cost must be a function, is 3"),
        ({"cost": lambda n: n}, "cost must take 2 arguments"),
        ({"cost": lambda: 1}, "cost must take 2 arguments"),
        ({"kind": "thee"}, "kind must be one of 'one', 'two', is 'thee'"),
        ({"code": "no place"}, "code must be a function, or its place as text, package.module:name, is 'no place'"),
        ({"code": "os.system"}, "code must be a function, or its place"),
        ({"more": 1.5}, "more must be a function, or its place or None, is 1.5"),
        ({"ratio": float("nan")}, "ratio must be a finite number, is nan"),
        ({"ratio": True}, "ratio must be a finite number, is True"),
        ({"flag": 1}, "flag must be True or False, is 1"),
        ({"names": ["x"]}, r"names must be a tuple of text, is \['x'\]"),
        ({"names": ("x", 2)}, r"names must be a tuple of text, is \('x', 2\)"),
        ({"inner": Inner(0)}, "inner.size must be at least 1, is 0"),
        ({"inner": "x"}, "inner must be Inner, is 'x'"),
    ],
)
def test_a_fact_of_the_wrong_kind_is_named(changed: dict[str, object], message: str):
    found = list(facts.problems(replace(GOOD, **changed)))
    with pytest.raises(ValueError, match=message):
        raise ValueError(*found)
    assert len(found) == 1


def test_a_constructor_keeps_a_type_error_of_its_own():
    @stated
    @dataclass(frozen=True)
    class Failing:
        number: int

        def __post_init__(self):
            raise TypeError("not of the arguments")

    with pytest.raises(TypeError, match="not of the arguments"):
        Failing(1)
