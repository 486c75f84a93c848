"""Stopping on request: a signal sets a flag, which all ranks check together at the next safe point."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Set by SIGINT, SIGTERM or SIGUSR1; a second SIGINT acts as it always does. A context manager."""

    def __init__(self) -> None:
        self.signal: int = 0

    @property
    def requested(self) -> bool:
        """True once a signal to stop has arrived."""
        return self.signal != 0

    def __enter__(self) -> StopRequest:
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
