"""The pipeline schedule of a layout: one known by name, or one in a file."""

from __future__ import annotations

import os

from phalanx.config.layout import Layout
from phalanx.schedule import catalogue, file
from phalanx.schedule.schedule import Schedule


def is_file(schedule: str) -> bool:
    """Returns whether `layout.schedule` is a path and not the name of a schedule."""
    return schedule not in catalogue.SCHEDULES and (
        schedule.endswith(".csv") or "/" in schedule or os.path.isfile(schedule)
    )


def schedule_of(layout: Layout, micro_batches: int) -> Schedule:
    """Returns the schedule for `micro_batches` micro-batches per step (a file states its own). Raises JobError if they
    do not match it, or if the file is not a schedule."""
    if is_file(layout.schedule):
        return file.read(layout.schedule)
    return catalogue.build(layout.schedule, layout.pp, micro_batches, layout.pp_chunks, layout.pp_slices)


def slices_of(layout: Layout) -> int:
    """Returns into how many slices a layout's schedule cuts sequences. Raises JobError if a file is not a schedule."""
    if layout.pp == 1:
        return 1
    if is_file(layout.schedule):
        return file.read(layout.schedule).slices
    return layout.pp_slices or catalogue.SCHEDULES[layout.schedule].slices


def splits_backward(layout: Layout) -> bool:
    """Returns whether a layout's schedule splits backward passes, so that weight gradients are deferred. Raises
    JobError if a file is not a schedule."""
    if layout.pp == 1:
        return False
    if is_file(layout.schedule):
        programs = file.read(layout.schedule).programs
        return any(action.kind == "W" for program in programs for action in program)
    return catalogue.SCHEDULES[layout.schedule].splits


def flushes(layout: Layout) -> bool:
    """Returns whether every step begins with an empty pipeline; true without a pipeline. Raises JobError if a file is
    not a schedule."""
    if layout.pp == 1:
        return True
    if is_file(layout.schedule):
        return file.read(layout.schedule).steps == 1
    return catalogue.SCHEDULES[layout.schedule].steps == 1
