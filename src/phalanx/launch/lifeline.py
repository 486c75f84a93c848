"""A rank must not outlive its launcher: an orphan keeps the device and goes on writing checkpoints."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent ends, however the parent ends.

    SIGKILL, because a rank inside a collective does not get round to anything milder. A parent that was gone before
    the request was made sends nothing any more, hence the second look.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
