"""The watchdog: it reads the heartbeats of a machine's ranks from outside their processes, and says when they hang.

It neither kills nor ends anything itself: `Watchdog.poll` returns a finding, and whoever started the ranks ends them.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.data.files import open_regular
from phalanx.errors import RunError
from phalanx.launch.watchdog import layout as at
from phalanx.launch.watchdog import report
from phalanx.launch.watchdog.diagnosis import Diagnosis, Limits, RankView, diagnose, find_mismatch, hangs
from phalanx.launch.watchdog.heartbeat import STACKS_SIGNAL
from phalanx.launch.watchdog.pace import Pace, load_per_core
from phalanx.launch.watchdog.processes import process_state, stack_by_py_spy
from phalanx.launch.watchdog.reader import HeartbeatFile, RankRecord
from phalanx.launch.watchdog.slow import SlowRank, SlowRanks
from phalanx.report import ranks
from phalanx.report.ranks import RankState

_POLL_S = 1.0
_STACKS_S = 5.0  # at most, for the ranks to write their stacks
_WRITE_S = 5.0  # for the report: the disk of the logs may be what hangs
_CALLS_COMPARED = 32  # newest calls of each rank that are compared at every poll
_MESSAGES = 20  # that the live view can show
_PAUSE_S = 5.0  # between two polls: then this process was stopped itself, probably with all others


@dataclass(frozen=True)
class Finding:
    """A hang, or collectives that do not match."""

    diagnosis: Diagnosis
    message: str
    """What to tell the user."""
    document: dict[str, Any] = field(repr=False)
    """hang.json."""


class Watchdog:
    """Watches the ranks of one attempt on this machine.

    Args:
        directory: the folder of their heartbeat files.
        limits: when a silent rank hangs.
        tell: prints a line for the user.
        metrics: the run's metrics.jsonl, to which slow ranks are appended; None for no file.
        hosts: the host of every rank, if they are on several machines.
        states: the folder for the file with the state of every rank, for the live view; None for none.
        load: returns how many processes want each core.
    """

    def __init__(
        self,
        directory: Path,
        limits: Limits,
        tell: Callable[[str], None],
        metrics: Path | None = None,
        hosts: Sequence[str] = (),
        states: Path | None = None,
        load: Callable[[], float] = load_per_core,
    ):
        self.directory, self.limits, self.metrics = directory, limits, metrics
        self._print, self._states = tell, states
        self._messages: deque[tuple[float, str]] = deque(maxlen=_MESSAGES)
        self._publishing: threading.Thread | None = None
        self.host = platform.node()
        self._hosts = hosts
        self._files: dict[int, HeartbeatFile] = {}
        self._began = self._polled = self._resumed = time.monotonic()
        self._asked: float | None = None
        self._suspect: object = None
        self._stopped: set[int] = set()
        self._slow = SlowRanks()
        self._pace, self._load = Pace(), load

    def poll(self, pids: Mapping[int, int], exits: Mapping[int, int]) -> Finding | None:
        """Looks at the ranks, once a second at most. `pids` are those of running ranks, `exits` the exit codes of
        ended ones. Returns what was found; the ranks should then be killed."""
        now = time.monotonic()
        if now - self._polled < min(_POLL_S, self.limits.hang_s / 5 or _POLL_S):
            return None
        if now - self._polled > _PAUSE_S:
            self._resumed = now
        self._polled = now
        views = self.views(pids, exits, calls=_CALLS_COMPARED)
        self._publish(views)
        if self._mismatch_stays(views):
            return self._finding(diagnose(self.views(pids, exits)), pids)
        self._tell_stopped(views)
        self._tell_slow(views, now)
        self._pace.update([view.record for view in views.values() if view.record is not None], now)
        if not hangs(views, self.limits, self._pace, self._load()):
            self._asked = None
            return None
        if self._asked is None:
            self._asked = now
            self._ask_for_stacks(pids, views)
            return None
        if now - self._asked < _STACKS_S and not self._have_answered(pids, views):
            return None
        return self._finding(diagnose(self.views(pids, exits)), pids)

    def tell(self, line: str) -> None:
        """Says a line to the user. Rank 0 says it if it shows the live view, which another line would tear."""
        self._messages.append((round(time.time(), 3), line))
        record = self._record(0, 0)
        if self._states is None or record is None or not record.has_screen or process_state(record.pid) is None:
            self._print(line)

    def _publish(self, views: Mapping[int, RankView]) -> None:
        """Writes the state of every rank for the live view, unless the disk still has the one before."""
        if self._states is None or (self._publishing is not None and self._publishing.is_alive()):
            return
        found = [_state(view) for view in views.values()]
        arguments = (self._states, self.host, found, list(self._messages))
        self._publishing = threading.Thread(target=_write_states, args=arguments, daemon=True)
        self._publishing.start()

    def views(
        self, pids: Mapping[int, int], exits: Mapping[int, int | None], calls: int = at.RING_CALLS
    ) -> dict[int, RankView]:
        """Returns what is known of the ranks now, each with its newest `calls` calls."""
        now = time.monotonic()
        views = {}
        for rank in sorted(pids.keys() | exits.keys()):
            record = self._record(rank, calls)
            process = process_state(pids[rank]) if rank in pids else None
            last, tick = (record.beat, record.tick) if record else (self._began, now)
            silent = now - max(last, self._resumed if rank in pids else last)
            views[rank] = RankView(rank, record, silent, process, exits.get(rank), now - max(tick, self._resumed))
        return views

    def post_mortem(self, exits: Mapping[int, int | None]) -> str:
        """Returns what the records say about why ended ranks failed; empty if they do not say. `exits` has their exit
        codes, None for a rank that was killed although it still worked."""
        views = self.views({}, exits)
        diagnosis = diagnose(views)
        known = diagnosis.mismatch or diagnosis.waits or any(view.left_early for view in views.values())
        if known and diagnosis.kind in ("mismatch", "silent", "deadlock"):
            return report.headline(diagnosis, self.host, self._hosts)
        return ""

    def any_began_to_train(self, ranks: Iterable[int]) -> bool:
        """Returns whether one of the ranks has come to its first step."""
        records = [self._record(rank, 0) for rank in ranks]
        return any(record is not None and record.first_step > 0 for record in records)

    def left_early(self, rank: int) -> str:
        """Returns where a rank was, if it ended in the middle of training; else nothing."""
        record = self._record(rank, 0)
        if record is None or not record.amid_training:
            return ""
        return f"in step {record.step + 1}, phase {record.phase.label}"

    def _record(self, rank: int, calls: int) -> RankRecord | None:
        try:
            if rank not in self._files:
                self._files[rank] = HeartbeatFile(self.directory / at.file_name(rank))
            return self._files[rank].read(calls)
        except (OSError, ValueError, KeyError, IndexError):  # not there yet, or overwritten by a rank gone mad
            return None

    def _mismatch_stays(self, views: Mapping[int, RankView]) -> bool:
        """Returns whether calls of the same channel differ at two polls in a row: each was read whole, twice."""
        mismatch = find_mismatch(views)
        found = mismatch and mismatch.call.channel
        stays, self._suspect = bool(found) and found == self._suspect, found
        return stays

    def _tell_stopped(self, views: Mapping[int, RankView]) -> None:
        stopped = {rank for rank, view in views.items() if view.process is not None and view.process.stopped}
        for rank in sorted(stopped - self._stopped):
            record = views[rank].record
            where = f" in step {record.step + 1}, phase {record.phase.label}" if record else ""
            self.tell(f"rank {rank} ({self.host}){where}: {report.state(views[rank])}")
        for rank in sorted(self._stopped - stopped):
            if not views[rank].ended:
                self.tell(f"rank {rank} ({self.host}) continues")
        self._stopped = stopped

    def _tell_slow(self, views: Mapping[int, RankView], now: float) -> None:
        records = {rank: view.record for rank, view in views.items() if view.record is not None}
        for slow in self._slow.update(records, now):
            self.tell(
                f"rank {slow.rank} ({self.host}) is slow: {slow.own_s:.3g} s of its own per step at step {slow.step}, "
                f"{slow.factor:.2f} × the median of the ranks with the same work"
            )
            self._record_slow(slow)

    def _record_slow(self, slow: SlowRank) -> None:
        if self.metrics is None:
            return
        values = {"step": slow.step, "rank": slow.rank, "host": self.host, "factor": round(slow.factor, 3)}
        row = {"event": "slow_rank", "time": round(time.time(), 3), **values}
        row |= {"own_s": slow.own_s, "median_s": slow.median_s}
        threading.Thread(target=_append, args=(self.metrics, row), daemon=True).start()

    def _ask_for_stacks(self, pids: Mapping[int, int], views: Mapping[int, RankView]) -> None:
        for rank, pid in pids.items():
            if views[rank].record is not None:  # otherwise the signal would end it: its handler is not there yet
                with suppress(ProcessLookupError):
                    os.kill(pid, STACKS_SIGNAL)

    def _have_answered(self, pids: Mapping[int, int], views: Mapping[int, RankView]) -> bool:
        return all(views[rank].frozen or self._stack(rank) for rank in pids)

    def _finding(self, diagnosis: Diagnosis, pids: Mapping[int, int]) -> Finding:
        stacks = {rank: self._stack(rank) for rank in diagnosis.views}
        for rank, pid in pids.items():
            stacks[rank] = stacks[rank] or stack_by_py_spy(pid)
        message = [report.headline(diagnosis, self.host, self._hosts)]
        if diagnosis.mismatch is None:
            message += [*report.lines(diagnosis), *report.stack_excerpts(diagnosis, stacks)]
        document = {"time": round(time.time(), 3), **report.as_json(diagnosis, self.host, self._hosts, stacks)}
        return Finding(diagnosis, "\n".join(message), document)

    def _stack(self, rank: int) -> str:
        try:
            return (self.directory / at.stacks_name(rank)).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _state(view: RankView) -> RankState:
    record, phase = view.record, "starting"
    if view.exit_code is not None:
        phase = "done" if view.exit_code == 0 else "ended"
    elif view.process is not None and view.process.stopped:
        phase = "stopped"
    elif record is not None:
        phase = record.phase.label
    known = (record.step, record.memory, record.memory_limit) if record else (0, 0, 0)
    return RankState(view.rank, phase, known[0], round(view.silent_s, 1), known[1], known[2])


def _write_states(folder: Path, host: str, found: Sequence[RankState], messages: Sequence[tuple[float, str]]) -> None:
    with suppress(OSError):
        ranks.write(folder, host, found, messages)


def _append(path: Path, row: Mapping[str, Any]) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with suppress(OSError, RunError), open(open_regular(path, flags), "ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")  # in one write, since rank 0 appends here, too


def write(finding: Finding, directory: Path, name: str = "hang") -> None:
    """Writes NAME.json, NAME.txt and each rank's stacks into the folder of an attempt's logs, if that answers within
    some seconds: its disk may be what hangs."""

    def all_files() -> None:
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{name}.json").write_text(json.dumps(finding.document, indent=1) + "\n", encoding="utf-8")
            (directory / f"{name}.txt").write_text(f"{finding.message}\n", encoding="utf-8")
            for rank in finding.document["ranks"]:
                folder = directory / f"rank_{rank['rank']}"
                folder.mkdir(exist_ok=True)
                (folder / "stacks.log").write_text(rank["stacks"], encoding="utf-8")

    writer = threading.Thread(target=all_files, daemon=True)
    writer.start()
    writer.join(_WRITE_S)
