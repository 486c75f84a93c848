"""The entry point of one rank of a local launch: ties it to its launcher, runs it, and records how it ended.

Nothing heavy is imported before the rank has tied its life to the launcher's.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from phalanx.errors import StoppedError
from phalanx.launch.lifeline import die_with_parent, leave, take_interrupts
from phalanx.launch.ranks import HEARTBEATS, LAUNCHER_PID, LOG_DIR
from phalanx.launch.verdict import Outcome, describe, reserve_room, spare_name
from phalanx.launch.watchdog import heartbeat


def main(run: Callable[[list[str]], int]) -> NoReturn:
    """Runs `run(argv)` as a rank: dies with the launcher, records the outcome, exits with its code."""
    die_with_parent(int(os.environ[LAUNCHER_PID]))
    faulthandler.enable()
    take_interrupts()
    heartbeat.start(Path(os.environ[HEARTBEATS]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="replace")  # a log file is read while it grows
    directory, spare = Path(os.environ[LOG_DIR]), Path(os.environ[HEARTBEATS], spare_name(int(os.environ["RANK"])))
    code = report(directory, lambda: run(sys.argv[1:]), spare)
    if code in (0, StoppedError.exit_code):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it must not end a rank that is done, while Python ends
        leave(code)
        sys.exit(code)
    # A failed rank leaves at once: the interpreter's way out may wait for peers in a half-done collective.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report(directory: Path, run: Callable[[], int], spare: Path | None = None) -> int:
    """Returns the exit code of `run()`, also if it raises; writes the outcome to `directory`, or if that is on a full
    disk to `spare`, which is created.

    Nothing is printed: the launcher shows one failure for all ranks.
    """
    reserve_room(directory)
    try:
        code, message, trace = run(), "", None
    except BaseException as error:
        code, message, trace = describe(error)
    outcome = Outcome(int(os.environ["RANK"]), code, message, trace, time.time())
    try:
        outcome.write(directory)
    except OSError:
        with suppress(OSError):  # the launcher still has the exit code
            if spare is not None:
                spare.mkdir()
                outcome.write(spare)
    return code
