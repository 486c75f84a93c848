"""What is too large is refused before it is built, with numbers that are not."""

from __future__ import annotations

import re
import time

import pytest

from phalanx.errors import JobError
from phalanx.schedule import catalogue
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.entry import MOST_ACTIONS, Size, too_large

ABSURD = [
    {"ranks": 100_000, "micro_batches": 100_000},
    {"ranks": 100_000, "micro_batches": 2},
    {"ranks": 4, "micro_batches": 10**12},
    {"ranks": 10**30, "micro_batches": 10**30},
]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("micro_batches", [4, 8, 9, 24])
def test_the_number_of_actions_is_known_before(name: str, micro_batches: int):
    entry = SCHEDULES[name]
    size = Size(4, micro_batches, entry.chunks[0], entry.slices, entry.steps)
    built = sum(map(len, catalogue.build(name, 4, micro_batches).programs))
    if name.startswith("dualpipe"):  # of whose backward passes some are whole
        assert built <= size.actions(entry) <= 2 * built or micro_batches < 8
    else:
        assert size.actions(entry) == built * max(micro_batches, 8) / micro_batches


@pytest.mark.parametrize("absurd", ABSURD, ids=str)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_absurd_sizes_are_refused_in_milliseconds(name: str, absurd: dict[str, int]):
    began = time.process_time()
    with pytest.raises(JobError) as refused:
        catalogue.build(name, **absurd)
    assert time.process_time() - began < 0.1
    (message,) = refused.value.problems
    assert f"the limit is {MOST_ACTIONS:,}; nearest legal: " in message or name == "pipedream"


@pytest.mark.parametrize("absurd", ABSURD, ids=str)
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"pipedream"}))
def test_what_is_named_as_legal_is_the_largest_that_is(name: str, absurd: dict[str, int]):
    (message,) = catalogue.problems(name, **absurd)
    legal = message.partition("nearest legal: ")[2]
    for choice in legal.split(", or "):
        numbers = {what.replace("-", "_"): int(number) for number, what in re.findall(r"(\d+) ([a-z-]+)", choice)}
        assert catalogue.problems(name, **absurd | numbers) == []
        field, number = next(iter(numbers.items()))
        assert catalogue.problems(name, **absurd | numbers | {field: number + 1}) != []


def test_chunks_slices_and_steps_count():
    assert "nearest legal: 156250 chunks" in catalogue.problems("interleaved_1f1b", 4, 8, chunks=900_000)[0]
    assert "nearest legal: 156250 slices" in catalogue.problems("terapipe", 4, 8, slices=10**9)[0]
    assert "nearest legal: 156250 steps" in catalogue.problems("pipedream", 4, 8, steps=10**9)[0]


def test_the_largest_published_pipelines_are_small_enough():
    for name, entry in SCHEDULES.items():
        if entry.searched:
            assert not too_large(name, entry, Size(126 // entry.chunks[0], 16_384, entry.chunks[0]))
