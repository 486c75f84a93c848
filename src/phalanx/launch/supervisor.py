"""Watches the ranks of one machine: forwards signals, records how each rank ends, kills those that cannot continue.

It does not depend on torch. `Attempts.run` asks it at every poll. torch's own agent would answer any non-zero exit with
SIGTERM to all, even while the peers still write the checkpoint that they and the rank had agreed on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from phalanx.echo import echo
from phalanx.errors import StoppedError
from phalanx.launch.grace import grace_left
from phalanx.launch.outcome import Outcome
from phalanx.launch.verdict import WATCHDOG_CODE
from phalanx.launch.watchdog.watchdog import Finding, Watchdog

FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone: Ctrl-C is no longer possible
}
"""Signals to the launcher → signals to every rank."""

SAME_REQUEST_S = 0.5
"""`timeout` and wrappers like it send a signal to the child and again to its group: that is one request."""
_PEER_GRACE_S = 3.0  # for the peers of a failed rank: long enough to notice and report it
_UNBEGUN_GRACE_S = 3.0  # before the first step there is nothing to save
_UNKILLABLE_S = 60.0  # after SIGKILL: a process whose disk or driver does not answer stays until it does
_SILENT_PEER_GRACE_S = 0.5  # after a rank that was killed: its peers know less of the reason than the launcher


@dataclass(frozen=True)
class Exit:
    """The end of a rank's process."""

    code: int
    """Exit code as in a shell: 128 + n for a death by signal n."""
    time: float
    """Seconds since the epoch when the exit was observed."""
    killed: bool
    """True if the launcher killed it, so that it is not a cause."""


class StopSignals:
    """The signals to the launcher that ask its ranks to stop, in whatever attempt."""

    def __init__(self) -> None:
        self.requests: list[tuple[signal.Signals, float]] = []
        """Each request with the time at which it came, by the monotonic clock."""

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the launcher's signals inside the `with` block; only the main thread may do this."""
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
        if not self.requests or now - self.requests[-1][1] > SAME_REQUEST_S:
            self.requests.append((signal.Signals(number), now))


class Supervisor:
    """The ranks of one attempt.

    Args:
        outcome: what the rank itself said about its end, or None.
        grace_s: seconds that ranks get to end after a signal, or after one of them ended with an error that it
            announced.
        signals: the launcher's.
        watchdog: returns the watchdog of the attempt; called when its ranks have been started.
    """

    def __init__(
        self,
        outcome: Callable[[int], Outcome | None],
        grace_s: float,
        signals: StopSignals,
        watchdog: Callable[[], Watchdog] | None = None,
    ):
        self.exits: dict[int, Exit] = {}
        self.stop_signal: signal.Signals | None = None
        """The signal that was forwarded to the ranks."""
        self.finding: Finding | None = None
        """The reason for which the watchdog had all ranks killed."""
        self.watchdog: Watchdog | None = None
        """The watchdog of the attempt."""
        self._new_watchdog = watchdog
        self._outcome = outcome
        self._grace_s = grace_s
        self._requests = signals.requests
        self._deadline = float("inf")
        self._killed: set[int] = set()
        self._killed_at = float("inf")
        self._running: Mapping[int, int] = {}

    def end(self, *, saves: bool) -> None:
        """Ends the ranks although none of them failed: at once, or, if they can stop with a checkpoint (`saves`), as a
        signal does."""
        if saves:
            self._signal(signal.SIGTERM)
        self._allow(grace_left(self._grace_s, os.environ, time.time()) if saves else 0)

    def watch(self, pids: Mapping[int, int]) -> bool:
        """Polls the ranks once, `pids` by rank; returns whether one of them is running."""
        if self.watchdog is None and self._new_watchdog is not None:
            self.watchdog = self._new_watchdog()
        self._note_exits(pids)
        running = self._running = {rank: pid for rank, pid in pids.items() if rank not in self.exits}
        self._pass_signal_on()
        self._look_for_hangs(running, pids)
        if running and time.monotonic() >= self._deadline and not self._killed:
            self._kill(running, pids)
        if running and time.monotonic() > self._killed_at + _UNKILLABLE_S:
            self._leave(running)
        return bool(running)

    def _look_for_hangs(self, running: Mapping[int, int], pids: Mapping[int, int]) -> None:
        if self.watchdog is None or not running or self._killed:
            return
        codes = {rank: ended.code for rank, ended in self.exits.items()}
        try:
            self.finding = self.watchdog.poll(running, codes)
        except Exception as error:  # what only watches must never end a run
            self.watchdog.tell(f"the watchdog is off, since it failed: {type(error).__name__}: {error}")
            self.watchdog = self._new_watchdog = None
        if self.finding is not None:
            self._kill(running, pids)

    def _note_exits(self, pids: Mapping[int, int]) -> None:
        for rank in pids.keys() - self.exits.keys():
            # WNOWAIT leaves the process for `processes.ranks` to reap
            status = os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                continue
            code = status.si_status if status.si_code == os.CLD_EXITED else 128 + status.si_status
            self.exits[rank] = Exit(code, time.time(), rank in self._killed)
            if code not in (0, StoppedError.exit_code):
                self._allow(self._peers_grace(self._outcome(rank)))
            elif code == 0 and self.watchdog is not None and self.watchdog.left_early(rank):
                self._allow(_PEER_GRACE_S)

    def _peers_grace(self, outcome: Outcome | None) -> float:
        """Returns the seconds for the peers of a rank that failed."""
        if outcome is None:
            return _SILENT_PEER_GRACE_S
        return _PEER_GRACE_S if outcome.traceback else self._grace_s

    def _pass_signal_on(self) -> None:
        if self._requests and self.stop_signal is None:
            self.stop_signal = FORWARDED[self._requests[0][0]]
            self._signal(self.stop_signal)
            begun = self.watchdog is None or self.watchdog.any_began_to_train(self._running)
            grace_s = self._grace_s if begun else min(self._grace_s, _UNBEGUN_GRACE_S)
            self._allow(grace_left(grace_s, os.environ, time.time()))
        if len(self._requests) > 1:
            self._allow(0)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._running.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _leave(self, running: Mapping[int, int]) -> NoReturn:
        """Ends the launcher although ranks are left, which it would wait for in vain."""
        left = ", ".join(f"rank {rank} (process {pid})" for rank, pid in running.items())
        if self.finding:
            echo(f"phalanx: {self.finding.message}", file=sys.stderr)
        echo(
            f"phalanx: {left} cannot be killed: its disk or driver does not answer the kernel; it ends when that does",
            file=sys.stderr,
            flush=True,
        )
        os._exit(WATCHDOG_CODE)

    def _allow(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _kill(self, running: Mapping[int, int], pids: Mapping[int, int]) -> None:
        self._killed.update(running)
        self._killed_at = time.monotonic()
        for pid in pids.values():  # each rank leads a process group: children of ended ranks are killed too
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
