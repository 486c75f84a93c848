"""The facts in a catalogue entry hold for the program of its schedule, and its bounds are close."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from phalanx.schedule import catalogue
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.entry import ScheduleEntry
from phalanx.schedule.placement import round_robin, v_shape
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.timing import time

NAMES = sorted(SCHEDULES)
SHARES = [(1 / 3, 1 / 3), (0.25, 0.375), (0.2, 0.2), (0.5, 0.1)]
"""Shares of a micro-batch's time on one rank: the forward pass and the weight gradients."""


@functools.cache
def pipelines(name: str) -> list[tuple[int, int, int, Schedule]]:
    """Ranks, micro-batches, stages per rank and the schedule, for a grid of them."""
    return list(_pipelines(name, SCHEDULES[name]))


def _pipelines(name: str, entry: ScheduleEntry) -> Iterator[tuple[int, int, int, Schedule]]:
    for ranks in range(2, 8):
        for chunks in range(entry.chunks[0], min(entry.chunks[1], 4) + 1):
            written = chunks if entry.takes_chunks else 0
            for micros in range(1, 3 * ranks + 3):
                if not catalogue.problems(name, ranks, micros, written):
                    yield ranks, micros, chunks, catalogue.build(name, ranks, micros, written)


def idle_time(schedule: Schedule, forward: float, weights: float) -> float:
    """Time beyond the busiest rank's work, in times of one micro-batch through one rank, per optimizer step."""
    each = max(sum(action.kind == "F" for action in program) for program in schedule.programs) / schedule.micro_batches
    seconds = {"F": forward, "B": 1 - forward, "I": 1 - forward - weights, "W": weights}
    timing = time(schedule, {kind: part / each for kind, part in seconds.items()})
    return (timing.duration - max(timing.work(rank) for rank in range(schedule.ranks))) / schedule.steps


@pytest.mark.parametrize("name", NAMES)
def test_no_rank_has_fewer_activations_than_the_formula_says(name: str):
    for ranks, micros, chunks, schedule in pipelines(name):
        for rank in range(ranks):
            least = SCHEDULES[name].in_flight(ranks, micros, chunks, rank)
            assert 1 <= least <= schedule.peak_live_activations(rank) / schedule.slices, (ranks, micros, chunks, rank)


@pytest.mark.parametrize("name", [name for name in NAMES if not SCHEDULES[name].sliced])
def test_the_formula_is_more_than_half_of_the_activations(name: str):
    """A schedule whose activations nobody stated would be planned as if it needed next to none."""
    exact = name in ("naive", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "pipedream")
    for ranks, micros, chunks, schedule in pipelines(name):
        if schedule.micro_batches >= 2 * ranks:
            least, peak = SCHEDULES[name].in_flight(ranks, micros, chunks, 0), schedule.peak_live_activations(0)
            assert least == peak if exact else least > peak / 2, (ranks, micros, chunks)


@pytest.mark.parametrize("name", NAMES)
def test_every_micro_batch_is_in_flight_where_that_is_said_and_only_there(name: str):
    every = all(
        schedule.peak_live_activations(rank) == chunks * micros
        for ranks, micros, chunks, schedule in pipelines(name)
        for rank in range(ranks)
    )
    assert every == SCHEDULES[name].all_in_flight


@pytest.mark.parametrize("name", NAMES)
def test_the_idle_time_is_a_lower_bound_and_exact_where_that_is_said(name: str):
    entry = SCHEDULES[name]
    for ranks, micros, chunks, schedule in pipelines(name):
        for forward, weights in SHARES:
            least, real = entry.idle(ranks, micros, chunks, forward), idle_time(schedule, forward, weights)
            if entry.idle_is_exact(ranks, micros):
                assert least == pytest.approx(real, abs=1e-9), (ranks, micros, chunks, forward)
            else:
                assert 0 <= least <= real + 1e-9, (ranks, micros, chunks, forward)


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
def test_idle_time_takes_arrays(name: str):
    entry, micros, shares = SCHEDULES[name], np.array([3, 4, 8]), np.array([0.2, 0.25, 0.3])
    idle, exact = np.zeros(3), np.zeros(3, bool)
    idle[:] = entry.idle(4, micros, entry.chunks[0], shares)
    exact[:] = entry.idle_is_exact(4, micros)
    for place, (m, share) in enumerate(zip(micros.tolist(), shares.tolist(), strict=True)):
        assert idle[place] == entry.idle(4, m, entry.chunks[0], share)
        assert exact[place] == entry.idle_is_exact(4, m)


@pytest.mark.parametrize("name", NAMES)
def test_stages_lie_as_the_entry_says(name: str):
    entry = SCHEDULES[name]
    for ranks, _, chunks, schedule in pipelines(name):
        line = round_robin(ranks)
        assert (
            schedule.placements
            == {
                "round robin": (round_robin(ranks, chunks),),
                "V": (v_shape(ranks),),
                "both ways": (line, line[::-1]),
            }[entry.placement]
        )


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


def test_what_the_planner_does_with_a_schedule_goes_together():
    for name, entry in SCHEDULES.items():
        assert entry.searched or not (entry.seeds or entry.usual), name
        assert not entry.searched or (entry.steps == 1 and not entry.sliced), name
        assert entry.searched_chunks, name
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
