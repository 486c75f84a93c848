"""From records of all ranks to the culprit, one exit code, and how long a rank may be silent."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.lifeline import ProcessState
from phalanx.launch.local import grace_left
from phalanx.launch.verdict import End, Outcome, verdict
from phalanx.launch.watchdog import diagnosis
from phalanx.launch.watchdog.diagnosis import Limits, Pace, RankView, diagnose, find_mismatch, hangs, load_per_core
from phalanx.launch.watchdog.heartbeat import ChannelKey, Phase, RankRecord, RecordedCall

# From synthetic records of all ranks to the culprit: every case of the watchdog, and random programs that break.


LIMITS = Limits(10.0, 100.0)
GROUPS = {"world": (0, 1, 2, 3), "row0": (0, 1), "row1": (2, 3), "col0": (0, 2), "col1": (1, 3)}


@dataclass(frozen=True)
class Made:
    """A call as a test states it."""

    group: str = "world"
    operation: str = "all_reduce"
    dtype: str = "float32"
    shape: tuple[int, ...] = (4,)
    peer: int = -1
    """The other rank of a message."""


def record(rank: int, program: Sequence[Made], *, blocked: bool = True, on_device: bool = False) -> RankRecord:
    """A rank that has started the calls of a program; it waits in the last one if it is `blocked`."""
    calls, started, groups = [], {}, {}
    for number, made in enumerate(program, 1):
        receives = made.operation == "receive"
        ends = (made.peer, rank) if receives else (rank, made.peer)
        key = ChannelKey(made.group, *ends) if made.peer >= 0 else ChannelKey(made.group)
        started[key, receives] = started.get((key, receives), 0) + 1
        groups[made.group] = GROUPS[made.group]
        waits = blocked and number == len(program)
        calls.append(
            RecordedCall(
                number=number,
                channel=key,
                sequence=started[key, receives],
                operation=made.operation,
                axis=made.group,
                dtype=made.dtype,
                shape=made.shape,
                nbytes=4 * sum(made.shape),
                source="model.py:7",
                step=5,
                began=float(number),
                waits=float(number) if waits else 0.0,
                done=not waits,
                on_device=on_device,
                main=True,
            )
        )
    return RankRecord(
        rank=rank,
        world=4,
        pid=100 + rank,
        start_ticks=1,
        beat=0.0,
        tick=0.0,
        phase=Phase.FORWARD_BACKWARD,
        phase_began=0.0,
        step=5,
        first_step=1,
        own_s=0.0,
        work=0,
        started=started,
        groups=groups,
        calls=tuple(calls),
    )


def view(rank: int, program: Sequence[Made], *, silent_s: float = 20.0, state: str = "S", **changes) -> RankView:
    blocked = changes.pop("blocked", True)
    on_device = changes.pop("on_device", False)
    process = ProcessState(state, "futex_wait", 1, 1)
    return RankView(rank, record(rank, program, blocked=blocked, on_device=on_device), silent_s, process, **changes)


def by_rank(*views: RankView) -> dict[int, RankView]:
    return {each.rank: each for each in views}


TWO, THREE = [Made()] * 2, [Made()] * 3
WAITING = [view(rank, THREE) for rank in (0, 2, 3)]


@pytest.mark.parametrize(
    ("culprit", "words"),
    [
        (view(1, TWO, blocked=False, state="T"), "stopped by a signal (state T)"),
        (view(1, TWO, blocked=False, state="D"), "uninterruptible wait (disk or driver) in futex_wait (state D)"),
        (view(1, TWO, blocked=False, ticks_s=20.0), "native code holds Python's global interpreter lock"),
        (view(1, TWO, blocked=False, state="R"), "its process is running (state R)"),
        (
            view(1, TWO, blocked=False, exit_code=0),
            "is gone in step 6, phase forward/backward: its process exited with",
        ),
        (view(1, TWO, blocked=False, exit_code=-1), "its process has ended"),
        (view(1, THREE, state="T"), "stopped by a signal"),  # after it had come to the call
        (RankView(1, None, 200.0), "it has not written a heartbeat yet"),
    ],
)
def test_the_rank_that_does_not_come_is_the_culprit(culprit: RankView, words: str) -> None:
    views = by_rank(*WAITING, culprit)
    assert hangs(views, LIMITS)
    found = diagnose(views)
    assert (found.kind, found.culprits) == ("silent", (1,))
    assert words in diagnosis.headline(found, "h")
    lines = diagnosis.lines(found)
    assert [line.split(" has waited")[0] for line in lines] == ["rank 0", "rank 2", "rank 3"]
    if culprit.record is not None and len(culprit.record.calls) == 2:
        called = "It has not called all-reduce #3 of world (float32, 4; model.py:7), in which ranks 0, 2, 3 wait."
        assert called in diagnosis.headline(found, "h")
        assert all(line.endswith(" for rank 1") for line in lines)


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.SAVE])
def test_storage_that_does_not_answer(phase: Phase) -> None:
    stuck = view(1, TWO, blocked=False)
    assert stuck.record is not None
    stuck = replace(stuck, record=replace(stuck.record, phase=phase))
    text = diagnosis.headline(diagnose(by_rank(*WAITING, stuck)), "h")
    assert f"phase {phase.label}: its storage or data source does not answer" in text


def test_the_end_of_a_chain_is_the_culprit() -> None:
    """Rank 0 waits for rank 1, which waits for rank 3."""
    views = by_rank(
        view(0, [Made("row0")]),
        view(1, [Made("col1")]),
        view(2, [Made("row1")]),
        view(3, [], blocked=False),
    )
    found = diagnose(views)
    assert (found.kind, found.culprits) == ("silent", (3,))
    assert {(wait.rank, wait.missing) for wait in found.waits} == {(0, (1,)), (1, (3,)), (2, (3,))}


def test_two_groups_in_different_order_are_a_deadlock() -> None:
    views = by_rank(
        view(0, [Made("row0")]), view(1, [Made("world")]), view(2, [Made("world")]), view(3, [Made("world")])
    )
    found = diagnose(views)
    assert (found.kind, found.culprits) == ("deadlock", (0, 1))  # ranks 2 and 3 only wait for them
    assert hangs(views, LIMITS)


MISMATCHES = [
    Made(operation="broadcast"),
    Made(operation="all_reduce_max"),
    Made(operation="barrier", shape=()),
    Made(dtype="bfloat16"),
    Made(shape=(5,)),
    Made(shape=(2, 2)),
]


@pytest.mark.parametrize("other", MISMATCHES)
def test_calls_that_differ_name_both_ranks_and_lines(other: Made) -> None:
    views = by_rank(view(0, TWO), view(1, [Made(), other]), view(2, TWO), view(3, TWO))
    mismatch = find_mismatch(views)
    assert mismatch is not None
    assert (mismatch.rank, mismatch.other, mismatch.call.sequence) == (1, 0, 2)
    text = diagnosis.headline(diagnose(views), "h")
    assert text.count("#2 of world") == text.count("model.py:7") == 2


def test_the_odd_one_out_is_named_first_whatever_its_rank() -> None:
    views = by_rank(view(0, [Made(shape=(5,))]), *(view(rank, [Made()]) for rank in (1, 2, 3)))
    mismatch = find_mismatch(views)
    assert mismatch is not None
    assert (mismatch.rank, mismatch.other) == (0, 1)


def test_a_message_of_another_size_is_a_mismatch_and_one_of_another_shape_is_not() -> None:
    send = Made("row0", "send", shape=(4,), peer=1)
    for shape, differs in (((1, 3), False), ((5,), True)):
        views = by_rank(view(0, [send]), view(1, [Made("row0", "receive", shape=shape, peer=0)]))
        assert (find_mismatch(views) is not None) is differs


def test_the_shapes_of_an_all_to_all_may_differ() -> None:
    ragged = [view(rank, [Made("row0", "all_to_all", shape=(rank + 1, 8))]) for rank in (0, 1)]
    assert find_mismatch(by_rank(*ragged)) is None


def test_a_message_that_is_not_sent() -> None:
    views = by_rank(view(0, [Made("row0", "receive", peer=1)]), view(1, [], blocked=False))
    found = diagnose(views)
    assert (found.kind, found.culprits) == ("silent", (1,))
    assert "receive #1 of row0 1 → 0" in diagnosis.headline(found, "h")


def test_ranks_of_another_machine_are_named_with_their_host() -> None:
    found = diagnose(by_rank(view(0, [Made()]), view(1, [Made()])))
    assert (found.kind, found.culprits) == ("unseen", (2, 3))
    assert "wait for ranks 2, 3 on node-b" in diagnosis.headline(
        found, "node-a", ["node-a", "node-a", "node-b", "node-b"]
    )


def test_a_rank_that_waits_for_another_machine_holds_nobody_up_itself() -> None:
    """Rank 1 has the result of the first call already and waits in the second; rank 0 still waits for the others."""
    found = diagnose(by_rank(view(0, [Made()]), view(1, TWO)))
    assert (found.kind, found.culprits) == ("unseen", (2, 3))


def test_a_call_to_which_all_came_is_stuck() -> None:
    found = diagnose(by_rank(*(view(rank, THREE) for rank in range(4))))
    assert found.kind == "stuck"
    assert diagnosis.headline(found, "h").startswith(
        "All ranks on h have come as far as all-reduce #3 of world (float32"
    )


def test_devices_that_hang_silence_all_ranks_alike() -> None:
    found = diagnose(by_rank(*(view(rank, THREE, blocked=False, on_device=True) for rank in range(4))))
    assert found.kind == "stuck"
    assert "as far as all-reduce #3 of world" in diagnosis.headline(found, "h")


def test_a_device_shows_only_who_has_not_come() -> None:
    """On NCCL the host never waits: the ranks that have enqueued more are silent, too."""
    ahead = [view(rank, THREE, blocked=False, on_device=True) for rank in (0, 2, 3)]
    found = diagnose(by_rank(*ahead, view(1, TWO, blocked=False, on_device=True)))
    assert (found.kind, found.culprits) == ("silent", (1,))


def test_without_any_call_those_silent_the_longest_are_named() -> None:
    views = by_rank(view(0, [], silent_s=1.0, blocked=False), view(1, [], silent_s=30.0, blocked=False))
    assert hangs(views, LIMITS)
    assert diagnose(views).culprits == (1,)


def started(rank: int, **changes) -> RankView:
    found = view(rank, TWO, blocked=False)
    assert found.record is not None
    return replace(found, record=replace(found.record, **changes))


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        (by_rank(*WAITING, view(1, TWO, blocked=False)), True),
        (by_rank(*WAITING, view(1, TWO, blocked=False, silent_s=9.0)), False),  # it still works
        (by_rank(*(replace(each, silent_s=9.0) for each in WAITING), view(1, TWO, blocked=False)), True),
        (by_rank(started(0, step=0)), False),  # the first step may take longer
        (by_rank(started(0, first_step=0)), False),
        (by_rank(started(0, phase=Phase.END)), False),
        (by_rank(replace(started(0, phase=Phase.END), silent_s=101.0)), True),
        (by_rank(replace(started(0, phase=Phase.DONE), silent_s=1e6)), False),  # nobody waits for it any more
        (by_rank(replace(started(0), exit_code=0)), False),  # ended ranks are silent for good
    ],
)
def test_when_ranks_hang(views: Mapping[int, RankView], expected: bool) -> None:
    assert hangs(views, LIMITS) is expected
    assert not hangs(views, Limits(0.0, 100.0))


CALLS = st.builds(
    Made,
    st.sampled_from(list(GROUPS)),
    st.sampled_from(["all_reduce", "all_gather", "broadcast"]),
    shape=st.tuples(st.integers(1, 9)),
)


def run(programs: Sequence[Sequence[Made]], stops: Mapping[int, int] | None = None) -> dict[int, RankView]:
    """Runs four ranks' programs, call by call, until nobody can go on. Rank r of `stops` stops before a call."""
    stops = stops or {}
    started = dict.fromkeys(range(4), 0)

    def calls(rank: int, group: str) -> int:
        return sum(made.group == group for made in programs[rank][: started[rank]])

    def waits(rank: int) -> bool:
        if not started[rank]:
            return False
        group = programs[rank][started[rank] - 1].group
        return any(calls(other, group) < calls(rank, group) for other in GROUPS[group])

    moved = True
    while moved:
        moved = False
        for rank in range(4):
            if not waits(rank) and started[rank] < stops.get(rank, len(programs[rank])):
                started[rank] += 1
                moved = True
    return by_rank(*(view(rank, programs[rank][: started[rank]], blocked=waits(rank)) for rank in range(4)))


