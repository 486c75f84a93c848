"""Facts of the kernel about a process: its state, where it waits, and whether it is the one that was meant."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PY_SPY_S = 10.0


@dataclass(frozen=True)
class ProcessState:
    """The state of a process's main thread."""

    state: str
    """The kernel's letter: R running, S sleeping, D uninterruptible, T stopped, t traced, Z ended."""
    wchan: str
    """The kernel function in which it sleeps; empty if it does not, or if this user may not know."""
    start_ticks: int
    """When it started, in clock ticks since the host's boot: tells it from a later process with the same id."""
    parent: int
    """The id of its parent."""

    @property
    def stopped(self) -> bool:
        """True if it executes nothing: stopped by a signal or by a debugger."""
        return self.state in ("T", "t")

    @property
    def words(self) -> str:
        """The state in words, with the kernel function where it says more."""
        meaning = {
            "R": "running",
            "S": "sleeping",
            "D": "in uninterruptible wait (disk or driver)",
            "T": "stopped by a signal",
            "t": "stopped by a debugger",
            "Z": "ended",
        }.get(self.state, "unknown")
        where = f" in {self.wchan}" if self.wchan and self.state in ("S", "D") else ""
        return f"{meaning}{where} (state {self.state})"


def process_state(pid: int) -> ProcessState | None:
    """Returns the state of a process, or None if it is gone."""
    directory = Path("/proc") / str(pid)
    try:
        fields = (directory / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    try:
        wchan = (directory / "wchan").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        wchan = ""
    return ProcessState(fields[0], "" if wchan == "0" else wchan, int(fields[19]), int(fields[1]))


def stack_by_py_spy(pid: int) -> str:
    """Returns the stacks of a process as py-spy reads them from outside; empty if it is not installed or fails."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
