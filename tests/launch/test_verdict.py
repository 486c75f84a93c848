"""One exit code and one message from the ends of many ranks."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from phalanx.launch.supervisor import grace_left
from phalanx.launch.verdict import End, Outcome, verdict

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: bad'


def good(rank: int, code: int = 0, message: str = "") -> End:
    return End(rank, code, 100.0, False, Outcome(rank, code, message, None, 100.0))


def bug(rank: int, time: float, message: str = "ValueError: bad", trace: str = TRACE) -> End:
    return End(rank, 1, time, False, Outcome(rank, 1, message, trace, time))


def killed(rank: int) -> End:
    return End(rank, 137, 103.0, True, None)


def test_all_well() -> None:
    assert verdict([good(0), good(1)], None) == (0, "")


def test_stopped_with_a_checkpoint_says_it_once() -> None:
    ends = [good(rank, 75, "Stopped at step 7.") for rank in range(4)]
    assert verdict(ends, signal.SIGTERM) == (75, "Stopped at step 7.")


def test_a_mistake_that_all_ranks_found_is_said_once_without_ranks() -> None:
    assert verdict([good(rank, 4, "No shard x.") for rank in range(3)], None) == (4, "No shard x.")


def test_a_mistake_of_one_rank_names_it_and_shows_no_traceback() -> None:
    lost = bug(0, 100.2, "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:3")
    code, message = verdict([lost, good(1, 4, "Shard x is corrupt.")], None)
    assert code == 4
    assert message == "Rank 1 of 2 failed: Shard x is corrupt.\n1 other rank was stopped because of it."


def test_the_first_bug_is_shown_once() -> None:
    ends = [bug(0, 101.0, "KeyError: 'later'", "later trace"), bug(1, 100.0), killed(2)]
    code, message = verdict(ends, None)
    assert code == 1
    assert message == f"Rank 1 of 3 failed: {TRACE}\n2 other ranks were stopped because of it."


def test_the_same_bug_everywhere() -> None:
    _, message = verdict([bug(0, 100.1), bug(1, 100.0), bug(2, 100.2)], None)
    assert message == f"Rank 1 of 3 failed: {TRACE}\n2 other ranks were stopped by the same error."


def test_a_killed_rank_comes_before_the_peers_that_lost_it() -> None:
    lost = bug(0, 99.9, "RuntimeError: Connection reset by peer")
    code, message = verdict([lost, End(1, 137, 100.0, False, None)], None)
    assert code == 137
    assert message.startswith("Rank 1 of 2 was killed by SIGKILL. The kernel does this when memory runs out")


def test_last_words_of_a_rank_that_could_say_nothing() -> None:
    _, message = verdict([good(0), End(1, 139, 100.0, False, None, "Fatal Python error: Segmentation fault")], None)
    assert message.startswith("Rank 1 of 2 was killed by SIGSEGV. Its standard error ends:\nFatal Python error")


@pytest.mark.parametrize("code", [3, 255])
def test_an_exit_code_without_a_word(code: int) -> None:
    _, message = verdict([good(0), End(1, code, 100.0, False, None)], None)
    assert message.startswith(f"Rank 1 of 2 ended with exit code {code} and no message.")


def test_a_rank_that_died_on_its_way_out_is_judged_by_its_death() -> None:
    code, message = verdict([replace(good(0), code=134)], None)
    assert code == 134
    assert "SIGABRT" in message


@pytest.mark.parametrize("end", [killed(1), End(1, 143, 100.0, False, None)])
def test_ranks_that_did_not_get_to_a_checkpoint(end: End) -> None:
    code, message = verdict([good(0, 75, "Stopped."), end], signal.SIGTERM)
    assert code == 143
    assert message.startswith("Stopped by SIGTERM before 1 of 2 ranks could write a checkpoint")


def test_ranks_that_a_signal_ended_at_once_are_not_a_failure_of_those_that_lost_them() -> None:
    lost = bug(0, 99.9, "RuntimeError: Connection closed by peer")
    code, message = verdict([lost, End(1, 143, 100.0, False, None)], signal.SIGTERM)
    assert code == 143
    assert message.startswith("Stopped by SIGTERM before 2 of 2 ranks could write a checkpoint")


@pytest.mark.parametrize(("left", "expected"), [("", 30), ("soon", 30), ("990", 30), ("1120", 120), ("9999", 30)])
def test_grace_is_the_job_s_or_what_slurm_leaves_of_the_allocation(left: str, expected: float) -> None:
    assert grace_left(30.0, {"SLURM_JOB_END_TIME": left} if left else {}, 1000.0) == expected


def test_a_failure_while_stopping_is_a_failure() -> None:
    code, message = verdict([good(0, 75, "Stopped."), bug(1, 100.0)], signal.SIGTERM)
    assert code == 1
    assert "ValueError" in message


def test_a_hang_has_the_code_of_a_timeout() -> None:
    assert verdict([killed(0), killed(1)], None, hang="Rank 1 is stopped.") == (124, "Rank 1 is stopped.")


@pytest.mark.parametrize(
    "lost", ["[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9ms for recv", "Connection reset by peer"]
)
def test_records_come_first_where_every_error_is_that_of_a_victim(lost: str) -> None:
    code, message = verdict([bug(0, 100.0, lost), killed(1)], None, records="Rank 1 did not come.")
    assert code == 1
    assert message.startswith(f"Rank 1 did not come.\nRank 0 of 2 failed: {TRACE}")
    _, message = verdict([bug(0, 100.0), killed(1)], None, records="Rank 1 did not come.")
    assert message.startswith("Rank 0 of 2 failed")


def test_records_explain_an_abort() -> None:
    code, message = verdict([End(0, 134, 100.0, False, None), killed(1)], None, records="Mismatched collectives.")
    assert code == 134
    assert message.startswith("Mismatched collectives.\nRank 0 of 2 was killed by SIGABRT.")


def test_a_rank_that_exits_as_if_done_is_the_culprit() -> None:
    lost = bug(0, 99.0, "RuntimeError: Connection closed by peer")
    left = End(1, 0, 100.0, False, None, left_early="in step 4, phase data")
    code, message = verdict([lost, left], None)
    assert code == 1
    assert message.startswith("Rank 1 of 2 exited with code 0 in step 4, phase data, while the others still trained.")
