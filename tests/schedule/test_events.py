"""The event loop with messages between ranks: what closed forms and common sense say of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.schedule import catalogue
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.schedule import Action, Schedule
from phalanx.schedule.timing import UNIT, Events, run, time

NAMES = sorted(SCHEDULES)
PASSES = {"F": 1.0, "B": 2.0, "I": 1.25, "W": 0.75}


def alike(schedule: Schedule, costs: dict[str, float] = UNIT, factor: float = 1.0) -> list[dict[str, list[float]]]:
    """The same durations on every rank."""
    return [{kind: [cost * factor] * schedule.stages for kind, cost in costs.items()}] * schedule.ranks


def ways(schedule: Schedule, seconds: float) -> dict[tuple[int, int], float]:
    """The same time for a message from any rank to any other."""
    ranks = range(schedule.ranks)
    return {(one, other): seconds for one in ranks for other in ranks if one != other}


def end(events: Events, durations: list[dict[str, list[float]]]) -> float:
    """When the last pass is over."""
    return max(
        start + durations[rank][action.kind][action.stage]
        for rank, program in enumerate(events.schedule.programs)
        for action, start in zip(program, events.starts[rank], strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 2), (3, 7), (4, 8), (5, 20)])
def test_without_messages_it_is_the_timing_of_the_schedule(name: str, ranks: int, micro_batches: int) -> None:
    schedule = catalogue.build(name, ranks, micro_batches)
    for costs in (UNIT, PASSES):
        assert run(schedule, alike(schedule, costs)).starts == time(schedule, costs).starts
        assert run(schedule, alike(schedule, costs), {}).starts == time(schedule, costs).starts


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("hop", [0.0, 0.25, 3.0])
def test_a_pipeline_fills_in_p_minus_1_passes_and_messages(ranks: int, hop: float) -> None:
    schedule = catalogue.build("1f1b", ranks, 2 * ranks)
    events = run(schedule, alike(schedule), ways(schedule, hop))
    for rank in range(ranks):
        assert events.starts[rank][0] == pytest.approx(rank * (UNIT["F"] + hop))
    # The first gradients come back as slowly: through every rank and over every link.
    first = schedule.programs[0].index(Action("B", 0, 0))
    assert events.starts[0][first] >= (ranks - 1) * (UNIT["F"] + UNIT["B"] + 2 * hop) + UNIT["F"] - 1e-9
    assert end(events, alike(schedule)) >= 2 * ranks * 3 + (ranks - 1) * (3 + 2 * hop) - 1e-9


def test_one_micro_batch_goes_there_and_back_over_every_link() -> None:
    schedule = catalogue.build("1f1b", 5, 1)
    durations = alike(schedule)
    assert end(run(schedule, durations, ways(schedule, 0.5)), durations) == pytest.approx(5 * 3 + 2 * 4 * 0.5)


def test_messages_on_one_channel_go_one_after_the_other() -> None:
    """Links ten times as slow as passes: a rank's results queue up behind each other, the two ways do not."""
    schedule = catalogue.build("gpipe", 2, 4)
    events = run(schedule, alike(schedule), ways(schedule, 10.0))
    forward, backward = (dict(zip(schedule.programs[rank], events.arrivals_of(rank), strict=True)) for rank in (0, 1))
    there = [forward[Action("F", 0, micro)] for micro in range(4)]
    assert there == [11.0, 21.0, 31.0, 41.0]
    assert events.starts[1][:4] == tuple(there)
    back = sorted(backward[Action("B", 1, micro)] for micro in range(4))
    assert all(late - early >= 10 - 1e-9 for early, late in pairwise(back))


@pytest.mark.parametrize("name", NAMES)
def test_no_channel_has_two_messages_at_once(name: str) -> None:
    schedule = catalogue.build(name, 4, 8)
    events = run(schedule, alike(schedule), ways(schedule, 1.5))
    channels: dict[tuple[int, int], list[float]] = {}
    for rank, program in enumerate(schedule.programs):
        for action, arrival in zip(program, events.arrivals_of(rank), strict=True):
            to = action.stage + (1 if action.kind == "F" else -1)
            if action.kind != "W" and 0 <= to < schedule.stages:
                other = schedule.rank_of(to, action.micro)
                if other != rank:
                    channels.setdefault((rank, other), []).append(arrival)
    assert channels
    for arrivals in channels.values():
        assert all(late - early >= 1.5 - 1e-9 for early, late in pairwise(sorted(arrivals)))


