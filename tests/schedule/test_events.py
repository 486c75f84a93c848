"""The event loop, and the programs of every schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.schedule import catalogue, check
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.generators import round_robin, v_shape, with_weight_passes
from phalanx.schedule.schedule import Action, Kind, Schedule
from phalanx.schedule.timing import UNIT, Events, run, run_settled, time

# The event loop with messages between ranks: what closed forms and common sense say of it.


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


# Every schedule does everything once, on the right rank, and comes to its end, for all numbers that it takes.

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@st.composite
def built(draw: st.DrawFn, name: str) -> Schedule:
    """The schedule `name` with numbers that it takes."""
    entry = SCHEDULES[name]
    ranks = draw(st.integers(1, 8))
    micro_batches = draw(st.integers(ranks if entry.steps > 1 else entry.directions, 24))
    least, most = entry.chunks
    chunks = draw(st.integers(least, min(most, 4)))
    slices = draw(st.integers(1, 5)) if entry.sliced else 0
    steps = draw(st.integers(1, 3)) if entry.steps > 1 else 0
    return catalogue.build(name, ranks, micro_batches, chunks, slices, steps)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_pass_is_there_once_on_its_rank_and_all_ranks_come_to_their_end(name: str, data: st.DataObject):
    schedule = data.draw(built(name))
    done = {action: rank for rank, program in enumerate(schedule.programs) for action in program}
    assert len(done) == sum(len(program) for program in schedule.programs)
    passes = 0
    for stage in range(schedule.stages):
        for micro in range(schedule.micro_batches):
            rank = schedule.rank_of(stage, micro)
            for part in range(schedule.slices):
                kinds: set[Kind] = {kind for kind in KINDS if Action(kind, stage, micro, part) in done}
                assert kinds in ({"F", "B"}, {"F", "I", "W"})
                assert all(done[Action(kind, stage, micro, part)] == rank for kind in kinds)
                passes += len(kinds)
    assert passes == len(done)
    assert time(schedule).complete
    assert check.problems(schedule) == []


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_a_stage_adds_up_its_gradients_in_the_order_of_the_micro_batches(name: str, data: st.DataObject):
    schedule = data.draw(built(name))
    for program in schedule.programs:
        for stage in range(schedule.stages):
            for direction in range(len(schedule.placements)):
                micros = [
                    action.micro
                    for action in program
                    if action.stage == stage and action.kind in "BW" and schedule.direction(action.micro) == direction
                ]
                assert micros == sorted(micros)


@pytest.mark.parametrize("name", NAMES)
def test_two_to_four_ranks_take_as_many_micro_batches_twice_as_many_and_one_more(name: str):
    for ranks in (2, 3, 4):
        for micro_batches in (ranks, 2 * ranks, ranks + 1):
            assert check.problems(catalogue.build(name, ranks, micro_batches)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_bears_its_name_and_is_what_the_catalogue_says(name: str):
    entry, ranks, micro_batches = SCHEDULES[name], 4, 8
    schedule = catalogue.build(name, ranks, micro_batches)
    kinds = {action.kind for program in schedule.programs for action in program}
    assert schedule.name == name
    assert schedule.ranks == ranks
    assert schedule.micro_batches == micro_batches * entry.steps
    assert schedule.stages == catalogue.stages(name, ranks)
    assert len(schedule.placements) == entry.directions
    assert all(len(schedule.stages_on(rank)) == catalogue.chunks_of(name) for rank in range(ranks))
    assert (schedule.slices, schedule.steps) == (entry.slices, entry.steps)
    assert ("I" in kinds) == ("W" in kinds) == entry.splits


def test_stages_go_round_the_ranks_or_there_and_back():
    assert round_robin(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_shape(3) == (0, 1, 2, 2, 1, 0)


def test_slices_go_forward_in_their_order_and_backward_in_reverse():
    last = catalogue.build("terapipe", ranks=2, micro_batches=1, slices=3).programs[-1]
    assert " ".join(map(str, last)) == "1F0 1F0.1 1F0.2 1B0.2 1B0.1 1B0"


def test_dualpipe_sends_one_half_of_the_micro_batches_each_way():
    schedule = catalogue.build("dualpipe", ranks=4, micro_batches=9)
    first = [min(program, key=lambda action: action.stage) for program in schedule.programs]
    assert [schedule.direction(micro) for micro in range(9)] == [0] * 5 + [1] * 4
    assert [str(program[0]) for program in schedule.programs] == ["0F0", "1F0", "1F5", "0F5"]
    assert [action.stage for action in first] == [0, 1, 1, 0]


def test_1f1b_reads_as_in_the_paper():
    programs = catalogue.build("1f1b", ranks=3, micro_batches=4).programs
    assert " ".join(map(str, programs[0])) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert " ".join(map(str, programs[2])) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_weight_passes_go_where_a_rank_would_wait_or_hold_too_much():
    order = [Action(kind, 0, micro) for micro in (0, 1) for kind in ("F", "I")]
    written = [" ".join(map(str, with_weight_passes([order], stages=1, most=most)[0])) for most in (1, 2)]
    assert written == ["0F0 0I0 0W0 0F1 0I1 0W1", "0F0 0I0 0F1 0I1 0W0 0W1"]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([name for name in NAMES if SCHEDULES[name].searched]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([0.0, 0.02, 0.4, 1.5]),
    st.booleans(),
    st.lists(st.floats(1, 1.4), min_size=16, max_size=16),
)
def test_a_pipeline_that_has_settled_goes_on_as_all_of_it_would(name, ranks, seconds, blocking, slowness):
    """With stages of different times and messages one after the other, up to rounding."""
    period, several = SCHEDULES[name].period(ranks), 20 * SCHEDULES[name].period(ranks) + 2
    several -= several % period * bool(catalogue.problems(name, ranks, several))

    def run_one(schedule: Schedule) -> Events:
        return run(schedule, durations(schedule), ways(schedule, seconds), blocking=blocking)

    def durations(schedule: Schedule) -> list[dict[str, list[float]]]:
        each = [slowness[stage % len(slowness)] for stage in range(schedule.stages)]
        return [{kind: [cost * slow for slow in each] for kind, cost in PASSES.items()}] * ranks

    events, more = run_settled(lambda number: catalogue.build(name, ranks, number), several, period, run_one)
    whole = run_one(catalogue.build(name, ranks, several))
    assert end(events, durations(events.schedule)) + more == pytest.approx(
        end(whole, durations(whole.schedule)), rel=1e-12
    )


def test_most_pipelines_settle_after_a_few_micro_batches():
    settled = {
        name: run_settled(
            lambda number, name=name: catalogue.build(name, 4, number),
            128,
            SCHEDULES[name].period(4),
            lambda schedule: run(schedule, alike(schedule, PASSES), ways(schedule, 0.1)),
        )[0].schedule.micro_batches
        for name in NAMES
        if SCHEDULES[name].searched
    }
    assert {name: number for name, number in settled.items() if number > 64} == {}
    assert run(catalogue.build("gpipe", 4, 64), alike(catalogue.build("gpipe", 4, 64))).growth(4) is None
