"""Classes 1 and 2: a rank or the launcher is killed."""

from __future__ import annotations

import signal

from benchmarks.chaos.fault import KILLED, Fault
from benchmarks.chaos.faults.moments import after_restart, at_start, at_step, both, kill_launcher, kill_rank

_RESTARTED = "peers stop within 5 s, rank and signal are named, restart from the newest checkpoint, same weights"
_NAMES = r"(?i)rank 1\b.*(SIGKILL|killed)"

FAULTS = (
    Fault(
        1, "at-step", "SIGKILL to rank 1 between steps", _RESTARTED,
        during=at_step(kill_rank(1)), names=_NAMES, peer=True, quick=True,
    ),
    Fault(
        1, "in-all-reduce", "rank 1 kills itself before its all-reduce of gradients", _RESTARTED,
        plugin={"rank": 1, "at": "all_reduce", "step": 12, "do": "kill"}, names=_NAMES,
    ),
    Fault(
        1, "in-optimizer", "rank 1 kills itself inside the optimizer's step", _RESTARTED,
        plugin={"rank": 1, "at": "step", "step": 12, "do": "kill"}, names=_NAMES, peer=True,
    ),
    Fault(
        1, "rank-0", "SIGKILL to rank 0, which writes metrics and prints", _RESTARTED,
        during=at_step(kill_rank(0)), names=r"(?i)rank 0\b.*(SIGKILL|killed)", peer=True,
    ),
    Fault(
        1, "segfault", "rank 1 reads address 0", _RESTARTED,
        plugin={"rank": 1, "at": "step", "step": 12, "do": "segv"}, names=r"(?i)rank 1\b.*(SIGSEGV|segmentation)",
    ),
    Fault(
        1, "twice", "SIGKILL to rank 1, and to rank 0 after the restart", _RESTARTED,
        during=both(at_step(kill_rank(1)), after_restart(kill_rank(0))), names=_NAMES,
        plugin={"at": "never"},
    ),
    Fault(
        1, "at-start", "SIGKILL to rank 1 while it imports", _RESTARTED,
        during=at_start(2.5, kill_rank(1)), names=_NAMES,
    ),
    Fault(
        1, "no-interval", "SIGKILL to rank 1 of a job that does not set checkpoint.every", _RESTARTED,
        extra={"checkpoint.every": 0}, during=at_step(kill_rank(1)), names=_NAMES,
    ),
    Fault(
        1, "pipeline", "SIGKILL to the second stage of a pipeline with two micro-batches in flight", _RESTARTED,
        job={"layout.dp_replicate": 1, "layout.pp": 2}, during=at_step(kill_rank(1)), names=_NAMES,
    ),
    Fault(
        1, "sharded", "SIGKILL to rank 1 of two that share the state (ZeRO-3)", _RESTARTED,
        job={"layout.dp_replicate": 1, "layout.dp_shard": 2}, during=at_step(kill_rank(1)), names=_NAMES, peer=True,
    ),
    Fault(
        1, "elastic", "SIGKILL to the rank of one of two replicas that come and go, the one that writes metrics",
        "the other one repeats the step alone, takes over metrics and checkpoints, and trains on; same weights",
        extra={"run.min_replicas": 1}, during=at_step(kill_rank(0)), names=r"replica \d is lost in step", bound=1e-4,
        quick=True,
    ),
    Fault(
        2, "launcher", "SIGKILL to `phalanx train`", "the ranks end within 5 s, no orphans; the same command resumes",
        during=at_step(kill_launcher(signal.SIGKILL)), stops=True, codes=frozenset({KILLED}),
    ),
    Fault(
        2, "torchrun", "SIGKILL to torchrun, whose workers are ranks of Phalanx",
        "the ranks end within 5 s and write no more; the same command resumes",
        launch="torchrun", during=at_step(kill_launcher(signal.SIGKILL)), stops=True, codes=frozenset({KILLED}),
        peer=True,
    ),
)  # fmt: skip
