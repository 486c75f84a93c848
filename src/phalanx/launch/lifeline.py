"""Ensures that a rank does not outlive its launcher: an orphan would occupy the device and keep writing checkpoints.

Also the end of a process, and what the kernel says about one: its state, where it waits, and whether it is the one that
was meant.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import JobError
from phalanx.launch.ranks import LAUNCHER_PID, detect

_PY_SPY_S = 10.0


@dataclass(frozen=True)
class ProcessState:
    """The state of a process's main thread."""

    state: str  # the kernel's letter: R running, S sleeping, D uninterruptible, T stopped, t traced, Z ended
    wchan: str
    """The kernel function in which it sleeps; empty if it does not, or if this user may not know."""
    start_ticks: int
    """When it started, in clock ticks since the host's boot: tells it from a later process with the same id."""
    parent: int

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


def hydra_port() -> str:
    """Returns where the mpiexec of MPICH listens for the proxies that start its ranks, as the proxy above this process
    was told; empty if there is none. No variable of MPICH names a launch."""
    process = process_state(os.getpid())
    while process is not None and process.parent > 1:
        with suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{process.parent}/cmdline").read_bytes().decode(errors="replace").split("\0")
            return words[words.index("--control-port") + 1]
        process = process_state(process.parent)
    return ""


def boot_id() -> str:
    """Returns what tells this boot of this machine from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def is_mine(folder: Path, others: int = 0o077) -> bool:
    """Returns whether a path is a folder of this user's, to which nobody else has one of the rights `others`."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others


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


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.5


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when its parent ends, for whatever reason.

    By default the signal is SIGKILL, because a rank inside a collective does not handle milder ones. A parent that
    ended before the request triggers nothing, hence the check afterwards.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), number)


def take_interrupts() -> None:
    """Makes SIGINT, which a rank does not get while Python starts, end this process at once, as SIGTERM does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def leave(code: int) -> None:
    """Ends this process with an exit code, as multiprocessing ends its own: without taking the modules apart, for which
    the interpreter needs 0.5 s of processor time where torch is one of them (0.2 in a fork).

    Returns, for the interpreter to end it, where a stream cannot be written, which that reports, and where a profiler
    or a debugger waits for the end."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    watched = monitoring and any(monitoring.get_tool(tool) for tool in range(6))
    if watched or sys.getprofile() or sys.gettrace() or sys.flags.inspect:
        return
    threading._shutdown()  # pyrefly: ignore[missing-attribute] -- (waits for threads)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    ctypes.CDLL(None).fflush(None)  # of C libraries
    os._exit(code)


def die_with_launcher() -> None:
    """Makes a rank that torchrun, srun or mpiexec started end when its launcher ends on this host. Does nothing in any
    other process; ranks of the local launcher call `die_with_parent`.

    torchrun's agent starts each rank as the leader of a session, and the kernel kills such a rank with its agent. In
    the other cases (a wrapper script in between, srun, mpiexec) a thread looks every _POLL_S whether the processes
    above this one are still the same. The kernel's signal would be wrong there: it is sent when the *thread* ends that
    started the process.
    """
    launched = False
    with suppress(JobError):  # contradictory variables: reported where the rank is needed
        launched = detect(os.environ) is not None
    if LAUNCHER_PID in os.environ or not launched:
        return
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    leader, pid = os.getsid(0) if by_torchrun else os.getpid(), os.getpid()
    parents = {pid: os.getppid()}
    while pid != leader and parents[pid] > 1:
        pid = parents[pid]
        parents[pid] = _parent_of(pid)
    if by_torchrun and leader == os.getpid():
        die_with_parent(parents[leader])

    def watch() -> None:
        while all(_parent_of(pid) == parent for pid, parent in parents.items()):
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="phalanx-lifeline", daemon=True).start()


def _parent_of(pid: int) -> int:
    process = process_state(pid)
    return process.parent if process else 0
