"""Differences between ranks: found by one reduction, and told in one sentence per fact."""

import pytest

from phalanx.comm.agree import differences, disagreements


def stated(ranks, facts):
    return [each.text for each in disagreements(facts[ranks.rank])]


def test_ranks_with_the_same_facts_agree(ranks):
    assert ranks(stated, 3, [{"a": 1, "b": [2, None]}] * 3) == [[], [], []]


def test_names_may_differ_as_between_versions(ranks):
    [first, second] = ranks(stated, 2, [{"a": 1, "old": 3}, {"a": 1, "new": "x"}])
    assert first == second
    assert [text.partition(" has ")[2] for text in first] == [
        "old nothing, the other rank 3",
        "new x, the other rank nothing",
    ]


ODD = [([0, 1, 4], 1.0), ([2, 3], 2.0), ([5, 7], "")]


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([([0, 1, 2, 4, 5, 6, 7], 3e-4), ([3], 1e-3)], "rank 3 on host b has lr 0.001, the other 7 ranks 0.0003"),
        ([([0], 1.0), ([1], 2.0)], "rank 1 on host a has lr 2.0, the other rank 1.0"),
        (ODD, 'ranks 2-3 on 2 hosts have lr 2.0, ranks 5, 7 on host b have "", the other 3 ranks 1.0'),
        ([([0], True), ([1, 2, 3], "\x1b[2J")], r"rank 0 on host a has lr true, the other 3 ranks \u001b[2J"),
    ],
)
def test_the_minority_is_named_against_the_majority(groups, text):
    [found] = differences([(ranks, {"same": 0, "lr": value}) for ranks, value in groups], list("aaabbbbb"))
    assert (found.name, found.text) == ("lr", text)


def test_values_that_begin_alike_differ():
    [found] = differences([([0], {"text": "x" * 100 + "a"}), ([1], {"text": "x" * 100 + "b"})], ["a", "a"])
    one, _, other = found.text.partition(", the other rank ")
    assert one.rpartition("… ")[2] != other.rpartition("… ")[2]
    assert len(found.text) < 250
