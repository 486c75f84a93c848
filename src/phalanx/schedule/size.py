"""The size of a schedule, known before it is built, and its upper bound."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from phalanx.schedule.entry import ScheduleEntry

MOST_ACTIONS = 10_000_000
"""Most actions of a schedule that is built; that many take 20 seconds and 1.2 GiB. The largest layouts of published
models have half as many: 126 stages with 16,384 micro-batches."""


class Size(NamedTuple):
    """The numbers that determine how many actions a schedule has."""

    ranks: int
    micro_batches: int
    chunks: int = 1
    slices: int = 1
    steps: int = 1

    def stages(self, entry: ScheduleEntry) -> int:
        return self.ranks * self.chunks // entry.directions

    def slots(self) -> int:
        """Returns the micro-batches per stage that generators visit, including those that only fill and drain."""
        return max(self.micro_batches, 2 * self.ranks)

    def actions(self, entry: ScheduleEntry) -> int:
        return self.stages(entry) * self.slots() * entry.passes * self.slices * self.steps


def too_large(name: str, entry: ScheduleEntry, size: Size) -> str:
    """Returns why a schedule of that size is not built, with the nearest legal choice; empty if it is small enough."""
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
        f"{name}: {' × '.join(factors)} = {actions:,} actions, the limit is {MOST_ACTIONS:,}; nearest legal: "
        f"{_legal(entry, size)}"
    )


def _legal(entry: ScheduleEntry, size: Size) -> str:
    """Returns the largest legal value of each number, the others unchanged; if none suffices alone, ranks and
    micro-batches with the schedule's defaults."""
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
    """Returns the largest legal value of a field up to its own; 0 if there is none."""
    numbers = range(1, min(getattr(size, field), MOST_ACTIONS) + 1)
    return bisect_right(numbers, MOST_ACTIONS, key=lambda number: size._replace(**{field: number}).actions(entry))
