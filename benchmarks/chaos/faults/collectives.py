"""Classes 9 to 12: programs that do not match, end early, raise, or run out of memory."""

from __future__ import annotations

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import RUN_FAILED, Fault
from benchmarks.chaos.faults.moments import at_step
from benchmarks.chaos.live import Live
from benchmarks.chaos.machine import MemoryGroup

_REPORT = "rank, operation, sequence number and source line are named; restart or clean stop"
_NAMES = r"(?i)rank 1\b"
_OUT_OF_MEMORY = frozenset({*RUN_FAILED, 3})


def _mismatch(name: str, do: str, what: str, **fields: object) -> Fault:
    plugin = {"rank": 1, "at": "all_reduce", "step": 12, "do": do}
    return Fault(9, name, what, _REPORT, plugin=plugin, names=_NAMES, **fields)  # type: ignore[arg-type]


def _squeeze(arena: Arena) -> None:
    """Limits the memory of rank 1 alone: the kernel kills it once it takes more."""
    group = MemoryGroup()
    arena.exits.callback(group.close)
    arena.plugin = {"rank": 1, "at": "step", "step": 16, "do": "eat"}

    def act(live: Live) -> None:
        group.take(live.pid(1), spare_mib=64)
        live.wait_until(arena.mark_file.exists, "the rank takes memory")

    arena.during = at_step(act, 5)


def _little_memory(arena: Arena) -> None:
    arena.memory_bytes = 8 * 2**30


FAULTS = (
    _mismatch("other-operation", "other-operation", "rank 1 calls an all-gather instead of the all-reduce"),
    _mismatch("other-shape", "other-shape", "rank 1 reduces half of the elements"),
    _mismatch("other-type", "other-type", "rank 1 reduces doubles instead of floats"),
    _mismatch("once-more", "twice", "rank 1 calls the all-reduce once more than the others"),
    Fault(
        9, "barrier", "rank 1 enters a barrier that the others do not enter", _REPORT,
        plugin={"rank": 1, "at": "step", "step": 12, "do": "barrier"}, names=_NAMES, peer=True,
    ),
    Fault(
        10, "epoch-end", "a split whose samples are no multiple of the batch, over several epochs",
        "all ranks agree on the end of an epoch: no hang, no sample lost",
        job={"data.random_tokens": 6_500},
    ),
    Fault(
        10, "exits-early", "rank 1 exits with 0 in the middle of the run",
        "the rank is named, restart, same weights",
        plugin={"rank": 1, "at": "step", "step": 12, "do": "exit"}, names=_NAMES, peer=True,
    ),
    Fault(
        11, "once", "rank 1 raises an exception in one step",
        "the traceback is shown once, the others are `stopped because of it`; restart",
        plugin={"rank": 1, "at": "step", "step": 12, "do": "raise"}, names=r"(?i)rank 1\b[^$]*injected",
        traceback=True,
    ),
    Fault(
        11, "always", "rank 1 raises the same exception in the same step of every attempt",
        "restarts end after run.max_restarts or at once; the traceback is shown",
        plugin={"rank": 1, "at": "step", "step": 12, "again": 2, "do": "raise"},
        names=r"(?i)rank 1\b[^$]*injected", traceback=True, stops=True, codes=frozenset({1}), limit_s=240,
    ),
    Fault(
        12, "allocation", "rank 1 asks for 256 TiB, always",
        "bytes asked for are shown; no restart of what cannot fit, or a bounded number",
        plugin={"rank": 1, "at": "step", "step": 12, "again": 2, "do": "allocate"},
        names=r"(?i)rank 1\b[^$]*(memory|allocate)", traceback=True, codes=_OUT_OF_MEMORY, limit_s=240,
    ),
    Fault(
        12, "kernel", "the kernel kills rank 1 for memory (a group with 64 MiB to spare)",
        "the rank and the likely cause are named; restart",
        prepare=_squeeze, names=r"(?i)rank 1\b[^$]*(memory|SIGKILL)", needs=("root", "memory group"),
    ),
    Fault(
        12, "too-large", "a model of 100 GiB under a limit of 8 GiB",
        "refused, with the bytes that are needed and the ones that there are",
        extra={"model.d_model": 16384}, prepare=_little_memory, repair=Arena.forget,
        names=r"(?i)(memory|GiB|allocate)", codes=frozenset({1, 2, 3}),
    ),
)  # fmt: skip
