"""Redundant experts: copies of the fullest experts on other ranks, which share their tokens."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from parallel.test_deep_ep import with_stand_in
from parallel.test_expert import (
    CASES,
    SEQ,
    assert_close,
    axis_of,
    part_of,
    run,
    tokens_of_all,
    whole_layer,
)
from phalanx.model.documents import Conversations
from phalanx.parallel import redundant
from phalanx.parallel.deep_ep import DeepExchange
from phalanx.parallel.expert import RowExchange, TokenExchange
from phalanx.parallel.redundant import ExpertPlacement, placed
from phalanx.partition.tensor_slices import experts_of


def loads(placement: ExpertPlacement) -> list[int]:
    """Rows of every rank."""
    slots = len(placement.table[0]) // len(placement.table)
    sums = [sum(column) for column in zip(*placement.table, strict=True)]
    return [sum(sums[first : first + slots]) for first in range(0, len(sums), slots)]


@pytest.mark.parametrize(("ranks", "own", "copies"), [(2, 4, 1), (4, 2, 1), (4, 4, 3), (8, 1, 2), (3, 2, 4)])
def test_a_placement_moves_rows_and_loses_none(ranks, own, copies):
    rng = random.Random(ranks * own)
    for skew in (1, 5, 50):
        counts = [[rng.randrange(1 + skew * (e < 2 * own)) for e in range(ranks * own)] for _ in range(ranks)]
        found = placed(counts, copies)
        slots = own + copies
        for rank, there in enumerate(found.copied):
            assert len(set(there)) == copies
            assert not set(there) & set(experts_of(ranks * own, ranks, rank))
        for source, line in enumerate(found.table):
            assert min(line) >= 0
            of_expert = dict.fromkeys(range(ranks * own), 0)
            for slot, rows in enumerate(line):
                rank, place = divmod(slot, slots)
                e = rank * own + place if place < own else found.copied[rank][place - own]
                of_expert[e] += rows
            assert [*of_expert.values()] == counts[source]
        before = [sum(sum(line[rank * own : (rank + 1) * own]) for line in counts) for rank in range(ranks)]
        assert max(loads(found)) <= max(before)


def test_one_copy_on_each_rank_balances_one_hot_expert():
    """Seven of eight tokens choose expert 0: each of four ranks gets a quarter, most from its own tokens."""
    counts = [[70, 2, 2, 2, 1, 1, 1, 1]] * 4
    found = placed(counts, 1)
    assert loads(found) == [80] * 4
    assert [0 in there for there in found.copied] == [False, True, True, True]
    assert [found.table[rank][3 * rank + 2] for rank in (1, 2, 3)] == [64, 70, 70]


def test_even_loads_leave_copies_without_rows_and_all_ranks_send_equally_many():
    found = placed([[3] * 8] * 4, 2)
    sent = [sum(e // 2 == rank for there in found.copied for e in there) for rank in range(4)]
    assert sent == [2] * 4
    assert all(line[place] == 0 for line in found.table for place in range(16) if place % 4 > 1)


def compared(ranks: Any, exchange: Any) -> None:
    ep = axis_of(ranks)
    x, weights = tokens_of_all(ranks.world)
    mine = slice(ranks.rank * len(x) // ranks.world, (ranks.rank + 1) * len(x) // ranks.world)
    numbers = torch.zeros(x.shape[:2], dtype=torch.int64)
    numbers[:2], numbers[2:, SEQ // 2 :] = -1, -1  # the first rank has nothing but padding
    padded = [(case, pad) for case in CASES for pad in (False, True)]
    for case, pad in padded:
        model, one_sided = CASES[case]
        if (model.moe.capacity and exchange is RowExchange) or model.moe.n_experts < 8:
            continue
        whole = whole_layer(model, one_sided)
        part = part_of(whole, ep, exchange)
        part.dispatch = redundant.connect(part, exchange(ep), 2)
        all_here, here_alone = (Conversations(each, 1) if pad else None for each in (numbers, numbers[mine]))
        apply = partial(part, conversations=here_alone)
        expected, of_x = run(partial(whole, conversations=all_here), x, weights)
        y, gradient = run(apply, x[mine], weights[mine])
        assert_close(y, expected[mine])
        assert_close(gradient, of_x[mine])
        here = experts_of(8, ep.size, ep.rank)
        for (name, parameter), of in zip(part.experts.named_parameters(), whole.experts.parameters(), strict=True):
            assert parameter.grad is not None, (case, pad, name)
            assert of.grad is not None
            assert_close(parameter.grad, of.grad[here.start : here.stop])
        with torch.no_grad():
            assert torch.equal(apply(x[mine]), y)


@pytest.mark.parametrize("exchange", [RowExchange, TokenExchange])
@pytest.mark.parametrize("world", [2, 4])
def test_layers_with_copies_equal_one_process(ranks, world, exchange):
    ranks(compared, world, exchange)


def by_deep_ep(ranks: Any) -> None:
    with with_stand_in():
        compared(ranks, DeepExchange)


def test_copies_reached_by_deep_ep_equal_one_process(ranks):
    ranks(by_deep_ep, 2)
