"""Combines the ends of all ranks into one exit code and one message: which rank failed first, and why."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import StoppedError
from phalanx.launch.outcome import Outcome

WATCHDOG_CODE = 124
"""Exit code of a launch whose ranks the watchdog had killed, as of timeout(1)."""

LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL remote process exited"),
    *("gloo/transport", "Timed out waiting", "Watchdog caught collective operation timeout"),
)
"""Error texts of ranks that failed only because of another one: it is gone, or did not come to a collective in time."""


@dataclass(frozen=True)
class End:
    """The end of one rank as observed by the launcher and as reported by the rank."""

    rank: int
    code: int
    """Exit code as in a shell: 128 + n for a death by signal n."""
    time: float
    """Seconds since the epoch."""
    killed: bool
    """True if the launcher killed it."""
    outcome: Outcome | None
    """None if the rank had no time to report."""
    last_words: str = ""
    """The end of its standard error, if that went to a file."""
    left_early: str = ""
    """Where it was in training if it ended as if done; else empty."""

    @property
    def report(self) -> Outcome | None:
        """The rank's report of this end; None also if it died of something else while exiting."""
        return self.outcome if self.outcome and self.outcome.code == self.code else None

    @property
    def lost_peer(self) -> bool:
        """True if it failed only because another rank was gone, or did not come."""
        return self.outcome is not None and any(words in self.outcome.message for words in LOST_PEER)

    @property
    def order(self) -> tuple[bool, float]:
        """The sort key that puts causes before consequences. A killed rank reports nothing, and its peers may report
        the lost connection before its death is seen: hence those come last."""
        return self.lost_peer, self.outcome.time if self.outcome else self.time


BEFORE_CHECKPOINT = (
    "before {} of {} ranks could write a checkpoint; the same command resumes from the last complete one."
)
"""Message about stopped ranks: how many of how many did not finish."""


def verdict(
    ends: Sequence[End],
    stop_signal: signal.Signals | None,
    stopped: str = BEFORE_CHECKPOINT,
    *,
    hang: str = "",
    records: str = "",
    world: int | None = None,
) -> tuple[int, str]:
    """Returns the exit code of the launch and the message for the user (empty on success).

    `stopped` ends the sentence "Stopped by SIGNAL ..." if ranks did not finish. `hang` is the watchdog's message if it
    had the ranks killed. `records` says what the ranks' heartbeats show: it comes first where no rank's own error is
    the cause. `world` is the number of ranks if there are more than `ends`, on other nodes."""
    if hang:
        return WATCHDOG_CODE, hang
    failures = _failures(ends, stop_signal)
    if failures:
        first = failures[0]
        message = _failure(first, failures, ends, world or len(ends))
        only_a_victim = first.lost_peer or first.code == 128 + signal.SIGABRT
        return first.code or 1, f"{records}\n{message}" if records and only_a_victim else message
    unfinished = [end for end in ends if end.killed or end.code not in (0, StoppedError.exit_code)]
    if stop_signal and unfinished:
        return 128 + stop_signal, f"Stopped by {stop_signal.name} {stopped.format(len(unfinished), len(ends))}"
    paused = [end for end in ends if end.code == StoppedError.exit_code]
    if paused:
        return StoppedError.exit_code, paused[0].outcome.message if paused[0].outcome else ""
    return 0, ""


def first_failure(ends: Sequence[End], stop_signal: signal.Signals | None) -> End | None:
    """Returns the end that made the others fail; None if no rank failed."""
    failures = _failures(ends, stop_signal)
    return failures[0] if failures else None


def _failures(ends: Sequence[End], stop_signal: signal.Signals | None) -> list[End]:
    """Returns the ends that were not planned, causes before consequences."""
    planned = (0, StoppedError.exit_code, 128 + stop_signal if stop_signal else None)
    unplanned = (end for end in ends if not end.killed and (end.code not in planned or end.left_early))
    failures = sorted(unplanned, key=lambda end: end.order)
    # Before the first step a signal ends ranks at once, and a peer may see that before its own copy of the signal.
    outrun = stop_signal is not None and all(end.lost_peer for end in failures)
    return [] if outrun else failures


def _failure(first: End, failures: Sequence[End], ends: Sequence[End], world: int) -> str:
    report = first.report
    same = [end for end in failures if report and end.report and end.report.message == report.message]
    if report and report.traceback is None and len(same) == len(ends):
        return report.message  # every rank found the user's mistake: no rank needs to be named
    lines = [_reason(first, world)]
    if len(same) > 1:
        lines.append(f"{_others(len(same) - 1)} stopped by the same error.")
    if rest := len(ends) - max(1, len(same)):
        lines.append(f"{_others(rest)} stopped because of it.")
    return "\n".join(lines)


def _reason(end: End, world: int) -> str:
    who = f"Rank {end.rank} of {world}"
    if end.left_early:
        return f"{who} exited with code {end.code} {end.left_early}, while the others still trained.{_tail(end)}"
    if end.report:
        return f"{who} failed: {end.report.traceback or end.report.message}"
    number = end.code - 128
    if number not in set(signal.Signals):
        return f"{who} ended with exit code {end.code} and no message.{_tail(end)}"
    memory = " The kernel does this when memory runs out (see dmesg)." if number == signal.SIGKILL else ""
    return f"{who} was killed by {signal.Signals(number).name}.{memory}{_tail(end)}"


def _tail(end: End) -> str:
    return f" Its standard error ends:\n{end.last_words}" if end.last_words else ""


def _others(count: int) -> str:
    return f"{count} other {'rank was' if count == 1 else 'ranks were'}"
