"""How large a schedule is, known before it is built, and what is too large."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from phalanx.schedule.entry import ScheduleEntry

MOST_ACTIONS = 10_000_000
"""Actions of the largest schedule that is built, which takes 20 seconds and 1.2 GiB. The largest layouts of published
models have half as many: 126 stages with 16,384 micro-batches."""


class Size(NamedTuple):
    """What a schedule's number of actions depends on."""

    ranks: int
    micro_batches: int
    chunks: int = 1
    slices: int = 1
    steps: int = 1

    def stages(self, entry: ScheduleEntry) -> int:
        return self.ranks * self.chunks // entry.directions

    def slots(self) -> int:
        """Micro-batches that pass a stage, or in whose time the pipeline fills and drains: generators go through so
        many for every stage, and leave out those that are too many."""
        return max(self.micro_batches, 2 * self.ranks)

    def actions(self, entry: ScheduleEntry) -> int:
        return self.stages(entry) * self.slots() * entry.passes * self.slices * self.steps


def too_large(name: str, entry: ScheduleEntry, size: Size) -> str:
    """Why a schedule of that size is not built, with the nearest legal choice; empty where it is."""
    actions = size.actions(entry)
    if actions <= MOST_ACTIONS:
        return ""
    filling = f" to fill and drain {size.ranks:,} ranks" if size.slots() > size.micro_batches else ""
    factors = [
        f"{size.stages(entry):,} stages",
        f"{size.slots():,} micro-batches{filling}",
        f"{entry.passes} passes",
        *(f"{number:,} {what}" for what, number in (("slices", size.slices), ("steps", size.steps)) if number > 1),
    ]
    return (
        f"{name}: {' × '.join(factors)} = {actions:,} actions, of which there may be {MOST_ACTIONS:,}; nearest legal: "
        f"{_legal(entry, size)}"
    )


def _legal(entry: ScheduleEntry, size: Size) -> str:
    """The largest number of each field with which the schedule is small enough, the others as they are; where no field
    is enough by itself, ranks and micro-batches with the schedule's own number of everything else."""
    least = Size(entry.directions, entry.directions, entry.chunks[0])
    found = {field: _most(entry, size, field) for field in Size._fields}
    enough = [
        f"{number} {field.replace('_', '-')}" for field, number in found.items() if number >= getattr(least, field)
    ]
    if enough:
        return ", or ".join(enough)
    own = Size(size.ranks, 1, entry.chunks[0], entry.slices, entry.steps)
    ranks = _most(entry, own, "ranks")
    return f"{ranks} ranks with at most {2 * ranks} micro-batches"


def _most(entry: ScheduleEntry, size: Size, field: str) -> int:
    """The largest number of a field, up to its own, with which the schedule is small enough; 0 if none is."""
    numbers = range(1, min(getattr(size, field), MOST_ACTIONS) + 1)
    return bisect_right(numbers, MOST_ACTIONS, key=lambda number: size._replace(**{field: number}).actions(entry))
