"""Classes 16, 17 and 19: storage that is full, read-only, slow or hung, and ranks that are killed while they save."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import RESUMABLE, RUN_FAILED, Fault
from benchmarks.chaos.faults.moments import Action, at_step
from benchmarks.chaos.live import Live
from benchmarks.chaos.machine import read_only, tmpfs

_SMALL = ("root",)
_SHIM = ("compiler",)
_FULL = r"(?i)no space|\bfull\b|needs .* (has|free)"
_SAVING = r"(?i)storage|checkpoint|saving|save\b"
_SAVE = "step-000010"
_KILL_POINTS = (
    (0, "mkdir", 1), (0, "write", 1), (0, "write", 30), (0, "fsync", 1), (0, "rename", 1), (0, "unlink", 1),
    (0, "fsync", 3), (0, "rename", 2), (0, "rename", 3), (1, "write", 1), (1, "fsync", 1), (1, "rename", 1),
)  # fmt: skip
"""Rank, operation, and how many of that rank have come inside the second save when the rank is killed at the next."""
_PEER_POINTS = ((0, "write", 1), (0, "rename", 1), (1, "write", 1))


def _on_tmpfs(size: str, action: Callable[[Live, Path], None]) -> Callable[[Arena], None]:
    def prepare(arena: Arena) -> None:
        runs = arena.run.parent
        arena.exits.enter_context(tmpfs(runs, size))
        arena.during = at_step(lambda live: action(live, runs))

    return prepare


def _fill(live: Live, runs: Path) -> None:
    """Fills the file system to the last byte."""
    with suppress(OSError), (runs / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    with suppress(OSError), (runs / "ballast").open("ab", buffering=0) as file:
        while True:
            file.write(b"0")


def _leave_little(live: Live, runs: Path) -> None:
    """Leaves 100 KiB: metrics fit, a checkpoint does not."""
    _fill(live, runs)
    os.truncate(runs / "ballast", (runs / "ballast").stat().st_size - 100 * 2**10)


def _empty(arena: Arena) -> None:
    (arena.run.parent / "ballast").unlink(missing_ok=True)


def _read_only(arena: Arena) -> None:
    arena.exits.enter_context(read_only(arena.run.parent))


def _writable(arena: Arena) -> None:
    arena.exits.close()


def _paused_terminal() -> Action:
    def act(live: Live) -> None:
        live.reading.clear()
        live.wait_until(lambda: live.step >= 40, "the last step without a reader")
        live.reading.set()

    return at_step(act)


def _silent_corpus(arena: Arena) -> None:
    os.mkfifo(arena.folder / "corpus.txt")


def _real_corpus(arena: Arena) -> None:
    arena.forget()
    (arena.folder / "corpus.txt").unlink()


def _stayed_small(arena: Arena, story: object) -> Sequence[str]:
    """A save that failed leaves nothing half-written among the checkpoints."""
    return [f"{name} is left of a failed save" for name in arena.left_files() if "step-" in name]


def _kill_in_save(rank: int, operation: str, number: int) -> Fault:
    shim = {
        "CHAOS_FS_RANK": rank, "CHAOS_FS_PATH": _SAVE, "CHAOS_FS_OP": operation, "CHAOS_FS_AT": number,
        "CHAOS_FS_DO": "kill",
    }  # fmt: skip
    point = (rank, operation, number)
    return Fault(
        17, f"rank-{rank}-{operation}-{number}", f"rank {rank} is killed at {operation} {number} of its second save",
        "no checkpoint is chosen that does not load; restart from the newest whole one; same weights", shim=shim,
        names=rf"(?i)rank {rank}\b.*(SIGKILL|killed)", needs=_SHIM, peer=point in _PEER_POINTS,
        quick=point == (0, "rename", 3),
    )  # fmt: skip


def _storage(name: str, what: str, gold: str, do: str, rank: int = 0, **fields: object) -> Fault:
    shim = {"CHAOS_FS_RANK": rank, "CHAOS_FS_PATH": "/checkpoints/", "CHAOS_FS_DO": do}
    shim |= {"CHAOS_FS_MS": 20} if do == "slow" else {"CHAOS_FS_OP": "fsync"}
    return Fault(19, name, what, gold, shim=shim, needs=_SHIM, **fields)  # type: ignore[arg-type]


FAULTS = (
    Fault(
        16, "little-left", "100 KiB are left on the file system of the run after step 12",
        "told with what is needed and what there is; the old checkpoint is intact; goes on or stops by policy",
        prepare=_on_tmpfs("24m", _leave_little), repair=_empty, names=_FULL, needs=_SMALL, check=_stayed_small,
        codes=frozenset({1, RESUMABLE}),
    ),
    Fault(
        16, "full", "no byte is left: metrics.jsonl cannot grow either",
        "told with what is needed and what there is; no traceback",
        prepare=_on_tmpfs("24m", _fill), repair=_empty, names=_FULL, needs=_SMALL, check=_stayed_small,
        codes=frozenset({1, RESUMABLE}), peer=True,
    ),
    Fault(
        16, "read-only", "the run's directory is on a read-only file system when it resumes",
        "told by name; no traceback", start="half", prepare=_read_only, repair=_writable,
        names=r"(?i)read-only", needs=_SMALL, codes=frozenset({1, 2, RESUMABLE}),
    ),
    Fault(
        16, "becomes-read-only", "the run's file system becomes read-only for rank 0 while it trains",
        "told by name; no traceback",
        shim={"CHAOS_FS_RANK": 0, "CHAOS_FS_PATH": "runs/chaos", "CHAOS_FS_AT": 75, "CHAOS_FS_DO": "error",
              "CHAOS_FS_ERRNO": errno.EROFS},
        names=r"(?i)read-only", needs=_SHIM, codes=frozenset({1, RESUMABLE}),
    ),
    *(_kill_in_save(*point) for point in _KILL_POINTS),
    Fault(
        17, "removal", "rank 0 is killed while it deletes a checkpoint that is no longer kept",
        "no half of a checkpoint is left under its name; same weights", extra={"checkpoint.keep": 1},
        shim={"CHAOS_FS_RANK": 0, "CHAOS_FS_PATH": "step-000005", "CHAOS_FS_OP": "unlink", "CHAOS_FS_AT": 3,
              "CHAOS_FS_DO": "kill"},
        names=r"(?i)rank 0\b.*(SIGKILL|killed)", needs=_SHIM,
    ),
    _storage(
        "slow-writes", "every file operation of rank 0 inside checkpoints/ takes 20 ms",
        "the run goes on; steps are not blocked beyond the copy to memory", "slow", limit_s=240,
    ),
    _storage(
        "hung-sync", "an fsync of rank 0 inside checkpoints/ never returns",
        "found within the time limit, storage and path named; restart or clean stop", "hang",
        names=_SAVING, codes=frozenset({*RUN_FAILED, RESUMABLE}),
    ),
    _storage(
        "hung-sync-rank-1", "an fsync of rank 1 inside checkpoints/ never returns",
        "found within the time limit, storage and path named; restart or clean stop", "hang", 1,
        names=_SAVING, codes=frozenset({*RUN_FAILED, RESUMABLE}),
    ),
    _storage(
        "failing-sync", "every fsync of rank 0 inside checkpoints/ fails with an I/O error",
        "told with the path; goes on or stops by policy", "error",
        names=r"(?i)input/output error|could not be written", codes=frozenset({1, RESUMABLE}),
    ),
    Fault(
        19, "silent-corpus", "the corpus is a FIFO into which nobody writes",
        "refused, or a time-out that names the file",
        extra={"data.corpus": "text", "data.path": "corpus.txt"}, prepare=_silent_corpus, repair=_real_corpus,
        names=r"corpus\.txt", stops=True, codes=frozenset({1, 2, 4}), limit_s=40,
    ),
    Fault(
        19, "stopped-terminal", "nobody reads the terminal any more (Ctrl-S)",
        "training goes on: output never blocks it", terminal=True, during=_paused_terminal(), limit_s=60,
    ),
)  # fmt: skip
