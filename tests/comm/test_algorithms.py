"""Collective algorithms: their programs, their pictures, and their results over gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from math import ceil, log2
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.comm.algorithms.execute import Reduction, all_to_all, execute, matches_definition
from phalanx.comm.algorithms.program import (
    ALGORITHMS,
    AlgorithmEntry,
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
    svg,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)

# The programs of the collective algorithms: right results, fair steps, and traffic equal to the formulas.


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
    modules = "program"
    code = f"import sys; from phalanx.comm.algorithms import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Plans run over gloo give what the backend's own collectives give, for 1 to 8 ranks and uneven sizes.

SIZES = (1, 3, 37)
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
REDUCTIONS: tuple[Reduction, ...] = ("sum", "avg", "min", "max")


def own(rank: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(n, generator=generator, dtype=torch.float64)
    return values.to(dtype) if dtype.is_floating_point else (values * 10).to(dtype)


def all_reduce_plans(ranks: int, n: int) -> list[CollectiveProgram]:
    groups = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [
        naive_all_reduce(ranks, n),
        ring_all_reduce(ranks, n),
        tree_all_reduce(ranks, n),
        halving_all_reduce(ranks, n),
        *(hierarchical_all_reduce(ranks, n, group) for group in groups),
    ]


def compare_all_reduces(ranks, dtypes: list[torch.dtype]) -> None:
    for n in SIZES:
        for dtype in dtypes:
            for reduction in REDUCTIONS if ranks.world <= 4 else REDUCTIONS[:1]:
                if reduction == "avg" and not dtype.is_floating_point:
                    continue
                expected = own(ranks.rank, n, dtype)
                dist.all_reduce(expected, OPS[reduction])
                for program in all_reduce_plans(ranks.world, n):
                    mine = own(ranks.rank, n, dtype)
                    execute(program, mine, reduction)
                    exact = reduction in ("min", "max") or not dtype.is_floating_point
                    tolerance = 0.0 if exact else 1e-12
                    torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance, msg=program.name)


@pytest.mark.parametrize("world", range(1, 9))
def test_all_reduce_over_gloo(ranks, world: int):
    ranks(compare_all_reduces, world, [torch.float64])


def test_all_reduce_of_integers_and_bools(ranks):
    ranks(compare_all_reduces, 3, [torch.int64, torch.uint8, torch.bool])


def low_precision(ranks) -> None:
    expected = own(ranks.rank, 37, torch.bfloat16)
    dist.all_reduce(expected)
    mine = own(ranks.rank, 37, torch.bfloat16)
    execute(ring_all_reduce(ranks.world, 37), mine)
    torch.testing.assert_close(mine, expected, rtol=0.05, atol=0.05)


def test_all_reduce_of_bf16(ranks):
    ranks(low_precision, 3)


def compare_others(ranks) -> None:
    rank, world = ranks.rank, ranks.world
    for n in SIZES:
        chunks = chunked(n, world)
        part = slice(chunks[rank].start, chunks[rank].stop)
        every = [own(each, n) for each in range(world)]
        root = world - 1

        for reduction in REDUCTIONS:
            expected = own(rank, n)
            dist.all_reduce(expected, OPS[reduction])
            scattered = own(rank, n)
            execute(ring_reduce_scatter(world, n), scattered, reduction)
            torch.testing.assert_close(scattered[part], expected[part], rtol=1e-12, atol=1e-12)
            reduced = own(rank, n)
            execute(tree_reduce(world, n, root), reduced, reduction)
            if rank == root:
                torch.testing.assert_close(reduced, expected, rtol=1e-12, atol=1e-12)

        broadcast, expected = own(rank, n), own(rank, n)
        execute(tree_broadcast(world, n, root), broadcast)
        dist.broadcast(expected, src=root)
        assert torch.equal(broadcast, expected)

        gathered = own(rank, n)
        execute(ring_all_gather(world, n), gathered, "avg")  # nothing is reduced, so nothing is divided
        pieces = [every[each][chunk.start : chunk.stop] for each, chunk in enumerate(chunks)]
        assert torch.equal(gathered, torch.cat(pieces))

        collected = own(rank, n)
        execute(gather(world, n, root), collected)
        if rank == root:
            assert torch.equal(collected, torch.cat(pieces))

        dealt = own(rank, n)
        execute(scatter(world, n, root), dealt)
        assert torch.equal(dealt[part], every[root][part])

        expected = torch.empty(world * len(chunks[rank]), dtype=torch.float64)
        splits = [len(chunk) for chunk in chunks]
        dist.all_to_all_single(expected, own(rank, n), [len(chunks[rank])] * world, splits)
        assert torch.equal(all_to_all(own(rank, n)), expected)


@pytest.mark.parametrize("world", range(1, 9))
def test_other_collectives(ranks, world: int):
    ranks(compare_others, world)


def check_all(ranks) -> list[str]:
    settings = [
        (name, {entry.takes: ranks.world - 1} if entry.takes == "root" else {}) for name, entry in ALGORITHMS.items()
    ]
    return [name for name, setting in settings for n in SIZES if not matches_definition(ranks, name, n, setting)]


@pytest.mark.parametrize("world", [1, 3, 4])
def test_every_algorithm_of_the_catalogue_computes_its_collective(ranks, world: int):
    assert ranks(check_all, world) == [[]] * world


def check_a_wrong_one(ranks) -> bool:
    wrong = AlgorithmEntry(
        lambda size, n: CollectiveProgram("nothing", size, (n,) * size, chunked(n, size), ()), "0", ""
    )
    ALGORITHMS["no-all-reduce"] = wrong
    try:
        return matches_definition(ranks, "no-all-reduce", 5, {})
    finally:
        del ALGORITHMS["no-all-reduce"]


def test_a_wrong_algorithm_is_found(ranks):
    assert ranks(check_a_wrong_one, 2) == [False, False]


def in_a_group(ranks) -> list[float]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[ranks.rank % 2]
    assert isinstance(group, dist.ProcessGroup)
    tensor = torch.full((2, 3), float(ranks.rank))
    execute(ring_all_reduce(2, 6), tensor, group=group)
    return tensor.flatten().tolist()


def test_runs_in_a_group_and_keeps_the_shape(ranks):
    assert ranks(in_a_group, 4) == [[2.0] * 6, [4.0] * 6, [2.0] * 6, [4.0] * 6]


def refuse(ranks, program: CollectiveProgram, tensor: Tensor, reduction: str) -> None:
    execute(program, tensor, reduction)  # the wrong one is the test


@pytest.mark.parametrize(
    ("program", "tensor", "reduction", "message"),
    [
        (ring_all_reduce(2, 4), torch.zeros(4), "sum", r"\(ring all-reduce\) is for 2 ranks, the group has 1"),
        (ring_all_reduce(1, 4), torch.zeros(5), "sum", r"is for 4 elements on rank 0, the tensor has 5"),
        (ring_all_reduce(1, 4), torch.zeros(4), "product", "no reduction 'product'; there are sum, avg, min, max"),
        (ring_all_reduce(1, 4), torch.zeros(4, dtype=torch.int64), "avg", "the average of torch.int64 is not defined"),
        (ring_all_reduce(1, 4), torch.zeros(2, 2).T, "sum", r"contiguous; its strides are \(1, 2\)"),
    ],
)
def test_what_does_not_belong_together(ranks, program: CollectiveProgram, tensor: Tensor, reduction: str, message: str):
    with pytest.raises(ValueError, match=message):
        ranks(refuse, 1, program, tensor, reduction)


# Pictures of programs are well-formed, with an arrow per message; those of the documents are up to date.

SVG = "{http://www.w3.org/2000/svg}"
PLANS = [
    ring_all_reduce(4, 4),
    tree_all_reduce(8, 8),
    halving_all_reduce(6, 8),
    hierarchical_all_reduce(8, 8, 4),
    naive_all_reduce(3, 3),
    pairwise_all_to_all(3, 7),
    ring_all_reduce(1, 4),
]


@pytest.mark.parametrize("program", PLANS, ids=lambda program: f"{program.name} {program.ranks}")
def test_one_arrow_for_each_message(program: CollectiveProgram):
    root = ElementTree.fromstring(svg(program))
    groups = root.findall(f"{SVG}g[@class='message']")
    assert len(groups) == len(root.findall(f".//{SVG}polygon")) == len(program.messages)
    for group, message in zip(groups, program.messages, strict=True):
        dashed = [line.get("stroke-dasharray") is not None for line in group.iter(f"{SVG}line")]
        assert dashed == [message.action == "copy"]


def test_arrows_carry_the_numbers_of_their_chunks():
    root = ElementTree.fromstring(svg(halving_all_reduce(4, 4)))
    labels = ["".join(text.text or "" for text in group.iter(f"{SVG}text")) for group in root.iter(f"{SVG}g")]
    assert labels == ["23", "01", "23", "01", "1", "3", "0", "2", "1", "3", "0", "2", "23", "01", "23", "01"]


def test_everything_is_inside_the_picture():
    root = ElementTree.fromstring(svg(halving_all_reduce(8, 8)))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for cell in root.iter(f"{SVG}rect"):
        assert 0 <= float(cell.get("x", -1)) <= width - float(cell.get("width", 0))
    for line in root.iter(f"{SVG}line"):
        assert 0 < float(line.get("x2", -1)) < width
        assert 0 < float(line.get("y2", -1)) < height
