"""Every schedule does everything once, on the right rank, and comes to its end, for all numbers that it takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.schedule import catalogue, check
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.generators import round_robin, v_shape, with_weight_passes
from phalanx.schedule.schedule import Action, Kind, Schedule
from phalanx.schedule.timing import time

NAMES = sorted(SCHEDULES)
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