def of_rank(rank: int, program: Sequence[Made]) -> list[Made]:
    return [made for made in program if rank in GROUPS[made.group]]


@given(st.lists(CALLS, min_size=1, max_size=20), st.integers(0, 3), st.data())
def test_in_any_program_the_rank_that_stops_is_the_culprit(program, rank, data) -> None:
    programs = [of_rank(each, program) for each in range(4)]
    last = data.draw(st.integers(0, max(0, len(programs[rank]) - 1)))
    views = run(programs, {rank: last})
    assert find_mismatch(views) is None
    found = diagnose(views)
    if found.waits:
        assert (found.kind, found.culprits) == ("silent", (rank,))


@given(st.lists(CALLS, min_size=1, max_size=20), st.integers(0, 3), st.data())
def test_in_any_program_the_call_that_differs_is_found(program, rank, data) -> None:
    programs = [of_rank(each, program) for each in range(4)]
    if not programs[rank]:
        return
    place = data.draw(st.integers(0, len(programs[rank]) - 1))
    wrong = replace(programs[rank][place], operation="all_to_all")
    programs[rank][place] = wrong
    mismatch = find_mismatch(run(programs))
    assert mismatch is not None
    assert rank in (mismatch.rank, mismatch.other)
    assert wrong.operation in (mismatch.call.operation, mismatch.other_call.operation)


