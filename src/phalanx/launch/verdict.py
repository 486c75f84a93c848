"""How ranks end: what each reports (outcome.json in its log directory), one exit code and message for all of them
(which rank failed first, and why), and whether they are started again. The policy, without processes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import phalanx
from phalanx.bounded import parse_json, read_bytes
from phalanx.config.values import read_as
from phalanx.echo import shortened
from phalanx.errors import (
    CheckpointError,
    DataError,
    DoesNotFitError,
    JobError,
    NotFiniteError,
    PhalanxError,
    RunError,
    StoppedError,
)
from phalanx.launch.ranks import Ranks
from phalanx.registry import blamed

_FILE = "outcome.json"
_MOST_BYTES = 2**22
_MOST_CHARACTERS = 100_000  # of a message or a traceback; a character may take 12 bytes in JSON
_ROOM = ".outcome.room"
_ROOM_BYTES = 1 << 15


@dataclass(frozen=True)
class Outcome:
    rank: int
    code: int  # exit code; phalanx.errors has the table
    message: str  # message for the user; empty on success
    traceback: str | None  # set only for a bug: a user's mistake is shown as a message
    time: float  # seconds since the epoch; the earliest failure is the cause

    def write(self, directory: Path) -> None:
        """Writes directory/outcome.json atomically, in the room that `reserve_room` has kept for it."""
        (directory / _ROOM).unlink(missing_ok=True)
        temporary = directory / f".{_FILE}.{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / _FILE)

    @classmethod
    def read(cls, directory: Path) -> Outcome | None:
        """Returns the outcome in `directory`, or None if the rank ended without writing one. A file that no rank has
        written is none: its exit code and its standard error are known anyway."""
        try:
            return read_as(cls, parse_json(read_bytes(directory / _FILE, _MOST_BYTES), lenient=True), more=True)
        except (OSError, ValueError):
            return None


def spare_name(rank: int) -> str:
    """Returns the name of the directory, beside the heartbeats in memory, for an outcome for which a disk has no
    room."""
    return f"rank_{rank}.outcome"


def reserve_room(directory: Path) -> None:
    """Keeps space for an outcome, so that a rank that ends because the disk is full can say so."""
    with suppress(OSError), (directory / _ROOM).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)


def describe(error: BaseException) -> tuple[int, str, str | None]:
    """Returns exit code, message and traceback of an exception that ended a run."""
    if isinstance(error, PhalanxError):
        return error.exit_code, shortened(f"{blamed(error)}{error}", _MOST_CHARACTERS), None
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted", None
    if isinstance(error, SystemExit):
        code = error.code or 0
        return (code & 0xFF, "", None) if isinstance(code, int) else (1, str(code), None)
    trace = "".join(traceback.format_exception(error)).rstrip()
    message = f"{blamed(error)}{type(error).__name__}: {error}"
    return 1, shortened(message, _MOST_CHARACTERS), shortened(trace, _MOST_CHARACTERS)


LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL remote process exited"),
    *("gloo/transport", "Timed out waiting", "Watchdog caught collective operation timeout", "a replica was lost"),
)
"""Error texts of ranks that failed only because of another one: it is gone, or did not come to a collective in time."""
TEXTS = (
    *LOST_PEER,
    *("Socket closed", "Connection refused", "Connection timed out", "No route to host"),
    *("Connection was likely closed", "Application timeout caused pair closure", "NCCL communicator was aborted"),
    "wait timeout",
)
"""Parts of the messages with which gloo, NCCL and torch's store report a lost peer."""
_ROOT = Path(phalanx.__file__).parent


class LostPeerError(RunError):
    """This rank failed only because another one has gone, or does not answer."""


@contextmanager
def lost_peer_named(ranks: Ranks) -> Iterator[None]:
    """Turns a backend's error about a lost connection, raised inside the `with` block, into a LostPeerError that says
    what this rank was waiting in."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
        text = lost_line(error)
        if text is None:
            raise
        address = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", text)
        peer = f"rank {1 - ranks.rank}" if ranks.world == 2 else f"a rank on {address[1]}" if address else "rank(s)"
        # without the line of the backend's source, and its general advice
        short = re.sub(r"^\[\S+:\d+\] |\. This is typically .*", "", text)[:300]
        raise LostPeerError(
            f"rank {ranks.rank} of {ranks.world} on {platform.node()} lost {peer}: another rank ended, hangs, or its "
            f"connection broke while this one waited in {_waited_in(error)}. The first rank that ended says why, in "
            f"its log or on its node. ({short})"
        ) from error


def lost_line(error: RuntimeError) -> str | None:
    """Returns the line of a backend's error that says that a peer is lost; None if it says something else."""
    return next((line for line in str(error).splitlines() if any(known in line for known in TEXTS)), None)


