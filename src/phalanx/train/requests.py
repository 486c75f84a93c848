"""Requests that all ranks act on after the same step: to stop, and to save a checkpoint.

Any rank may be asked to stop, by a signal; rank 0 alone decides when time has come for a checkpoint. Each rank's own
requests travel as one number in a sum that a step makes anyway (Stepper.status), so that agreeing on them costs no
message.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from phalanx.config.corpora import has_prompts
from phalanx.config.job import Job
from phalanx.launch.local import SAME_REQUEST_S, after_the_end, grace_left

log = logging.getLogger(__name__)

_SAVE = 1 << 20
"""More than the ranks that can ask to stop; rank 0 alone asks to save."""
_VOID = 1 << 21
"""Up to 2**31 ranks of it keep a sum exact in fp64."""


@dataclass(frozen=True)
class Requests:
    """Requests of one rank or, after the sum, of any rank."""

    stop: bool = False
    """Save a checkpoint, then stop."""
    save: bool = False
    """Save a checkpoint."""
    void: bool = False
    """Drop this step: a rank gave up waiting for its data after a request to stop, and took part without."""

    def __or__(self, other: Requests) -> Requests:
        return Requests(self.stop or other.stop, self.save or other.save, self.void or other.void)

    @property
    def pauses(self) -> bool:
        """True if a checkpoint is asked for, whether training then continues or not."""
        return self.stop or self.save

    def encode(self) -> int:
        """Returns a number whose sum over up to a million ranks `decode` understands."""
        return self.stop + _SAVE * self.save + _VOID * self.void

    @classmethod
    def decode(cls, total: float) -> Requests:
        """Returns the requests of any rank from the sum of all ranks' numbers."""
        number = round(total)
        return cls(number % _SAVE > 0, number // _SAVE % 2 > 0, number >= _VOID)


NO_REQUESTS = Requests()


class SaveTimer:
    """Tells when `minutes` have passed since the last checkpoint or the start. 0: never.

    Args:
        minutes: the interval.
        clock: seconds of a clock that nobody sets.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic):
        self.seconds, self.clock = minutes * 60, clock
        self.restart()

    @property
    def due(self) -> bool:
        """True until the next `restart` once the time has come."""
        return 0 < self.seconds <= self.clock() - self.began

    def restart(self) -> None:
        """Begins to count anew: a checkpoint was written."""
        self.began = self.clock()


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
    too, but for SIGUSR1; unless one has come: then they are ignored, since the process is about to end."""

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
        """Returns the seconds until whoever sent the signal ends the process (launch/local.py), infinity without a
        signal."""
        if not self.signal:
            return math.inf
        since = time.monotonic() - self.time
        return grace_left(grace_s, os.environ, time.time() - since) - since

    def ask(self, reason: str) -> None:
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
            signal.signal(number, signal.SIG_IGN if self.signal else after_the_end(number, handler))

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal:
            self.signal, self.time = number, now
        elif now - self.time > SAME_REQUEST_S:
            if number == signal.SIGINT:
                raise KeyboardInterrupt  # a terminal gets its cursor back
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@dataclass(frozen=True)
class Milestones:
    """The steps of one job after which something is due. Steps count from 1; an interval of 0 steps means never."""

    last: int
    """The last step, always followed by a validation and a checkpoint."""
    log_every: int
    eval_every: int
    save_every: int
    keep_every: int = 0
    """Steps between copies of the state in the memory of nodes."""
    generates: bool = False
    """Whether the model generates its own samples, with the weights of each step."""

    @classmethod
    def of(cls, job: Job) -> Milestones:
        train = job.train
        saves = job.checkpoint
        every = train.log_every, train.eval_every, saves.every, saves.memory_every
        return cls(train.steps, *every, generates=has_prompts(job.data))

    def shows(self, step: int) -> bool:
        return step == 1 or is_due(step, self.log_every)

    def validates(self, step: int) -> bool:
        return step == self.last or is_due(step, self.eval_every)

    def saves(self, step: int) -> bool:
        return step == self.last or is_due(step, self.save_every)

    def keeps(self, step: int) -> bool:
        return is_due(step, self.keep_every)

    def needs_weights(self, step: int) -> bool:
        """Returns whether the weights after step `step` are needed on all ranks, for a validation or a checkpoint."""
        return self.generates or self.validates(step) or self.saves(step) or self.keeps(step)

    def next_needing_weights(self, done: int) -> int:
        """Returns the first step after step `done` for which `needs_weights` holds."""
        intervals = [every for every in (self.eval_every, self.save_every, self.keep_every) if every]
        return min([self.last, *(done + every - done % every for every in intervals)])


def is_due(step: int, every: int) -> bool:
    """Returns whether step `step` is one of every `every`; 0: none is."""
    return every > 0 and step % every == 0
