"""Class 24: wrong clocks, stale locks and logs, ports in use, a second trainer in the same directory."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Sequence

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.moments import at_step
from benchmarks.chaos.live import Live
from benchmarks.chaos.story import TRACEBACK, Story

_REFUSAL_S = 30.0


def _clock(name: str, rank: int, seconds: int) -> Fault:
    return Fault(
        24, name, f"the clock of rank {rank} is wrong by {seconds} s", "the run reaches its end, same weights",
        shim={"CHAOS_FS_RANK": rank, "CHAOS_CLOCK_S": seconds}, during=at_step(lambda live: None, 1),
        needs=("compiler",),
    )  # fmt: skip


def _stale_lock(arena: Arena) -> None:
    (arena.run / ".lock").write_text("process 999999 on elsewhere")


def _logs_are_a_file(arena: Arena) -> None:
    shutil.rmtree(arena.run / "logs")
    (arena.run / "logs").write_text("")


def _logs_again(arena: Arena) -> None:
    (arena.run / "logs").unlink()


def _old_attempts(arena: Arena) -> None:
    """Leaves directories of attempts with gaps and files in the place of ranks."""
    logs = arena.run / "logs"
    (logs / "attempt_3").mkdir()
    (logs / "attempt_4").write_text("")
    (logs / "attempt_5" / "rank_0").mkdir(parents=True)


def _second(*words: str) -> Fault:
    def prepare(arena: Arena) -> None:
        def act(live: Live) -> None:
            arena.others.append(arena.start(words, limit_s=_REFUSAL_S))
            live.injected = time.time()

        arena.during = at_step(act)

    option = f" {' '.join(words)}" if words else ""
    return Fault(
        24, f"second-trainer{option.replace(' --', '-')}", f"the same command{option} is given while the run trains",
        "the second is refused and names the first; the first goes on to the same weights",
        prepare=prepare, check=_refused,
    )  # fmt: skip


def _refused(arena: Arena, story: Story) -> Sequence[str]:
    (second,) = (other.attempt for other in arena.others)
    found = []
    if second.timed_out:
        found.append("the second trainer was not refused")
    elif second.code in (0, 75):
        found.append(f"the second trainer ended with {second.code}")
    elif "in use" not in second.output:
        found.append("the second trainer is not told who uses the directory")
    if TRACEBACK in second.output:
        found.append("the second trainer shows a traceback")
    beside = sorted(path.name for path in arena.run.parent.glob(f"{arena.run.name}*"))
    if beside != [arena.run.name]:
        found.append(f"there are several run directories: {', '.join(beside)}")
    return found


def _take_port(arena: Arena) -> None:
    taken = arena.exits.enter_context(socket.create_server(("0.0.0.0", 0)))
    arena.env["MASTER_PORT"] = str(taken.getsockname()[1])


FAULTS = (
    _clock("clock-ahead", 1, 3600),
    _clock("clock-behind", 0, -3600),
    Fault(
        24, "stale-lock", "a lock file names a process that is gone", "the run goes on: a lock lives with its process",
        start="half", prepare=_stale_lock,
    ),
    Fault(
        24, "old-attempts", "log directories of attempts with gaps, one of them a file",
        "the next free number is taken", start="half", prepare=_old_attempts,
    ),
    Fault(
        24, "logs-are-a-file", "a file lies where the logs go", "set aside or told by name, no traceback",
        start="half", prepare=_logs_are_a_file, repair=_logs_again, names=r"\blogs\b", codes=frozenset({1, 2}),
    ),
    _second(),
    _second("--fresh"),
    Fault(
        24, "port-in-use", "MASTER_PORT is taken by another program", "told with the port, or another one is taken",
        launch="ranks", prepare=_take_port, repair=lambda arena: arena.env.clear(), names=r"(?i)port|address",
        stops=True, codes=frozenset({1}), limit_s=60,
    ),
)  # fmt: skip