def _waited_in(error: BaseException) -> str:
    """Returns the innermost of our functions that waited, outside of the collectives themselves."""
    stack = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [(path.relative_to(_ROOT), frame) for path, frame in stack if path.is_relative_to(_ROOT)]
    outside = [(path, frame) for path, frame in ours if path.parts[0] != "comm"] or ours
    if not outside:
        return "a collective"
    path, frame = outside[-1]
    return f"{frame.name} ({path}:{frame.lineno})"


_FINAL = (JobError, DoesNotFitError, DataError, NotFiniteError, StoppedError)
"""Ends that another attempt would meet again, or that the user asked for."""
_FINAL_CODES = {0, *(error.exit_code for error in _FINAL), CheckpointError.exit_code}
_SIZES = re.compile(r"\d[\d.,]*(?:[KMGT]?i?B)?")
_ASKED = {128 + n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}


@dataclass(frozen=True)
class Restarts:
    """How often ranks are started again, and what the launcher must know of the run for that."""

    most: int = 0
    window_s: float = 3600.0
    progress: Callable[[], tuple[int, float] | None] = lambda: None
    """Returns the newest step that the run has done, and when, in seconds since the epoch; None before the first."""
    directory: Path | None = None
    """The run directory, whose generation every attempt claims; None for runs without one."""
    preload: Sequence[str] = ()
    """Modules that a fork server imports, and functions (MODULE:FUNCTION) that it calls, once for all ranks, also
    restarted ones; empty: each rank for itself."""


@dataclass(frozen=True)
class Failure:
    """The end of an attempt, as the policy sees it."""

    code: int  # exit code of the launch, if nothing follows
    first: End | None
    """The rank that failed first; None if the watchdog had all of them killed."""
    step: int | None  # the newest step that the attempt has done; None if it has done none
    out_of_memory: bool = False  # true if the kernel ended a process for lack of memory during the attempt

    @property
    def signature(self) -> tuple[int, str, int | None]:
        """Equal for failures that are the same one, met again. Numbers and sizes in the message, as of the free space,
        may change."""
        report = self.first.report if self.first else None
        return self.code, _SIZES.sub("#", report.message) if report else "", self.step

    @property
    def may_come_back(self) -> bool:
        """True if it says nothing about the program: somebody killed a rank, or a peer elsewhere was lost."""
        return self.first is not None and (self.code == 128 + signal.SIGKILL or self.first.lost_peer)

    @property
    def is_final(self) -> bool:
        """True if another attempt would end in the same way, or if the user asked for this end."""
        first = self.first
        if self.code in _ASKED:
            return True
        if first is None or first.left_early or first.report is None:
            return False  # whatever its code: it did not say what it means
        refused = first.report.traceback is None and self.step is None  # a device that is not there, and the like
        return self.code in _FINAL_CODES or (refused and not first.lost_peer)


class Decision(NamedTuple):
    """Whether to restart, and a sentence about it for the user, which may be empty."""

    restart: bool
    sentence: str = ""


class RestartPolicy:
    """Decides about one failure after the other of a launch.

    A rank killed by a signal, a crash, a hang and a lost peer are met by a restart. Mistakes of the user, data and
    checkpoints that are invalid, NaN, and a requested stop are not. Neither is a failure that comes back at the same
    step: it is deterministic. SIGKILL says nothing about the program, so it may come back, unless memory ran out.
    """

    def __init__(self, restarts: Restarts, clock: Callable[[], float] = time.monotonic):
        self.most, self.window_s, self.clock = restarts.most, restarts.window_s, clock
        self._times: deque[float] = deque()
        self._seen: set[tuple[int, str, int | None]] = set()
        self._ran_out_of_memory = False

    def decide(self, failure: Failure) -> Decision:
        """Decides whether the ranks are started again; a restart counts from then on."""
        if self.most == 0 or failure.is_final:
            return Decision(False)
        if failure.out_of_memory and self._ran_out_of_memory:
            return Decision(
                False,
                "Not restarted: memory ran out twice. Use less of it: layout.recompute=full, a smaller "
                "layout.micro_batch, more ranks that shard (dp_shard, tp, pp), or layout=auto.",
            )
        if failure.signature in self._seen:
            where = f"at step {failure.step + 1}" if failure.step is not None else "before the first step"
            return Decision(False, f"Not restarted: the same failure came {where} before, so it would come again.")
        now = self.clock()
        while self._times and self._times[0] <= now - self.window_s:
            self._times.popleft()
        if len(self._times) >= self.most:
            return Decision(
                False,
                f"Not restarted: {self.most} restarts within {self.window_s:g} s are the most (run.max_restarts, "
                "run.restart_window_s). The same command resumes.",
            )
        self._times.append(now)
        if failure.out_of_memory:
            self._ran_out_of_memory = True
        elif not failure.may_come_back:
            self._seen.add(failure.signature)
        memory = " in the same layout, although memory ran out: if that was its own, it will again" * (
            failure.out_of_memory
        )
        return Decision(True, f"Restart {len(self._times)} of at most {self.most}{memory}.")


