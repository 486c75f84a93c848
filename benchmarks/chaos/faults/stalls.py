"""Classes 4, 5 and 6: a rank that does not move, or moves slowly."""

from __future__ import annotations

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.moments import at_step, stop_rank

_RESTARTED = "found from outside within run.hang_s, rank and phase named, stacks dumped, restart, same weights"
_NAMES = r"(?i)rank 1\b"

FAULTS = (
    Fault(
        4, "3-s", "SIGSTOP to rank 1 for 3 s", "the run goes on to the same weights",
        during=at_step(stop_rank(1, 3.0)), peer=True,
    ),
    Fault(
        4, "for-ever", "SIGSTOP to rank 1, never continued", _RESTARTED,
        during=at_step(stop_rank(1, None)), names=_NAMES, peer=True, quick=True,
    ),
    Fault(
        4, "rank-0", "SIGSTOP to rank 0, never continued", _RESTARTED,
        during=at_step(stop_rank(0, None)), names=r"(?i)rank 0\b",
    ),
    Fault(
        4, "pipeline", "SIGSTOP to the second stage of a pipeline, never continued", _RESTARTED,
        job={"layout.dp_replicate": 1, "layout.pp": 2}, during=at_step(stop_rank(1, None)), names=_NAMES,
    ),
    Fault(
        4, "tensor", "SIGSTOP to rank 1 of two that share matrices (tp), never continued", _RESTARTED,
        job={"layout.dp_replicate": 1, "layout.tp": 2}, during=at_step(stop_rank(1, None)), names=_NAMES,
    ),
    Fault(
        5, "gil", "rank 1 waits in C for a lock, with the GIL held", _RESTARTED,
        plugin={"rank": 1, "at": "step", "step": 12, "do": "gil"}, names=_NAMES, peer=True,
    ),
    Fault(
        5, "spin", "rank 1 runs an endless loop in Python", _RESTARTED,
        plugin={"rank": 1, "at": "step", "step": 12, "do": "spin"}, names=_NAMES,
    ),
    Fault(
        6, "1.5x", "every step of rank 1 takes 1.5 times as long", "the run goes on; the slow rank is named",
        plugin={"rank": 1, "at": "step", "step": 5, "do": "slow", "factor": 1.5, "every": True}, names=_NAMES,
        limit_s=240, job={"train.steps": 450, "checkpoint.every": 50},
    ),
)  # fmt: skip