@given(st.lists(CALLS, max_size=20))
def test_a_correct_program_is_never_accused(program) -> None:
    views = run([of_rank(rank, program) for rank in range(4)])
    assert find_mismatch(views) is None
    assert not diagnose(views).waits


def test_a_digest_tells_of_calls_that_are_not_recorded_any_more() -> None:
    """The newest calls are the same on all ranks; one of rank 1 before them was not."""
    views = by_rank(*(view(rank, THREE) for rank in range(4)))
    for rank, each in views.items():
        calls = tuple(replace(call, digest=99 if rank == 1 else 7) for call in each.record.calls)
        views[rank] = replace(each, record=replace(each.record, calls=calls))
    found = find_mismatch(views)
    assert found is not None
    assert (found.rank, found.earlier, found.call.sequence) == (1, True, 1)
    assert "made different calls of world before #1" in diagnosis.headline(diagnose(views), "here")


# One exit code and one message from the ends of many ranks.

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: bad'


def good(rank: int, code: int = 0, message: str = "") -> End:
    return End(rank, code, 100.0, False, Outcome(rank, code, message, None, 100.0))


def bug(rank: int, time: float, message: str = "ValueError: bad", trace: str = TRACE) -> End:
    return End(rank, 1, time, False, Outcome(rank, 1, message, trace, time))


