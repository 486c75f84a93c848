"""A layout in one line: what `line` prints reads back, and every mistake is found."""

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.fields import leaves
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.errors import JobError

KINDS = {int: st.integers(0, 10**6), bool: st.booleans(), str: st.sampled_from(["1f1b", "gpipe", "zb-h1"])}


def values_of(kind):
    if typing.get_origin(kind) is typing.Union:
        return st.one_of(*map(values_of, typing.get_args(kind)))
    return st.sampled_from(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else KINDS[kind]


LAYOUTS = st.builds(
    Layout, **{name: values_of(kind) for name, kind in leaves(Layout).items() if name != "bucket_mb"}
)  # a line leaves bucket_mb out


@given(LAYOUTS)
def test_a_line_reads_back(layout):
    assert parse(layout.line()) == layout
    assert parse(parse(layout.line()).line()) == layout


def test_every_field_can_be_given():
    given_all = ",".join(f"{name}={value}" for name, value in vars(Layout()).items() if name != "axes")
    assert parse(given_all) == Layout()


@pytest.mark.parametrize(
    ("line", "layout"),
    [
        ("tp=2,sp=true", Layout(tp=2, sp=True)),
        (" dp-shard = 4 , layout.zero=2", Layout(dp_shard=4, zero=2)),
        ("bucket_mb=0.5", Layout(bucket_mb=0.5)),
        ("auto", Layout(auto=True)),
        ("tp=2,auto", Layout(auto=True, tp=2)),
    ],
)
def test_spellings(line, layout):
    assert parse(line) == layout


def test_an_open_layout_says_what_is_fixed():
    assert Layout(auto=True).line() == "auto"
    assert Layout(auto=True, tp=2, sp=True).line() == "auto,tp=2,sp=true"


def test_all_mistakes_at_once():
    with pytest.raises(JobError) as caught:
        parse("tpp=2,zero=4,sp=maybe,n_layers=3,tensor_parallel_degree=2,tp,pp=2,pp=2,cp=x,cp=2,")
    messages = [
        problem.removeprefix(f"layout {caught.value.problems[0].split(chr(39))[1]!r}: ")
        for problem in caught.value.problems
    ]
    assert messages == [
        "unknown key tpp; did you mean tp?",
        "zero: expected one of 1, 2, 3, found '4'",
        "sp: expected true or false, found 'maybe'",
        "model.n_layers is not a field of the layout",
        "unknown key tensor_parallel_degree; did you mean layout.tp?",
        "expected key=value with commas between, found 'tp'",
        "pp is given twice",
        "cp: expected a whole number, found 'x'",
        "cp is given twice",
        "expected key=value with commas between, found ''",
    ]


def test_a_word_like_none_is_told_those_that_exist():
    with pytest.raises(JobError, match=r"layout 'foo=3': unknown key foo \(known: auto, dp_replicate, .*tp, pp"):
        parse("foo=3")


@given(st.text(max_size=30))
def test_no_text_makes_it_crash(text):
    try:
        assert dataclasses.is_dataclass(parse(text))
    except JobError as error:
        assert error.problems
