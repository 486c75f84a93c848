"""Requests that all ranks act on after the same step: to stop, and to save a checkpoint.

Any rank may be asked to stop, by a signal; rank 0 alone decides when time has come for a checkpoint. Each rank's own
requests travel as one number in a sum that a step makes anyway (Stepper.status), so that agreeing on them costs no
message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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
        """Returns the requests of either."""
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