def killed(rank: int) -> End:
    return End(rank, 137, 103.0, True, None)


def lost(rank: int, words: str, time: float = 99.9) -> End:
    return bug(rank, time, f"RuntimeError: {words}")


def silent(rank: int, code: int, words: str = "", left_early: str = "") -> End:
    return End(rank, code, 100.0, False, None, words, left_early)


GLOO_TIMEOUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9ms for recv"
STOPPED = "Stopped by SIGTERM before {} of 2 ranks could write a checkpoint; the same command resumes from the last "
STOPPED += "complete one."
OTHER = "\n1 other rank was stopped because of it."
OOM = f"Rank 1 of 2 was killed by SIGKILL. The kernel does this when memory runs out (see dmesg).{OTHER}"
DID_NOT_COME = {"records": "Rank 1 did not come."}
VERDICTS = {
    "all well": ([good(0), good(1)], {}, 0, ""),
    "a checkpoint": ([good(r, 75, "Stopped at step 7.") for r in range(4)], {"stop": 15}, 75, "Stopped at step 7."),
    "a mistake of all needs no rank": ([good(r, 4, "No shard x.") for r in range(3)], {}, 4, "No shard x."),
    "a mistake of one names it, without a traceback": (
        [lost(0, "[pair.cc:547] Connection closed by peer [127.0.0.1]:3", 100.2), good(1, 4, "Shard x is corrupt.")],
        *({}, 4, "Rank 1 of 2 failed: Shard x is corrupt.\n1 other rank was stopped because of it."),
    ),
    "the first bug, once": (
        [bug(0, 101.0, "KeyError: 'later'", "later trace"), bug(1, 100.0), killed(2)],
        *({}, 1, f"Rank 1 of 3 failed: {TRACE}\n2 other ranks were stopped because of it."),
    ),
    "the same bug everywhere": (
        [bug(0, 100.1), bug(1, 100.0), bug(2, 100.2)],
        *({}, 1, f"Rank 1 of 3 failed: {TRACE}\n2 other ranks were stopped by the same error."),
    ),
    "killed, before peers that lost it": ([lost(0, "Connection reset by peer"), silent(1, 137)], {}, 137, OOM),
    "last words": (
        [good(0), silent(1, 139, "Fatal Python error: Segment")],
        *({}, 139, f"Rank 1 of 2 was killed by SIGSEGV. Its standard error ends:\nFatal Python error: Segment{OTHER}"),
    ),
    "no word": ([good(0), silent(1, 3)], {}, 3, f"Rank 1 of 2 ended with exit code 3 and no message.{OTHER}"),
    "no signal": ([good(0), silent(1, 255)], {}, 255, f"Rank 1 of 2 ended with exit code 255 and no message.{OTHER}"),
    "died on its way out": ([replace(good(0), code=134)], {}, 134, "Rank 0 of 1 was killed by SIGABRT."),
    "killed before a checkpoint": ([good(0, 75, "Stopped."), killed(1)], {"stop": 15}, 143, STOPPED.format(1)),
    "ended before a checkpoint": ([good(0, 75, "Stopped."), silent(1, 143)], {"stop": 15}, 143, STOPPED.format(1)),
    "ended at once by a signal, and lost": (
        [lost(0, "Connection closed by peer"), silent(1, 143)],
        *({"stop": 15}, 143, STOPPED.format(2)),
    ),
    "a failure while stopping": (
        [good(0, 75, "Stopped."), bug(1, 100.0)],
        *({"stop": 15}, 1, f"Rank 1 of 2 failed: {TRACE}{OTHER}"),
    ),
    "a hang is a timeout": ([killed(0), killed(1)], {"hang": "Rank 1 is stopped."}, 124, "Rank 1 is stopped."),
    "records, if all are victims": (
        [bug(0, 100.0, GLOO_TIMEOUT), killed(1)],
        *(DID_NOT_COME, 1, f"Rank 1 did not come.\nRank 0 of 2 failed: {TRACE}{OTHER}"),
    ),
    "records, if a connection broke": (
        [bug(0, 100.0, "Connection reset by peer"), killed(1)],
        *(DID_NOT_COME, 1, f"Rank 1 did not come.\nRank 0 of 2 failed: {TRACE}{OTHER}"),
    ),
    "no records beside a cause": (
        [bug(0, 100.0), killed(1)],
        *(DID_NOT_COME, 1, f"Rank 0 of 2 failed: {TRACE}{OTHER}"),
    ),
    "records explain an abort": (
        [silent(0, 134), killed(1)],
        *({"records": "Mismatched."}, 134, f"Mismatched.\nRank 0 of 2 was killed by SIGABRT.{OTHER}"),
    ),
    "an exit as if done": (
        [lost(0, "Connection closed by peer", 99.0), silent(1, 0, left_early="in step 4, phase data")],
        *({}, 1, f"Rank 1 of 2 exited with code 0 in step 4, phase data, while the others still trained.{OTHER}"),
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_about(case: str) -> None:
    ends, given, code, message = VERDICTS[case]
    stop = signal.Signals(given["stop"]) if "stop" in given else None
    found = verdict(ends, stop, hang=given.get("hang", ""), records=given.get("records", ""))
    assert found == (code, message)


@pytest.mark.parametrize(("left", "expected"), [("", 30), ("soon", 30), ("990", 30), ("1120", 120), ("9999", 30)])
def test_grace_is_the_job_s_or_what_slurm_leaves_of_the_allocation(left: str, expected: float) -> None:
    assert grace_left(30.0, {"SLURM_JOB_END_TIME": left} if left else {}, 1000.0) == expected


# How long a rank may be silent, by what the run has done so far: with a clock of the tests' own, so nothing waits.

PACE = Limits(300.0, 600.0, follows=True)
START = replace(record(0, []), world=1, step=0)


class Run:
    """A rank and the clock by which it is watched."""

    def __init__(self) -> None:
        self.now, self.pace, self.record = 1000.0, Pace(), START
        self.look()

    def look(self) -> None:
        self.pace.update([self.record], self.now)

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now += seconds
            self.record = replace(self.record, step=self.record.step + 1)
            self.look()

    def phase(self, phase: Phase, seconds: float) -> None:
        self.record = replace(self.record, phase=phase, phase_began=self.now)
        self.look()
        self.now += seconds
        self.record = replace(self.record, phase=Phase.FORWARD_BACKWARD, phase_began=self.now)
        self.look()

    def hangs_after(self, silent_s: float, load: float = 1.0) -> bool:
        return hangs({0: RankView(0, self.record, silent_s)}, PACE, self.pace, load)


def test_short_steps_have_twenty_seconds() -> None:
    run = Run()
    run.steps(10, 0.1)
    assert not run.hangs_after(19.0)
    assert run.hangs_after(21.0)


def test_the_first_step_has_the_timeout_and_counts_from_then_on() -> None:
    run = Run()
    assert not run.hangs_after(500.0)
    run.steps(1, 90.0)
    run.steps(5, 1.0)
    assert not run.hangs_after(179.0)  # compiling again may take as long
    assert run.hangs_after(181.0)


def test_long_steps_have_longer() -> None:
    run = Run()
    run.steps(3, 12.0)
    assert not run.hangs_after(59.0)
    assert run.hangs_after(61.0)


@pytest.mark.parametrize("phase", [Phase.SAVE, Phase.VALIDATION])
def test_the_first_of_its_kind_may_take_long_and_no_later_one_is_cut_short(phase: Phase) -> None:
    run = Run()
    run.steps(3, 0.5)
    run.record = replace(run.record, phase=phase, phase_began=run.now)
    run.look()
    assert not run.hangs_after(299.0)
    run.phase(phase, 70.0)
    run.steps(3, 0.5)
    assert run.pace.step_s < 1.0  # the save is none of its step
    assert not run.hangs_after(139.0)
    assert run.hangs_after(141.0)


def test_the_longest_limit_is_half_of_the_timeout() -> None:
    run = Run()
    run.steps(3, 200.0)
    assert not run.hangs_after(299.0)
    assert run.hangs_after(301.0, load=20.0)


def test_no_false_alarm_at_a_load_of_twenty_times_the_cores() -> None:
    """Steps of 2 s: with 20 processes on each core one takes 40 s, before any such step has been seen."""
    run = Run()
    run.steps(20, 2.0)
    for seconds in (40.0, 80.0, 199.0):
        assert not run.hangs_after(seconds, load=20.0)
    run.steps(3, 40.0)
    assert not run.hangs_after(199.0)  # what was slow may be slow again, whatever the load now
    assert load_per_core() >= 0


def test_a_limit_of_the_user_s_own_holds() -> None:
    run = Run()
    run.steps(3, 12.0)
    view = {0: RankView(0, run.record, 9.0)}
    assert hangs(view, Limits(8.0, 600.0), run.pace, 20.0)
