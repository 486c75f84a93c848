"""The programs of the collective algorithms: right results, fair steps, and traffic equal to the formulas."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.algorithms.program import (
    CollectiveProgram,
    chunked,
    gather,
    halving_all_reduce,
    hierarchical_all_reduce,
    naive_all_reduce,
    pairwise_all_to_all,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scatter,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)

RANKS = st.integers(1, 17)
ELEMENTS = st.integers(0, 60)
ALL_REDUCES: dict[str, Callable[[int, int], CollectiveProgram]] = {
    "naive": naive_all_reduce,
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "halving": halving_all_reduce,
}


def simulate(program: CollectiveProgram, buffers: list[np.ndarray], reduce: Callable = np.add) -> list[np.ndarray]:
    """The buffers after the program. All messages of a step are read before any of them is written."""
    buffers = [buffer.copy() for buffer in buffers]
    for step in program.steps:
        on_the_way = [buffers[each.source][each.span.start : each.span.stop].copy() for each in step.messages]
        for message, data in zip(step.messages, on_the_way, strict=True):
            place = buffers[message.target][message.landing.start : message.landing.stop]
            place[:] = reduce(place, data) if message.action == "reduce" else data
    return buffers


def inputs(ranks: int, n: int) -> np.ndarray:
    """(ranks, n) integers as float64, so that sums are exact in any order."""
    return np.random.default_rng(ranks * 1000 + n).integers(-1000, 1000, (ranks, n)).astype(np.float64)


def check_steps(program: CollectiveProgram) -> None:
    """Every message fits both buffers; in a step a rank sends and receives at most once, and not the same elements."""
    for step in program.steps:
        sent = {message.source: message.span for message in step.messages}
        received = {message.target: message.landing for message in step.messages}
        assert len(sent) == len(received) == len(step.messages)
        for message in step.messages:
            assert message.source != message.target
            assert 0 <= message.span.start < message.span.stop <= program.sizes[message.source]
            assert 0 <= message.landing.start < message.landing.stop <= program.sizes[message.target]
        for rank in sent.keys() & received.keys():
            assert sent[rank].stop <= received[rank].start or received[rank].stop <= sent[rank].start


def closed(n: int, ranks: int) -> int:
    """2·n·(P-1)/P, for P that divides n."""
    return 2 * n * (ranks - 1) // ranks


@given(parts=RANKS, n=ELEMENTS)
def test_chunks_are_contiguous_and_even(parts: int, n: int):
    chunks = chunked(n, parts)
    assert [element for chunk in chunks for element in chunk] == list(range(n))
    assert len(chunks) == parts
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("reduce", [np.add, np.minimum, np.maximum])
@given(ranks=RANKS, n=ELEMENTS)
def test_all_reduce(name: str, reduce: np.ufunc, ranks: int, n: int):
    program = ALL_REDUCES[name](ranks, n)
    check_steps(program)
    before = inputs(ranks, n)
    for after in simulate(program, list(before), reduce):
        np.testing.assert_array_equal(after, reduce.reduce(before, axis=0))


@pytest.mark.parametrize("name", ALL_REDUCES)
@given(ranks=RANKS, n=ELEMENTS)
def test_all_ranks_get_the_same_bits(name: str, ranks: int, n: int):
    before = np.random.default_rng(n).standard_normal((ranks, n))
    after = simulate(ALL_REDUCES[name](ranks, n), list(before))
    assert all(buffer.tobytes() == after[0].tobytes() for buffer in after)


@given(data=st.data(), ranks=RANKS, n=ELEMENTS)
def test_hierarchical_all_reduce(data: st.DataObject, ranks: int, n: int):
    group = data.draw(st.sampled_from([size for size in range(1, ranks + 1) if ranks % size == 0]))
    program = hierarchical_all_reduce(ranks, n, group)
    check_steps(program)
    before = inputs(ranks, n)
    for after in simulate(program, list(before)):
        np.testing.assert_array_equal(after, before.sum(axis=0))
    groups = ranks // group
    assert len(program.steps) == 2 * (group - 1) + 2 * (groups - 1)
    leaving = [0] * ranks
    for message in program.messages:
        if message.source // group != message.target // group:
            leaving[message.source] += len(message.span)
    assert sum(leaving) == 2 * (groups - 1) * n  # every shard, by a ring of its own
    if n % ranks == 0:
        assert program.elements_sent() == [closed(n, ranks)] * ranks
        assert leaving == [closed(n // group, groups)] * ranks


def test_hierarchical_groups_have_to_divide():
    with pytest.raises(ValueError, match=r"^6 ranks do not divide into groups of 4; possible sizes: \[1, 2, 3, 6\]$"):
        hierarchical_all_reduce(6, 10, group=4)


@given(ranks=RANKS, n=ELEMENTS)
def test_naive_traffic(ranks: int, n: int):
    program = naive_all_reduce(ranks, n)
    through_zero = sum(len(message.span) for message in program.messages if 0 in (message.source, message.target))
    assert through_zero == sum(program.elements_sent()) == program.critical_elements() == 2 * n * (ranks - 1)
    assert len(program.steps) == 2 * (ranks - 1)


@given(ranks=RANKS, n=ELEMENTS)
def test_ring_traffic(ranks: int, n: int):
    program = ring_all_reduce(ranks, n)
    chunks = [len(chunk) for chunk in chunked(n, ranks)]
    assert len(program.steps) == 2 * (ranks - 1)
    # Rank r passes on every chunk but its own while they are reduced, and all but its right neighbour's afterwards.
    assert program.elements_sent() == [2 * n - chunks[rank] - chunks[(rank + 1) % ranks] for rank in range(ranks)]
    if n >= ranks:
        assert program.messages_sent() == [2 * (ranks - 1)] * ranks
    if n % ranks == 0:
        assert program.elements_sent() == [closed(n, ranks)] * ranks
        assert {len(message.span) for message in program.messages} <= {n // ranks}
        assert program.critical_elements() == closed(n, ranks)


@given(ranks=RANKS, n=st.integers(1, 60))
def test_tree_traffic(ranks: int, n: int):
    program = tree_all_reduce(ranks, n)
    levels = ceil(log2(ranks))
    assert len(program.steps) == 2 * levels
    assert sum(program.elements_sent()) == 2 * n * (ranks - 1)
    assert max(program.elements_sent()) == n * levels
    assert program.critical_elements() == 2 * n * levels
    assert len(tree_reduce(ranks, n).steps) == len(tree_broadcast(ranks, n).steps) == levels


def test_tree_of_eight_ranks_takes_three_steps():
    program = tree_broadcast(8, 5)
    assert [len(step.messages) for step in program.steps] == [1, 2, 4]


@given(ranks=RANKS, n=ELEMENTS)
def test_halving_traffic(ranks: int, n: int):
    program = halving_all_reduce(ranks, n)
    power = 2 ** int(log2(ranks))
    assert len(program.steps) == 2 * int(log2(ranks)) + 2 * (power < ranks)
    folded = ranks - power
    sent = program.elements_sent()
    assert sent[power:] == [n] * folded
    # Each chunk is sent by every one of Q ranks but its owner to be reduced, and is received by all but its owner.
    assert sum(sent) == 2 * n * (power - 1) + 2 * n * folded
    if n % power == 0:
        assert sent[:power] == [closed(n, power) + n * (rank < folded) for rank in range(power)]
        assert program.critical_elements() == closed(n, power) + 2 * n * (folded > 0)


@given(ranks=RANKS, n=ELEMENTS)
def test_ring_halves(ranks: int, n: int):
    before = inputs(ranks, n)
    total = before.sum(axis=0)
    scattered, gathered = ring_reduce_scatter(ranks, n), ring_all_gather(ranks, n)
    check_steps(scattered)
    check_steps(gathered)
    assert len(scattered.steps) == len(gathered.steps) == ranks - 1
    chunks = [slice(chunk.start, chunk.stop) for chunk in chunked(n, ranks)]
    for chunk, after in zip(chunks, simulate(scattered, list(before)), strict=True):
        np.testing.assert_array_equal(after[chunk], total[chunk])
    expected = np.concatenate([before[rank][chunk] for rank, chunk in enumerate(chunks)])
    for after in simulate(gathered, list(before)):
        np.testing.assert_array_equal(after, expected)
    if n % ranks == 0:
        assert scattered.elements_sent() == gathered.elements_sent() == [closed(n, ranks) // 2] * ranks


@given(data=st.data(), ranks=RANKS, n=ELEMENTS)
def test_rooted_collectives(data: st.DataObject, ranks: int, n: int):
    root = data.draw(st.integers(0, ranks - 1))
    before = inputs(ranks, n)
    programs = [kind(ranks, n, root) for kind in (tree_reduce, tree_broadcast, scatter, gather)]
    for program in programs:
        check_steps(program)
    reduced, copied, scattered, gathered = (simulate(program, list(before)) for program in programs)
    np.testing.assert_array_equal(reduced[root], before.sum(axis=0))
    for after in copied:
        np.testing.assert_array_equal(after, before[root])
    for rank, chunk in enumerate(chunked(n, ranks)):
        part = slice(chunk.start, chunk.stop)
        np.testing.assert_array_equal(scattered[rank][part], before[root][part])
        np.testing.assert_array_equal(gathered[root][part], before[rank][part])
    own = len(chunked(n, ranks)[root])
    assert sum(programs[2].elements_sent()) == programs[2].elements_sent()[root] == n - own
    assert sum(programs[3].elements_sent()) == n - own
    assert len(programs[2].steps) == len(programs[3].steps) == ranks - 1


@given(ranks=RANKS, n=ELEMENTS)
def test_all_to_all(ranks: int, n: int):
    program = pairwise_all_to_all(ranks, n)
    check_steps(program)
    before = inputs(ranks, n)
    chunks = [slice(chunk.start, chunk.stop) for chunk in program.chunks]
    buffers = [np.concatenate([before[rank], np.full(program.sizes[rank] - n, np.nan)]) for rank in range(ranks)]
    for rank, chunk in enumerate(chunks):
        length = chunk.stop - chunk.start
        buffers[rank][n + rank * length : n + (rank + 1) * length] = before[rank][chunk]
    for chunk, after in zip(chunks, simulate(program, buffers), strict=True):
        np.testing.assert_array_equal(after[n:], before[:, chunk].reshape(-1))
    assert program.elements_sent() == [n - len(chunk) for chunk in program.chunks]
    assert len(program.steps) == ranks - 1


def test_bad_sizes_and_roots():
    for make in ALL_REDUCES.values():
        with pytest.raises(ValueError, match="ranks"):
            make(0, 4)
    with pytest.raises(
        ValueError, match="^cannot divide -1 elements among 2 ranks: need elements >= 0 and ranks >= 1$"
    ):
        ring_all_reduce(2, -1)
    with pytest.raises(ValueError, match=r"^root 4 is not one of the 4 ranks \(0 to 3\)$"):
        tree_broadcast(4, 8, root=4)


def test_plans_do_not_import_torch():
    modules = "draw, program"
    code = f"import sys; from phalanx.comm.algorithms import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
