"""The pipeline bubble: the one definition behind `schedule show`, `predict`, `plan` and `simulate`."""

from __future__ import annotations


def bubble_fraction(idle: float, step: float) -> float:
    """Returns the bubble of a step: bubble time over ideal time (Narayanan et al. 2021, section 2.2, t_pb / t_id).

    `idle` is the time that the busiest pipeline rank waits for other ranks, `step` the whole step with its flush, from
    the first action of any rank to the end of the last; the ideal time is the step without that idle time. 1F1B has (P
    - 1) / M.
    """
    return idle / (step - idle)
