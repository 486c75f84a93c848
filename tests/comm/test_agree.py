"""Work of rank 0 and failures of any rank reach every rank; differences between ranks are told."""

import pytest

from phalanx.comm.agree import differences, disagreements, on_every_rank, on_rank_zero
from phalanx.errors import CheckpointError, RunError

# Work of rank 0 and its failures reach every rank, as do failures of any rank.


def shared_result(ranks):
    return on_rank_zero(lambda: {"rank": ranks.rank, "text": "ü" * 1000})


def test_every_rank_gets_rank_zeros_result(ranks):
    assert ranks(shared_result, 3) == [{"rank": 0, "text": "ü" * 1000}] * 3


def fail(error: Exception):
    raise error


def shared_failure(ranks, kind, message):
    with pytest.raises((CheckpointError, RunError, ZeroDivisionError)) as caught:
        on_rank_zero(lambda: fail(kind(message)))
    return type(caught.value).__name__, str(caught.value)


def test_a_users_mistake_is_the_same_error_everywhere(ranks):
    assert ranks(shared_failure, 2, CheckpointError, "no file") == [("CheckpointError", "no file")] * 2


def test_a_bug_stays_a_bug_on_rank_zero_and_stops_the_others(ranks):
    first, second = ranks(shared_failure, 2, ZeroDivisionError, "oops")
    assert first == ("ZeroDivisionError", "oops")
    assert second == ("RunError", "rank 0 failed: ZeroDivisionError: oops")


def test_one_process_just_calls():
    assert on_rank_zero(lambda: 3) == 3
    assert on_every_rank(lambda: 3) == 3


def own_result(ranks):
    return on_every_rank(lambda: [ranks.rank, object()])[0]


def test_every_rank_keeps_its_own_result(ranks):
    assert ranks(own_result, 3) == [0, 1, 2]


def failure_of_some(ranks, kind, *failing):
    def work():
        if ranks.rank in failing:
            raise kind(f"of rank {ranks.rank}")

    with pytest.raises((CheckpointError, ZeroDivisionError, RunError)) as caught:
        on_every_rank(work)
    return type(caught.value).__name__, str(caught.value)


def test_a_failure_of_any_rank_is_that_of_all(ranks):
    assert ranks(failure_of_some, 3, CheckpointError, 1, 2) == [("CheckpointError", "of rank 1")] * 3


def test_a_bug_of_one_rank_stays_one_there_and_stops_the_others(ranks):
    first, second = ranks(failure_of_some, 2, ZeroDivisionError, 1)
    assert first == ("RunError", "rank 1 failed: ZeroDivisionError: of rank 1")
    assert second == ("ZeroDivisionError", "of rank 1")


# Differences between ranks: found by one reduction, and told in one sentence per fact.


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
