"""Runs srun or mpirun in the foreground, and asks the run to stop by a signal that they pass on to the ranks.

None of them passes on Ctrl-C and SIGTERM as a request: srun kills its step a few seconds later, Open MPI's mpirun kills
the ranks at once. All of them pass on SIGUSR1, by which a run stops with a checkpoint (75).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType

from phalanx.echo import echo
from phalanx.errors import RunError
from phalanx.launch.lifeline import die_with_parent

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_AGAIN_S = 0.5
"""Two signals within this time are one request: a terminal and a scheduler may both send one."""


def run_in_foreground(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs a command to its end, and returns its exit code, or 128 + n if signal n ended it.

    The first of REQUESTS becomes SIGUSR1 for the command, so does the end of this process. A second one, at least
    _AGAIN_S later, becomes SIGTERM, which ends the run at once. Raises RunError if the command cannot be started."""
    here = os.getpid()
    try:
        command = subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            process_group=0,  # the terminal's Ctrl-C comes to this process alone
            preexec_fn=lambda: die_with_parent(here, signal.SIGUSR1),  # noqa: PLW1509 - there are no threads here
        )
    except OSError as error:
        raise RunError(f"{argv[0]} cannot be started: {error.strerror}; --dry-run prints the command") from None
    asked_at = 0.0

    def ask(_: int, __: FrameType | None) -> None:
        nonlocal asked_at
        if not asked_at:
            asked_at = time.monotonic()
            command.send_signal(signal.SIGUSR1)
            _say("the run is asked to stop with a checkpoint; a second signal ends it at once")
        elif time.monotonic() > asked_at + _AGAIN_S:
            command.send_signal(signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in REQUESTS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup, or a shell's background
            signal.signal(number, ask)
    try:
        code = command.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal is gone
        echo(f"phalanx: {line}", file=sys.stderr, flush=True)
