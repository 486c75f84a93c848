"""Slurm's compressed lists of hosts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.meet.hostlist import expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2]", ["n1", "n2"]),
        ("a[1-2],b[3-4]", ["a1", "a2", "b3", "b4"]),
        ("node[08-10,7],login1", ["node08", "node09", "node10", "node7", "login1"]),
        ("r[0-1]c[0-1]n", ["r0c0n", "r0c1n", "r1c0n", "r1c1n"]),
        ("n2,n1,n2", ["n2", "n1", "n2"]),
        ("", []),
    ],
)
def test_lists_as_slurm_writes_them(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["n[1-2", "n]", "n[]", "n[2-1]", "a,,b", "n[1-x]", "n[[1]]", "n[1" * 99 + "]" * 99])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="host|brackets"):
        expand(text)


def test_a_list_stands_for_so_many_hosts_at_most() -> None:
    assert len(expand("n[0-99999]")) == 100_000
    for text in ("n[0-100000]", "n[1-9][0-999999999]", "n" * 2_000_000):
        with pytest.raises(ValueError, match="the most is|more than"):
            expand(text)


@st.composite
def names(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A compressed name, and the hosts that it stands for."""
    text, choices = "", []
    for _ in range(draw(st.integers(1, 3))):
        word = draw(st.text("abz-.9", max_size=3))
        text, choices = text + word, [*choices, [word]]
        numbers: list[str] = []
        parts = []
        for _ in range(draw(st.integers(1, 2))):
            low, width = draw(st.integers(0, 120)), draw(st.integers(1, 4))
            high = low + draw(st.integers(0, 4))
            parts.append(f"{low:0{width}}" + (f"-{high:0{width}}" if high > low else ""))
            numbers += [f"{number:0{max(width, len(str(low)))}}" for number in range(low, high + 1)]
        text, choices = f"{text}[{','.join(parts)}]", [*choices, numbers]
    return text, ["".join(parts) for parts in itertools.product(*choices)]


@given(st.lists(names(), min_size=1, max_size=3))
def test_any_list_is_expanded_as_it_was_made(made: list[tuple[str, list[str]]]) -> None:
    assert expand(",".join(text for text, _ in made)) == [host for _, hosts in made for host in hosts]


@given(st.text("n12[],-", max_size=12))
def test_any_text_gives_hosts_or_a_value_error(text: str) -> None:
    try:
        hosts = expand(text, most=1000)
    except ValueError:
        return
    assert len(hosts) <= 1000
    assert all(hosts) or not text.strip()
