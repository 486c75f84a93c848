"""Plans run over gloo give what the backend's own collectives give, for 1 to 8 ranks and uneven sizes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
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
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scatter,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)

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
def test_all_reduce(ranks, world: int):
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
    execute(program, tensor, reduction)  # pyright: ignore[reportArgumentType]  # the wrong one is the test


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
