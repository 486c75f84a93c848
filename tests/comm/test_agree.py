"""Work of rank 0 and its failures reach every rank, as do failures of any rank."""

import pytest

from phalanx.comm.agree import on_every_rank, on_rank_zero
from phalanx.errors import CheckpointError, RunError


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
