"""Classes 16, 17 and 19: storage that is full, read-only, slow or hung, and ranks that are killed while they save."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import RESUMABLE, RUN_FAILED, Fault
from benchmarks.chaos.faults.moments import Action, at_step
from benchmarks.chaos.live import Live
from benchmarks.chaos.machine import remount, tmpfs

_SMALL = ("root",)
_SHIM = ("compiler",)
_FULL = r"(?i)no space|\bfull\b|needs .* (has|free)"
_KILL_POINTS = (1, 2, 3, 5, 8, 12, 18, 25, 33)
"""File operations inside checkpoints/ at which rank 0 is killed; a save of this job has about a dozen per rank."""


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


def _writable(arena: Arena) -> None:
    remount(arena.run.parent, "rw")


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


def _kill_in_save(point: int) -> Fault:
    shim = {"CHAOS_FS_RANK": 0, "CHAOS_FS_PATH": "/checkpoints/", "CHAOS_FS_AT": point, "CHAOS_FS_DO": "kill"}
    return Fault(
        17, f"operation-{point}", f"rank 0 is killed at its file operation {point} inside checkpoints/",
        "no checkpoint is chosen that does not load; restart from the newest whole one; same weights",
        shim=shim, names=r"(?i)rank 0\b.*(SIGKILL|killed)", needs=_SHIM, peer=point in (3, 8), quick=point == 8,
    )  # fmt: skip


def _storage(name: str, what: str, gold: str, rank: int, do: str, **fields: object) -> Fault:
    shim = {"CHAOS_FS_RANK": rank, "CHAOS_FS_PATH": "/checkpoints/", "CHAOS_FS_AT": 1, "CHAOS_FS_DO": do}
    shim["CHAOS_FS_MS"] = 100
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
        16, "read-only", "the file system of the run becomes read-only after step 12",
        "told by name; no traceback",
        prepare=_on_tmpfs("64m", lambda live, runs: remount(runs, "ro")), repair=_writable,
        names=r"(?i)read-only", needs=_SMALL, codes=frozenset({1, RESUMABLE}),
    ),
    *map(_kill_in_save, _KILL_POINTS),
    _storage(
        "slow-writes", "every file operation of rank 0 inside checkpoints/ takes 100 ms",
        "the run goes on; steps are not blocked beyond the copy to memory", 0, "slow", limit_s=240,
    ),
    _storage(
        "hung-write", "a file operation of rank 0 inside checkpoints/ never returns",
        "found within the time limit, storage and path named; restart or clean stop", 0, "hang",
        names=r"(?i)storage|checkpoint|saving|save\b", codes=frozenset({*RUN_FAILED, RESUMABLE}),
    ),
    _storage(
        "failing-write", "file operations of rank 0 inside checkpoints/ fail with an I/O error",
        "told with the path; goes on or stops by policy", 0, "error",
        names=r"(?i)input/output error|could not be written", codes=frozenset({1, RESUMABLE}),
    ),
    Fault(
        19, "silent-corpus", "the corpus is a FIFO into which nobody writes",
        "refused, or a time-out that names the file",
        extra={"data.corpus": "text", "data.path": "corpus.txt"}, prepare=_silent_corpus, repair=_real_corpus,
        names=r"corpus\.txt", codes=frozenset({1, 2, 4}), limit_s=40,
    ),
    Fault(
        19, "stopped-terminal", "nobody reads the terminal any more (Ctrl-S)",
        "training goes on: output never blocks it", terminal=True, during=_paused_terminal(), limit_s=60,
    ),
)  # fmt: skip
