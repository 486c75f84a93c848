"""The pipeline schedule that a layout means: one with a name, or one in a file."""

from __future__ import annotations

from pathlib import Path

from phalanx.config.layout import Layout
from phalanx.schedule import catalogue, file
from phalanx.schedule.schedule import Schedule


def is_file(schedule: str) -> bool:
    """Whether `layout.schedule` means a file and not one of the schedules with a name."""
    return schedule not in catalogue.SCHEDULES and (
        schedule.endswith(".csv") or "/" in schedule or Path(schedule).is_file()
    )


def schedule_of(layout: Layout, micro_batches: int) -> Schedule:
    """The schedule itself, for `micro_batches` micro-batches a step (those of a file are its own).

    Raises JobError where they do not go with it, or where the file is not a schedule."""
    if is_file(layout.schedule):
        return file.read(layout.schedule)
    return catalogue.build(layout.schedule, layout.pp, micro_batches, layout.pp_chunks, layout.pp_slices)


def flushes(layout: Layout) -> bool:
    """Whether every step begins with an empty pipeline, if any. Raises JobError where a file is no schedule."""
    if layout.pp == 1:
        return True
    if is_file(layout.schedule):
        return file.read(layout.schedule).steps == 1
    return catalogue.SCHEDULES[layout.schedule].steps == 1
