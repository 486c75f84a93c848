"""Ensures that a rank does not outlive its launcher: an orphan would occupy the device and keep writing checkpoints."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from contextlib import suppress

from phalanx.errors import JobError
from phalanx.launch.environment import LAUNCHER_PID
from phalanx.launch.ranks import detect
from phalanx.launch.watchdog.processes import process_state

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


def die_with_launcher() -> None:
    """Makes a rank that torchrun, srun or mpiexec started end when its launcher ends on this host. Does nothing in any
    other process; ranks of the local launcher call `die_with_parent`.

    torchrun's agent starts each rank as the leader of a session, and the kernel kills such a rank with its agent. In
    the other cases (a wrapper script in between, srun, mpiexec) a thread looks every _POLL_S whether the processes
    above this one are still the same. The kernel's signal would be wrong there: it is sent when the *thread* ends that
    started the process.
    """
    if LAUNCHER_PID in os.environ or not _has_launcher():
        return
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    leader = os.getsid(0) if by_torchrun else os.getpid()
    parents = _parents_up_to(leader)
    if by_torchrun and leader == os.getpid():
        die_with_parent(parents[leader])
    threading.Thread(target=_watch, args=(parents,), name="phalanx-lifeline", daemon=True).start()


def _has_launcher() -> bool:
    with suppress(JobError):  # contradictory variables: reported where the rank is needed
        return detect(os.environ) is not None
    return False


def _parents_up_to(leader: int) -> dict[int, int]:
    """Returns the parents of this process and of those above it, up to the ancestor `leader`, by process."""
    pid = os.getpid()
    parents = {pid: os.getppid()}
    while pid != leader and parents[pid] > 1:
        pid = parents[pid]
        parents[pid] = _parent_of(pid)
    return parents


def _watch(parents: dict[int, int]) -> None:
    while all(_parent_of(pid) == parent for pid, parent in parents.items()):
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_of(pid: int) -> int:
    """Returns the parent of a process, 0 if the process has ended."""
    process = process_state(pid)
    return process.parent if process else 0