def test_who_blocks_waits_for_its_own_messages() -> None:
    schedule = catalogue.build("gpipe", 2, 3)
    beside = run(schedule, alike(schedule), ways(schedule, 0.5))
    waits = run(schedule, alike(schedule), ways(schedule, 0.5), blocking=True)
    assert beside.starts[0][:3] == (0.0, 1.0, 2.0)
    assert waits.starts[0][:3] == (0.0, 1.5, 3.0)
    assert waits.starts[1][:3] == (1.5, 3.0, 4.5)


@pytest.mark.parametrize("name", NAMES)
def test_blocking_is_never_faster(name: str) -> None:
    schedule = catalogue.build(name, 4, 8)
    durations, hops = alike(schedule), ways(schedule, 0.3)
    assert end(run(schedule, durations, hops, blocking=True), durations) >= end(
        run(schedule, durations, hops), durations
    )


def test_no_forward_pass_begins_before_its_stage_s_floor() -> None:
    schedule = catalogue.build("interleaved_1f1b", 2, 4)
    floors = [[0.5, 0.0, 7.0, 0.0], [0.0, 0.0, 0.0, 9.0]]
    events = run(schedule, alike(schedule), floors=floors)
    for rank, program in enumerate(schedule.programs):
        for action, start in zip(program, events.starts[rank], strict=True):
            if action.kind == "F":
                assert start >= floors[rank][action.stage]
    assert events.starts[0][0] == 0.5
    assert run(schedule, alike(schedule), floors=[[0.0] * 4] * 2).starts == time(schedule).starts


def test_ranks_that_wait_for_each_other_have_fewer_starts() -> None:
    """Each begins with what only the other's last pass lets it do."""
    programs = (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)),
    )
    schedule = Schedule("circle", ((0, 1),), 2, programs)
    for hops in (None, {(0, 1): 0.5, (1, 0): 0.5}):
        events = run(schedule, alike(schedule), hops)
        assert [len(starts) for starts in events.starts] == [1, 0]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, list[dict[str, list[float]]]]:
    """A schedule, and a time for each pass of each stage on each rank."""
    name = draw(st.sampled_from(NAMES))
    ranks = draw(st.integers(2, 5))
    schedule = catalogue.build(name, ranks, draw(st.integers(ranks, 3 * ranks)))
    seconds = st.floats(0.01, 10)
    by_stage = {kind: [draw(seconds) for _ in range(schedule.stages)] for kind in "FBIW"}
    return schedule, [
        {kind: [factor * one for one in each] for kind, each in by_stage.items()}
        for factor in (draw(st.sampled_from([1.0, 1.5])) for _ in range(ranks))
    ]


@settings(max_examples=80)
@given(pipelines(), st.floats(0, 3), st.floats(0, 3), st.booleans())
def test_slower_messages_never_make_a_step_faster(pipeline, less: float, more: float, blocks: bool) -> None:
    schedule, durations = pipeline
    fast, slow = (run(schedule, durations, ways(schedule, seconds), blocking=blocks) for seconds in (less, less + more))
    for early, late in zip(fast.starts, slow.starts, strict=True):
        assert all(a <= b * (1 + 1e-12) for a, b in zip(early, late, strict=True))


@settings(max_examples=40)
@given(pipelines(), st.floats(0, 3), st.sampled_from([0.25, 2.0, 1024.0]), st.booleans())
def test_time_has_no_unit(pipeline, hop: float, factor: float, blocks: bool) -> None:
    schedule, durations = pipeline
    scaled = [{kind: [factor * one for one in each] for kind, each in rank.items()} for rank in durations]
    once = run(schedule, durations, ways(schedule, hop), blocking=blocks)
    again = run(schedule, scaled, ways(schedule, factor * hop), blocking=blocks)
    assert again.starts == tuple(tuple(factor * start for start in starts) for starts in once.starts)
