"""Whether ranks that failed are started again: the policy, without processes."""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import CheckpointError, DataError, DoesNotFitError, JobError, NotFiniteError, StoppedError
from phalanx.launch.verdict import End

_FINAL = (JobError, DoesNotFitError, DataError, NotFiniteError, StoppedError)
"""Ends that another attempt would meet again, or that the user asked for."""
_FINAL_CODES = {0, *(error.exit_code for error in _FINAL), CheckpointError.exit_code}
_SIZES = re.compile(r"\d[\d.,]*(?:[KMGT]?i?B)?")
_ASKED = {128 + n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}


@dataclass(frozen=True)
class Restarts:
    """How often ranks are started again, and what the launcher must know of the run for that."""

    most: int = 0
    """Restarts within the window."""
    window_s: float = 3600.0
    progress: Callable[[], tuple[int, float] | None] = lambda: None
    """Returns the newest step that the run has done, and when, in seconds since the epoch; None before the first."""
    directory: Path | None = None
    """The run directory, whose generation every attempt claims; None for runs without one."""
    preload: Sequence[str] = ()
    """Modules that a standby process imports, so that restarted ranks need not."""


@dataclass(frozen=True)
class Failure:
    """The end of an attempt, as the policy sees it."""

    code: int
    """Exit code of the launch, if nothing follows."""
    first: End | None
    """The rank that failed first; None if the watchdog had all of them killed."""
    step: int | None
    """The newest step that the attempt has done; None if it has done none."""
    out_of_memory: bool = False
    """True if the kernel ended a process for lack of memory during the attempt."""

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


@dataclass(frozen=True)
class Decision:
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
    paths = [Path("/proc/vmstat")]
    with suppress(OSError):
        paths += [Path("/sys/fs/cgroup" + read(Path("/proc/self/cgroup")).partition("::")[2].strip(), "memory.events")]
    return sum(_count(path, read) for path in paths)


def _count(path: Path, read: Callable[[Path], str]) -> int:
    try:
        counters: Mapping[str, str] = dict(line.split() for line in read(path).splitlines())
        return int(counters.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
