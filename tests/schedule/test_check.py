"""The validator: passes every schedule of the catalogue, and names every kind of mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.schedule import catalogue
from phalanx.schedule.check import blocked, check, in_flight, problems
from phalanx.schedule.schedule import Action, Schedule

NAMES = list(catalogue.SCHEDULES)


def built(name: str, ranks: int, micro_batches: int) -> Schedule | None:
    """The schedule, or None where it does not exist in that size."""
    return None if catalogue.problems(name, ranks, micro_batches) else catalogue.build(name, ranks, micro_batches)


def line(*programs: str, micro_batches: int = 2, placements: tuple[tuple[int, ...], ...] = ((0, 1),)) -> Schedule:
    """A schedule from its actions as words, without a look at them."""
    return Schedule(
        "line", placements, micro_batches, tuple(tuple(map(action, program.split())) for program in programs)
    )


def action(word: str) -> Action:
    return Action(word[1], int(word[0]), int(word[2:]))  # pyright: ignore[reportArgumentType]


def with_program(schedule: Schedule, rank: int, program: list[Action]) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_one(name):
    tried = 0
    for ranks in range(1, 7):
        for micro_batches in range(1, 17):
            schedule = built(name, ranks, micro_batches)
            if schedule is not None:
                tried += 1
                assert problems(schedule) == [], (ranks, micro_batches)
    assert tried >= 30


@st.composite
def chosen(draw) -> tuple[Schedule, int, int]:
    """A schedule, a rank of it and one of its actions."""
    name = draw(st.sampled_from(NAMES))
    schedule = built(name, 2 * draw(st.integers(1, 2)), 2 * draw(st.integers(2, 4)))
    assert schedule is not None
    rank = draw(st.integers(0, schedule.ranks - 1))
    return schedule, rank, draw(st.integers(0, len(schedule.programs[rank]) - 1))


@given(chosen())
@settings(deadline=None, max_examples=60)
def test_an_action_that_is_dropped_is_missed(case):
    schedule, rank, place = case
    program = list(schedule.programs[rank])
    gone = program.pop(place)
    found = problems(with_program(schedule, rank, program))
    assert len(found) == 1
    assert found[0].startswith(f"rank {rank}: {gone} is missing")


@given(chosen())
@settings(deadline=None, max_examples=60)
def test_an_action_that_is_repeated_is_named(case):
    schedule, rank, place = case
    program = list(schedule.programs[rank])
    assert f"rank {rank}: {program[place]} appears more than once" in problems(
        with_program(schedule, rank, [*program, program[place]])
    )


@given(chosen())
@settings(deadline=None, max_examples=60)
def test_an_action_on_the_wrong_rank_is_named(case):
    schedule, rank, place = case
    program = list(schedule.programs[rank])
    moved = program.pop(place)
    other = (rank + 1) % schedule.ranks
    wrong = with_program(schedule, rank, program)
    wrong = with_program(wrong, other, [*wrong.programs[other], moved])
    of = f" for micro-batch {moved.micro}" if len(schedule.placements) > 1 else ""
    expected = f"rank {other}: {moved} is on the wrong rank: stage {moved.stage}{of} is on rank {rank}"
    assert expected in problems(wrong)


@given(chosen())
@settings(deadline=None, max_examples=60)
def test_a_backward_pass_before_its_forward_pass_is_named(case):
    schedule, rank, place = case
    program = list(schedule.programs[rank])
    moved = program[place]
    forward = moved._replace(kind="F")
    first = next(a for a in program if a.kind in "BI" and a[1:] == moved[1:])
    program.remove(first)
    program.insert(program.index(forward), first)
    assert f"rank {rank}: {first} comes before {forward}, whose result it needs" in problems(
        with_program(schedule, rank, program)
    )


def test_gradients_of_weights_before_those_of_inputs_are_named():
    found = problems(line("0F0 0W0 0I0 0F1 0B1", placements=((0,),)))
    assert found == ["rank 0: 0W0 comes before 0I0, whose result it needs"]


def test_both_a_whole_backward_pass_and_a_half_is_too_much_and_a_half_is_too_little():
    found = problems(line("0F0 0B0 0W0 0F1 0I1", placements=((0,),)))
    assert found == [
        "rank 0: 0B0 appears together with 0W0: a backward pass is B, or its halves I and W",
        "rank 0: 0W1 is missing, the other half of 0I1",
    ]
    assert problems(line("0F0 0F1 0B1", placements=((0,),))) == ["rank 0: 0B0 is missing (or its halves, 0I0 and 0W0)"]


def test_what_does_not_exist_is_named():
    found = problems(line("0F0 0F1 0B0 0B1 0F9 5F0", "1F0 1B0 1F1 1B1"))
    kinds = "there are the kinds F, B, I and W, stages 0 to 1, micro-batches 0 to 1"
    assert found == [f"rank 0: 0F9 does not exist: {kinds}", f"rank 0: 5F0 does not exist: {kinds}"]
    whole = line("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert problems(whole) == []
    assert problems(replace(whole, placements=((0, 2),))) == ["stage 1 is on rank 2; the ranks are 0 to 1"]
    assert problems(replace(whole, steps=3)) == [
        "micro_batches 2 % steps 3 = 2: steps take equal shares; nearest: 1, 2"
    ]
    assert problems(replace(whole, slices=0)) == ["slices must be at least 1, is 0"]
    assert problems(replace(whole, programs=(*whole.programs, ()))) == ["rank 2 has no actions"]
    assert problems(replace(whole, placements=((0, 1), (1,)))) == ["stages in each direction: 2, 1; must be equal"]


def test_a_cycle_of_waits_is_described():
    # Rank 0 wants its gradients before it has sent what rank 1 waits for.
    found = problems(line("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    assert found == [
        "deadlock: rank 0 cannot begin 0B0: it waits for 1B0 or 1I0 on rank 1",
        "deadlock: rank 1 cannot begin 1F1: it waits for 0F1 on rank 0",
        "deadlock: the ranks wait in a cycle, rank 0 -> rank 1 -> rank 0",
    ]


def test_a_rank_that_waits_for_itself_is_described():
    found = problems(line("1F0 0F0 1B0 0B0", micro_batches=1, placements=((0, 0),)))
    assert found == [
        "deadlock: rank 0 cannot begin 1F0: it waits for 0F0 later in its own program",
        "deadlock: the ranks wait in a cycle, rank 0 -> rank 0",
    ]


@given(chosen(), st.randoms())
@settings(deadline=None, max_examples=40)
def test_in_any_order_a_schedule_runs_or_its_cycle_is_found(case, random):
    schedule, rank, _ = case
    program = list(schedule.programs[rank])
    random.shuffle(program)
    found = problems(with_program(schedule, rank, program))
    assert not found or "comes before" in found[0] or "in a cycle" in found[-1]


def test_an_error_lists_all_problems_but_of_very_many_only_the_first():
    whole = catalogue.build("1f1b", 4, 8)
    check(whole)
    with pytest.raises(JobError) as raised:
        check(with_program(whole, 0, [Action("F", 0, 0)]))
    assert len(raised.value.problems) == 8 + 7
    with pytest.raises(JobError) as raised:
        check(with_program(catalogue.build("1f1b", 4, 100), 0, [Action("F", 0, 0)]))
    assert raised.value.problems[-1] == "and 159 more problems"


def test_activations_are_kept_until_the_end_of_the_backward_pass_or_of_its_second_half():
    assert in_flight(line("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")) == (2, 1)
    assert in_flight(line("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1W0 1B1")) == (2, 2)


def test_sends_that_block_suit_1f1b_and_not_what_goes_round_the_ranks_both_ways():
    assert blocked(catalogue.build("1f1b", 4, 8)) == []
    assert blocked(catalogue.build("interleaved_1f1b", 4, 8)) == [
        "deadlock: rank 0 cannot send the result of 4B0: rank 3 has not posted its receive",
        "deadlock: rank 1 cannot send the result of 5B1: rank 0 has not posted its receive",
        "deadlock: rank 2 cannot send the result of 6B2: rank 1 has not posted its receive",
        "deadlock: rank 3 cannot send the result of 7B3: rank 2 has not posted its receive",
        "deadlock: the ranks wait in a cycle, rank 0 -> rank 3 -> rank 2 -> rank 1 -> rank 0",
    ]


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb_h1", "terapipe", "pipedream"])
def test_sends_may_block_in_schedules_that_go_one_way_at_a_time(name):
    for ranks in range(1, 6):
        for micro_batches in range(1, 9):
            schedule = built(name, ranks, micro_batches)
            assert schedule is None or blocked(schedule) == [], (ranks, micro_batches)
