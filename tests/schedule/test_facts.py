"""The facts in a catalogue entry hold for the program of its schedule, and its bounds are close."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from phalanx import facts
from phalanx.errors import ExtensionError
from phalanx.schedule import catalogue
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.generators import gpipe, one_f_one_b
from phalanx.schedule.probe import FACTS, ProbedProgram, entry_problems
from phalanx.schedule.schedule import Schedule, ScheduleEntry
from phalanx.schedule.timing import time

# The facts in a catalogue entry hold for the program of its schedule, and its bounds are close.


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


# An entry that is added is compared with its own programs; every fact that they contradict is named.

ENTRY = replace(SCHEDULES["1f1b"], also_called=(), seeds=False, usual=False)


def test_a_true_entry_has_no_problems():
    assert list(entry_problems("1f1b", ENTRY)) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"in_flight": lambda p, m, v, r: p},
            "in_flight is 2 on rank 0 with 2 ranks, 1 micro-batches; it must be 1 to",
        ),
        ({"in_flight": lambda p, m, v, r: 0}, "in_flight is 0 on rank 0"),
        ({"in_flight": lambda p, m, v, r: 1}, "half of the program's peak"),
        ({"in_flight": lambda p, m, v, r: 1 / 0}, "in_flight failed: ZeroDivisionError"),
        (
            {"idle": lambda p, m, v, f: p},
            "idle is 2 with 2 ranks, 1 micro-batches .* but idle_is_exact, and the program",
        ),
        ({"idle": lambda p, m, v, f: p, "idle_is_exact": lambda p, m: False}, "idle is 2 .* it must be 0 to 1"),
        ({"idle": lambda p, m, v, f: (p - 1) if m > 0 else 0}, "idle for arrays failed: ValueError"),
        ({"all_in_flight": True}, "all_in_flight is True, but the programs' peaks say False"),
        ({"placement": "V"}, "placement is 'V', but with 2 ranks"),
        ({"splits": True}, "splits is True, but no program has a W"),
        ({"steps": 2}, "searched: the planner tries only schedules of whole sequences"),
        ({"chunks": (2, 1)}, r"chunks \(2, 1\): the fewest stages per rank"),
        ({"chunks": (2, 2)}, "placement is 'round robin', but with 2 ranks, 1 micro-batches, 2 stages per rank"),
        ({"searched": False, "seeds": True}, "seeds and usual are for schedules that are searched"),
        ({"interleaves": "gpipe"}, "interleaves is for schedules whose number of stages per rank is a choice"),
        ({"most_searched_chunks": 0}, "most_searched_chunks must be at least 1"),
        ({"also_called": ("One F",)}, "also_called: One F must be lower-case letters and digits"),
        ({"build": gpipe}, "its name is 'gpipe', not '1f1b'"),
        ({"build": lambda p, m: None}, "build must return a Schedule, returned NoneType"),
        ({"build": lambda p, m: one_f_one_b(p, m + 1)}, "its micro_batches is 2, not 1"),
        ({"build": lambda p, m: replace(one_f_one_b(p, m), programs=((),) * p)}, "rank 0 has no actions"),
        ({"refuses": lambda p, m, v: "never"}, "refuses: no pipeline of 2 to 4 ranks is left"),
        ({"refuses": lambda p, m, v: "too many" if m > 20 else ""}, "refuses 24 micro-batches on 4 ranks, a multiple"),
        (
            {"refuses": lambda p, m, v: "" if m > 2 * p else "few"},
            "2 ranks take no number of micro-batches up to 4, but",
        ),
    ],
)
def test_a_contradiction_is_named(changed: dict[str, object], message: str):
    found = list(entry_problems("1f1b", replace(ENTRY, **changed)))
    with pytest.raises(ValueError, match=message):
        raise ValueError(found)


def test_a_program_that_cannot_be_built_is_named():
    with pytest.raises(ExtensionError, match="^2 ranks, 1 micro-batches: build failed: TypeError"):
        list(entry_problems("1f1b", replace(ENTRY, build=lambda p: p)))


def test_every_contradiction_is_named_at_once():
    wrong = replace(ENTRY, in_flight=lambda p, m, v, r: 0, idle=lambda p, m, v, f: -1.0, all_in_flight=True)
    assert len(list(entry_problems("1f1b", wrong))) == 3


def growing(ranks: int, micro_batches: int) -> Schedule:
    """A schedule that does not repeat itself: gpipe for up to 25 micro-batches, 1f1b for more."""
    build = gpipe if micro_batches <= 25 else one_f_one_b
    return replace(build(ranks, micro_batches), name="growing")


def test_a_schedule_that_does_not_repeat_itself_is_refused():
    entry = ScheduleEntry(
        growing,
        "one or the other",
        "this test",
        in_flight=lambda p, m, v, r: m,
        idle=lambda p, m, v, forward: p - 1,
        searched=False,
    )
    found = list(entry_problems("growing", entry))
    assert any("activations of rank 0 of 4 grow" in problem or "all_in_flight" in problem for problem in found), found
