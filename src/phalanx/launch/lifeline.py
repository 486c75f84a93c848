"""Ensures that a rank does not outlive its launcher: an orphan would occupy the device and keep writing checkpoints."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent ends, for whatever reason.

    The signal is SIGKILL, because a rank inside a collective does not handle milder ones. A parent that ended before
    the request triggers nothing, hence the check afterwards.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
