"""Work of rank 0 and its failures reach every rank."""

import pytest

from phalanx.comm.agree import on_rank_zero
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
