"""A command of a launcher that runs: its exit code, its output, and its ranks, found in /proc by a mark."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos import processes

_POLL_S = 0.02
_RANK_VARIABLES = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PALS_RANKID", "PMI_RANK")
_FOREIGN = ("SLURM_", "PBS_", "OMPI_", "PMI", "PALS_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "KUBERNETES_")
"""Beginnings of variables that would make a command believe in another launcher."""


@dataclass(frozen=True)
class Ended:
    """Commands that have ended, one per node or one for all."""

    code: int | None
    """That of the first one, as in a shell: 128 + n by signal n; None if the time was up."""
    began: float
    """Seconds since the epoch."""
    seconds: float
    text: str
    """Standard output and standard error."""


def run(
    commands: Sequence[Sequence[str]],
    folder: Path,
    env: Mapping[str, str],
    limit_s: float,
    meanwhile: Callable[[str], bool] | None = None,
) -> Ended:
    """Runs commands to their ends, at most `limit_s`; then everything that they have started is killed.

    Args:
        commands: one per node, or one for all.
        folder: the working directory.
        env: variables beside this process's own, of which those of launchers are removed.
        limit_s: seconds after which they are killed.
        meanwhile: called with the mark of the processes again and again, until it returns True.
    """
    mark = f"launchers-{os.getpid()}-{time.monotonic_ns()}"
    everything = {**bare_environment(), **env, processes.MARK: mark}
    logs = [folder / f"output.{number}.txt" for number in range(len(commands))]
    began, deadline = time.time(), time.monotonic() + limit_s
    popens = [_start(argv, folder, everything, log) for argv, log in zip(commands, logs, strict=True)]
    waiting = meanwhile
    while any(popen.poll() is None for popen in popens) and time.monotonic() < deadline:
        if waiting and waiting(mark):
            waiting = None
        time.sleep(_POLL_S)
    seconds, code = time.time() - began, popens[0].poll()
    processes.kill(mark)
    for popen in popens:
        popen.wait()
    text = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    return Ended(code if code is None or code >= 0 else 128 - code, began, seconds, text)


def _start(argv: Sequence[str], folder: Path, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            argv,
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def bare_environment() -> dict[str, str]:
    """Returns this process's variables without those of launchers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}


def killer(rank: int, step: Callable[[], int], at: int) -> Callable[[str], bool]:
    """Returns a function of a mark that kills a rank with SIGKILL at a step, and then returns True. It looks for the
    process after the first step, because steps may be shorter than the search."""
    pid: int | None = None

    def kill(mark: str) -> bool:
        nonlocal pid
        done = step()
        if pid is None and done:
            pid = rank_pid(mark, rank)
        if pid is None or done < at:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    return kill


def rank_pid(mark: str, rank: int) -> int | None:
    """Returns the process of a rank: by RANK, which ours and torchrun set, else by its launcher's variable."""
    by_rank = processes.rank_pids(mark)
    if by_rank:
        return by_rank.get(rank)
    mine = {process.pid: process for process in processes.marked(mark)}
    for pid, process in sorted(mine.items()):
        parent = mine.get(process.parent)
        if _rank_of(pid) == rank and (parent is None or _rank_of(parent.pid) != rank):
            return pid
    return None


def _rank_of(pid: int) -> int | None:
    with suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.decode(errors="replace").partition("=")
            if name in _RANK_VARIABLES and value.isdecimal():
                return int(value)
    return None
