"""Stopping on request: a signal sets a flag, which all ranks check together at the next safe point."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType

from phalanx.launch.supervisor import SAME_REQUEST_S, grace_left

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Answers:
    """Tells the user at once that a signal has come: the handler itself runs only when the main thread has returned
    from its C code, which may take a step."""

    def __init__(self, numbers: Sequence[int]):
        self._numbers = set(numbers)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._answer, name="phalanx-answers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the answers."""
        signal.set_wakeup_fd(self._before)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _answer(self) -> None:
        answered = False
        while numbers := os.read(self._read, 16):
            if not answered and (known := [number for number in numbers if number in self._numbers]):
                answered = True
                name = signal.Signals(known[0]).name
                again = "; Ctrl-C again ends at once" if name == "SIGINT" else ""
                log.warning("%s: stopping after this step, with a checkpoint%s", name, again)


class StopRequest:
    """A request to stop: set by `ask`, and by SIGINT, SIGTERM, SIGUSR1 or SIGHUP; a second signal ends the process at
    once. A context manager.

    Before its `with` block the signals act as they always do: before the first step there is nothing to save. After it,
    too, unless one has come: then they are ignored, since the process is about to end with a checkpoint."""

    def __init__(self) -> None:
        self.signal: int = 0
        self.time = 0.0
        """When the signal came, by the monotonic clock."""
        self.asked = False
        self.reason = "by a signal"
        """Why the run stops, behind "stopped "."""

    @property
    def requested(self) -> bool:
        """True once a signal to stop has arrived, or the program itself asked for it."""
        return self.asked or self.signal != 0

    def seconds_left(self, grace_s: float) -> float:
        """Returns the seconds until whoever sent the signal ends the process (launch/supervisor.py), infinity without a
        signal."""
        if not self.signal:
            return math.inf
        since = time.monotonic() - self.time
        return grace_left(grace_s, os.environ, time.time() - since) - since

    def ask(self, reason: str) -> None:
        """Requests a stop as a signal would."""
        self.asked, self.reason = True, reason

    def __enter__(self) -> StopRequest:
        # A signal that is ignored stays so: SIGHUP under nohup.
        taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self.before = {number: signal.signal(number, self._note) for number in taken}
        self._answers = Answers(taken)
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        for number, handler in self.before.items():
            # Slurm signals every process of a step, and the launcher passes the same request on: with short steps that
            # copy comes when the checkpoint is written, and must not change the exit code.
            signal.signal(number, signal.SIG_IGN if self.signal else handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal:
            self.signal, self.time = number, now
        elif now - self.time > SAME_REQUEST_S:
            if number == signal.SIGINT:
                raise KeyboardInterrupt  # a terminal gets its cursor back
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
