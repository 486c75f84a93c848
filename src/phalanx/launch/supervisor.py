"""Watches the ranks of one machine: passes signals on, notes how each rank ends, ends those that cannot go on.

Knows nothing of torch. The elastic agent asks it at every poll (see agent.py), before the agent looks itself: the
agent would meet any non-zero exit with SIGTERM to all, also while the peers still write the checkpoint on which they
and the rank had agreed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from phalanx.errors import StoppedError
from phalanx.launch.outcome import Outcome

FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,  # the terminal went away: nobody is left to press Ctrl-C
}
"""Signal to the launcher → signal to every rank."""

_SAME_REQUEST_S = 0.5  # `timeout` and wrappers like it send a signal to the child and again to its group
_PEER_GRACE_S = 3.0  # for the peers of a rank that broke: long enough to notice by themselves and say so


@dataclass(frozen=True)
class Exit:
    """How the process of a rank ended."""

    code: int
    """As a shell shows it: 128 + n for a death by signal n."""
    time: float
    """Seconds since the epoch at which it was seen."""
    killed: bool
    """Ended by the launcher, so no reason for anything."""


class Supervisor:
    """The ranks of one attempt.

    Args:
        outcome: what the rank itself said about its end, or None.
        grace_s: seconds that ranks get to end after a signal, or after one of them ended with an error that it
            announced.
    """

    def __init__(self, outcome: Callable[[int], Outcome | None], grace_s: float):
        self.exits: dict[int, Exit] = {}
        self.stop_signal: signal.Signals | None = None
        """The signal that was passed on to the ranks."""
        self._outcome = outcome
        self._grace_s = grace_s
        self._requests: list[tuple[signal.Signals, float]] = []
        self._deadline = float("inf")
        self._killed: set[int] = set()

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Takes the launcher's signals; only the main thread may do this."""
        before = {number: signal.getsignal(number) for number in FORWARDED}
        taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]  # nohup stays
        for number in taken:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._requests or now - self._requests[-1][1] > _SAME_REQUEST_S:
            self._requests.append((signal.Signals(number), now))

    def watch(self, pids: Mapping[int, int]) -> bool:
        """One look at the ranks, `pids` by rank; True while one of them runs."""
        self._note_exits(pids)
        running = {rank: pid for rank, pid in pids.items() if rank not in self.exits}
        self._pass_signal_on(running)
        if running and time.monotonic() >= self._deadline and not self._killed:
            self._kill(running, pids)
        return bool(running)

    def _note_exits(self, pids: Mapping[int, int]) -> None:
        for rank in pids.keys() - self.exits.keys():
            # WNOWAIT: the process stays for the agent to collect
            status = os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                continue
            code = status.si_status if status.si_code == os.CLD_EXITED else 128 + status.si_status
            self.exits[rank] = Exit(code, time.time(), rank in self._killed)
            if code not in (0, StoppedError.exit_code):
                outcome = self._outcome(rank)
                announced = outcome is not None and outcome.traceback is None
                self._allow(self._grace_s if announced else _PEER_GRACE_S)

    def _pass_signal_on(self, running: Mapping[int, int]) -> None:
        if self._requests and self.stop_signal is None:
            self.stop_signal = FORWARDED[self._requests[0][0]]
            for pid in running.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, self.stop_signal)
            self._allow(self._grace_s)
        if len(self._requests) > 1:
            self._allow(0)

    def _allow(self, seconds: float) -> None:
        """The running ranks get at most `seconds` from now."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _kill(self, running: Mapping[int, int], pids: Mapping[int, int]) -> None:
        self._killed.update(running)
        for pid in pids.values():  # each rank leads a process group: what the ended ones left behind goes too
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