def memory_kills(read: Callable[[Path], str] = Path.read_text) -> int:
    """Returns how many processes the kernel has ended for lack of memory since boot, as far as this process may see:
    on this machine, and in its control group."""
    paths, kills = [Path("/proc/vmstat")], 0
    with suppress(OSError):
        paths += [Path("/sys/fs/cgroup" + read(Path("/proc/self/cgroup")).partition("::")[2].strip(), "memory.events")]
    for path in paths:
        with suppress(OSError, ValueError):
            kills += int(dict(line.split() for line in read(path).splitlines()).get("oom_kill", 0))
    return kills


WATCHDOG_CODE = 124  # exit code of a launch whose ranks the watchdog had killed, as of timeout(1)


@dataclass(frozen=True)
class End:
    """The end of one rank as observed by the launcher and as reported by the rank."""

    rank: int
    code: int  # exit code as in a shell: 128 + n for a death by signal n
    time: float
    killed: bool  # true if the launcher killed it
    outcome: Outcome | None = None  # None if the rank had no time to report
    last_words: str = ""  # the end of its standard error, if that went to a file
    left_early: str = ""  # where it was in training if it ended as if done; else empty

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
    if failures := _failures(ends, stop_signal):
        first = failures[0]
        message = _failure(failures, ends, world or len(ends))
        only_a_victim = first.lost_peer or first.code == 128 + signal.SIGABRT
        return first.code or 1, f"{records}\n{message}" if records and only_a_victim else message
    unfinished = [end for end in ends if end.killed or end.code not in (0, StoppedError.exit_code)]
    if stop_signal and unfinished:
        return 128 + stop_signal, f"Stopped by {stop_signal.name} {stopped.format(len(unfinished), len(ends))}"
    if paused := next((end for end in ends if end.code == StoppedError.exit_code), None):
        return StoppedError.exit_code, paused.outcome.message if paused.outcome else ""
    return 0, ""


def first_failure(ends: Sequence[End], stop_signal: signal.Signals | None) -> End | None:
    """Returns the end that made the others fail; None if no rank failed."""
    return next(iter(_failures(ends, stop_signal)), None)


def _failures(ends: Sequence[End], stop_signal: signal.Signals | None) -> list[End]:
    """Returns the ends that were not planned, causes before consequences."""
    planned = (0, StoppedError.exit_code, 128 + stop_signal if stop_signal else None)
    unplanned = (end for end in ends if not end.killed and (end.code not in planned or end.left_early))
    failures = sorted(unplanned, key=lambda end: end.order)
    # Before the first step a signal ends ranks at once, and a peer may see that before its own copy of the signal.
    outrun = stop_signal is not None and all(end.lost_peer for end in failures)
    return [] if outrun else failures


def _failure(failures: Sequence[End], ends: Sequence[End], world: int) -> str:
    report = failures[0].report
    same = [end for end in failures if report and end.report and end.report.message == report.message]
    if report and report.traceback is None and len(same) == len(ends):
        return report.message  # every rank found the user's mistake: no rank needs to be named
    lines = [_reason(failures[0], world)]
    for count, why in ((len(same) - 1, "by the same error"), (len(ends) - max(1, len(same)), "because of it")):
        if count > 0:
            lines.append(f"{count} other {'rank was' if count == 1 else 'ranks were'} stopped {why}.")
    return "\n".join(lines)


def _reason(end: End, world: int) -> str:
    who = f"Rank {end.rank} of {world}"
    words = f" Its standard error ends:\n{end.last_words}" if end.last_words else ""
    if end.left_early:
        return f"{who} exited with code {end.code} {end.left_early}, while the others still trained.{words}"
    if end.report:
        return f"{who} failed: {end.report.traceback or end.report.message}"
    number = end.code - 128
    if number not in set(signal.Signals):
        return f"{who} ended with exit code {end.code} and no message.{words}"
    memory = " The kernel does this when memory runs out (see dmesg)." if number == signal.SIGKILL else ""
    return f"{who} was killed by {signal.Signals(number).name}.{memory}{words}"
