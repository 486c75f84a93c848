"""The facts in a catalogue entry hold for the program of its schedule, and its bounds are close."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from phalanx import facts
from phalanx.schedule import catalogue
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.entry import ScheduleEntry
from phalanx.schedule.probe import FACTS, ProbedProgram
from phalanx.schedule.timing import time

NAMES = sorted(SCHEDULES)


@functools.cache
def pipelines(name: str) -> list[ProbedProgram]:
    """The schedule for a grid of ranks, micro-batches and stages per rank."""
    return list(_pipelines(name, SCHEDULES[name]))


def _pipelines(name: str, entry: ScheduleEntry) -> Iterator[ProbedProgram]:
    for ranks in range(2, 8):
        for chunks in range(entry.chunks[0], min(entry.chunks[1], 4) + 1):
            written = chunks if entry.takes_chunks else 0
            for micros in range(1, 3 * ranks + 3):
                if not catalogue.problems(name, ranks, micros, written):
                    yield ProbedProgram(ranks, micros, chunks, catalogue.build(name, ranks, micros, written))


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_programs_are_what_the_facts_say(name: str, fact: str):
    assert list(FACTS[fact](SCHEDULES[name], pipelines(name))) == []


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_of_the_catalogue_would_be_accepted(name: str):
    """The project's own entries pass the checks of those that are added; only their names are taken."""
    assert list(facts.problems(SCHEDULES[name])) == []
    taken = [problem for problem in SCHEDULES.problems(name, SCHEDULES[name]) if "already means" not in problem]
    assert taken == ["the name is taken by package phalanx"]


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "pipedream"])
def test_the_formula_of_activations_is_exact(name: str):
    for ranks, micros, chunks, schedule in pipelines(name):
        if schedule.micro_batches >= 2 * ranks:
            assert SCHEDULES[name].in_flight(ranks, micros, chunks, 0) == schedule.peak_live_activations(0)


@pytest.mark.parametrize("name", NAMES)
def test_the_last_rank_to_begin_begins_no_earlier_than_the_idle_time_says(name: str):
    """Without an exact form, idle time is at least what a rank waits for its first micro-batch."""
    entry = SCHEDULES[name]
    if entry.idle_is_exact(4, 8):
        return
    for ranks, micros, chunks, schedule in pipelines(name):
        costs = dict.fromkeys("FBIW", 1.0)
        begins = max(starts[0] for starts in time(schedule, costs).starts)
        # A forward pass of a stage takes one here: of a rank's, V.
        assert entry.idle(ranks, micros, chunks, float(chunks)) <= begins


@pytest.mark.parametrize("name", NAMES)
def test_a_full_pipeline_repeats_itself_after_a_period(name: str):
    """A period more of micro-batches adds its work and no idle time, and no activations."""
    entry, ranks = SCHEDULES[name], 4
    period = entry.period(ranks)
    fewer, more = (catalogue.build(name, ranks, number * period) for number in (8, 9))
    for rank in range(ranks):
        early = time(fewer).starts[rank][-1], time(more).starts[rank][-1]
        assert early[1] - early[0] == pytest.approx(time(more).work(rank) - time(fewer).work(rank)) or name == "naive"
        assert entry.all_in_flight or fewer.peak_live_activations(rank) == more.peak_live_activations(rank)


def test_the_search_has_schedules_to_start_with():
    assert any(entry.seeds for entry in SCHEDULES.values())


def test_a_schedule_with_several_stages_names_one_with_one():
    for name, entry in SCHEDULES.items():
        if entry.interleaves:
            assert entry.takes_chunks, name
            assert SCHEDULES[entry.interleaves].chunks == (1, 1), name


def test_no_two_schedules_share_a_name():
    called = [other for entry in SCHEDULES.values() for other in entry.also_called]
    assert len({*called, *SCHEDULES}) == len(called) + len(SCHEDULES)
    for name, entry in SCHEDULES.items():
        assert all(catalogue.likely(other) == name for other in entry.also_called)
