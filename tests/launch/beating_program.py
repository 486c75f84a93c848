"""A rank without torch, for the watchdog's tests: `python -m beating_program FOLDER RANK`.

It makes steps of one recorded call each. In the fourth, rank 1 hangs with the GIL held, and rank 0 waits for it.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase


def hold_gil() -> None:
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):  # the second call waits for ever; no signal wakes it
        libc.pthread_mutex_lock(mutex)


def main(folder: str, rank: int) -> None:
    heartbeat.start(Path(folder), rank, 2)
    beat = heartbeat.own()
    assert beat is not None
    world = beat.channel("world", "all", [0, 1])
    heartbeat.training(0, 0)
    for step in range(4):
        heartbeat.enter(Phase.FORWARD_BACKWARD)
        if step == 3 and rank == 1:
            hold_gil()
        call = beat.begin(
            world, "all_reduce", "world", "float32", (2,), 8, waits=True, on_device=False, hidden="/nowhere/"
        )
        while step == 3:
            time.sleep(1)
        call.done()
        heartbeat.steps_done(step + 1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
