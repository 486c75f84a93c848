"""Lists of hosts of Slurm, PBS and MPI."""

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.launch.hosts import HostSlots, expand, parse_hosts, read_hosts


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-2,07]", ["n1", "n2", "n07"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("a[1-2],b[3-4]", ["a1", "a2", "b3", "b4"]),
        ("rack[0-1]n[1-2]x", ["rack0n1x", "rack0n2x", "rack1n1x", "rack1n2x"]),
        ("login,nid[000001,000003-000004]", ["login", "nid000001", "nid000003", "nid000004"]),
        ("node[08-10,7],login1", ["node08", "node09", "node10", "node7", "login1"]),
        ("n2,n1,n2", ["n2", "n1", "n2"]),
    ],
)
def test_slurms_compressed_form(nodelist, hosts):
    assert expand(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist",
    [
        *("", "n[", "n]", "n[1", "n[]", "n[2-1]", "n[a-b]", "n[1-]", "n[1-x]", "n[[1]]", ",", "a,,b", "a,", "n 1"),
        *("n;rm", "n[1" * 99 + "]" * 99, "n[1-2]" * 9),
    ],
)
def test_what_is_no_list_is_refused(nodelist):
    with pytest.raises(ValueError, match="not a|brackets"):
        expand(nodelist)


def test_a_list_stands_for_so_many_hosts_at_most():
    assert len(expand("n[0-99999]")) == 100_000
    for nodelist in ("n[0-100000]", "n[1-9][0-999999999]", "n[1-999999999]", "n" * 20_000_000):
        with pytest.raises(ValueError, match="the most is|more than"):
            expand(nodelist)


@st.composite
def compressed(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A compressed name, and the hosts that it stands for."""
    text, choices = "n", [["n"]]
    for _ in range(draw(st.integers(1, 3))):
        word = draw(st.text("abz-.9", max_size=3))
        numbers: list[str] = []
        parts = []
        for _ in range(draw(st.integers(1, 2))):
            low, width = draw(st.integers(0, 120)), draw(st.integers(1, 4))
            high = low + draw(st.integers(0, 4))
            parts.append(f"{low:0{width}}" + (f"-{high:0{width}}" if high > low else ""))
            numbers += [f"{number:0{max(width, len(str(low)))}}" for number in range(low, high + 1)]
        text, choices = f"{text}{word}[{','.join(parts)}]", [*choices, [word], numbers]
    return text, ["".join(parts) for parts in itertools.product(*choices)]


@given(st.lists(compressed(), min_size=1, max_size=3))
def test_any_list_is_expanded_as_it_was_made(made):
    assert expand(",".join(text for text, _ in made)) == [host for _, hosts in made for host in hosts]


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=30, unique=True))
def test_compressing_and_expanding_is_the_identity(numbers):
    names = [f"n{number:04d}" for number in numbers]
    assert expand(f"n[{','.join(name[1:] for name in names)}]") == names


@given(st.text(alphabet="n1,[]-0 ", max_size=40))
def test_any_text_gives_hosts_or_a_value_error(text):
    try:
        hosts = expand(text)
    except ValueError:
        return
    assert all(re.fullmatch(r"[\w.-]+", host) for host in hosts)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\n", [HostSlots("a"), HostSlots("b")]),
        ("a:4\nb:2\n", [HostSlots("a", 4), HostSlots("b", 2)]),
        ("a slots=4 max_slots=8\nb slots=1\n", [HostSlots("a", 4), HostSlots("b", 1)]),
        ("b.x\nb.x\na.x\na.x\n", [HostSlots("b.x", 2), HostSlots("a.x", 2)]),
        ("# all\n\na  # the first\n", [HostSlots("a")]),
    ],
)
def test_every_form_of_a_host_file(text, hosts):
    assert parse_hosts(text, "hosts") == hosts


def test_every_wrong_line_is_named():
    with pytest.raises(JobError) as caught:
        parse_hosts("a\nb c\n$(id)\n-oProxyCommand=x\n", "hosts")
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == ["hosts:2", "hosts:3", "hosts:4"]


def test_a_file_without_hosts_and_one_that_is_absent(tmp_path: Path):
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(JobError, match="names no host"):
        read_hosts(tmp_path / "hosts")
    with pytest.raises(JobError, match="cannot be read"):
        read_hosts(tmp_path / "other")
