"""The watchdog: it reads the heartbeats of a machine's ranks from outside their processes, and says when they hang.

The local launcher has one in its own process. Ranks that torchrun, srun or mpiexec started get one process per node
(`python -m` this module): it watches the ranks whose heartbeats are in the folder, prints and writes what it finds, and
kills them when they hang. It ends when they have ended, and removes the folder. It imports no torch.

Heartbeats are stored into mapped files. On a disk, a store can wait while the kernel writes the page back, and a
checkpoint keeps the disk busy for long; /dev/shm is never written back.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from phalanx.bounded import read_json
from phalanx.config.values import read_as
from phalanx.data.files import open_regular
from phalanx.echo import echo
from phalanx.errors import RunError
from phalanx.launch.lifeline import boot_id, is_mine, process_state, stack_by_py_spy
from phalanx.launch.ranks import Ranks
from phalanx.launch.watchdog import diagnosis as report
from phalanx.launch.watchdog import heartbeat, nccl
from phalanx.launch.watchdog.diagnosis import (
    Diagnosis,
    Limits,
    Pace,
    RankView,
    SlowRanks,
    diagnose,
    find_mismatch,
    hangs,
    load_per_core,
)
from phalanx.launch.watchdog.heartbeat import STACKS_SIGNAL, HeartbeatFile, Phase, RankRecord
from phalanx.report import ranks
from phalanx.report.ranks import RankState

PREFIX = "phalanx_launch_"

_IN_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 64 * 2**20
_LOCK = "lock"
_UNLOCKED_S = 300.0  # from a folder's creation to its lock, at most


@contextmanager
def private_folder() -> Iterator[Path]:
    """Provides an empty folder of mode 0700, which is removed afterwards."""
    folder = new_folder()
    try:
        with owned(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_folder() -> Path:
    """Creates an empty folder of mode 0700; its owner should soon hold it by `owned`. Folders whose owners were killed
    are removed."""
    root = None
    with suppress(OSError):
        space = os.statvfs(_IN_MEMORY)
        if os.access(_IN_MEMORY, os.W_OK | os.X_OK) and space.f_bavail * space.f_frsize > _ROOM_BYTES:
            root = _IN_MEMORY
    for folder in root.glob(f"{PREFIX}*") if root else ():
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid() and _is_left_over(folder):
                shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Holds a folder, so that it does not count as left over. The kernel ends that with the process."""
    with (folder / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_left_over(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _UNLOCKED_S


_POLL_S = 1.0
_STACKS_S = 5.0  # at most, for the ranks to write their stacks
_WRITE_S = 5.0  # for the report: the disk of the logs may be what hangs
_CALLS_COMPARED = 32  # newest calls of each rank that are compared at every poll
_MESSAGES = 20  # that the live view can show
_PAUSE_S = 5.0  # between two polls: then this process was stopped itself, probably with all others


@dataclass(frozen=True)
class Finding:
    diagnosis: Diagnosis
    message: str
    document: dict[str, Any] = field(repr=False)  # hang.json


class Watchdog:
    """Watches the ranks of one attempt on this machine, whose heartbeat files are in `directory`. `tell` prints a line
    for the user, slow ranks are appended to `metrics`, and the state of every rank is written to the folder `states`,
    for the live view. `hosts` has the host of every rank, if they are on several machines. `load` returns how many
    processes want each core."""

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
            with suppress(OSError):
                (self.directory / nccl.ASK).touch()
            for rank, pid in pids.items():
                if views[rank].record is not None:  # otherwise the signal would end it: its handler is not there yet
                    with suppress(ProcessLookupError):
                        os.kill(pid, STACKS_SIGNAL)
            return None
        answered = all(views[rank].frozen or self._answered(views[rank]) for rank in pids)
        if now - self._asked < _STACKS_S and not answered:
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
        found, messages, folder = [_state(view) for view in views.values()], list(self._messages), self._states

        def write_states() -> None:
            with suppress(OSError):
                ranks.write(folder, self.host, found, messages)

        self._publishing = threading.Thread(target=write_states, daemon=True)
        self._publishing.start()

    def views(
        self, pids: Mapping[int, int], exits: Mapping[int, int | None], calls: int = heartbeat.RING_CALLS
    ) -> dict[int, RankView]:
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
        return record.where if record is not None and record.amid_training else ""

    def _record(self, rank: int, calls: int) -> RankRecord | None:
        try:
            if rank not in self._files:
                self._files[rank] = HeartbeatFile(self.directory / heartbeat.file_name(rank))
            return self._files[rank].read(calls)
        except (OSError, ValueError, TypeError, LookupError):  # not there yet, or overwritten by a rank gone mad
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
            where = f" {record.where}" if record else ""
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
            if self.metrics is not None:
                row: dict[str, Any] = {"event": "slow_rank", "time": round(time.time(), 3), "step": slow.step}
                row |= {"rank": slow.rank, "host": self.host, "factor": round(slow.factor, 3)}
                row |= {"own_s": slow.own_s, "median_s": slow.median_s}
                threading.Thread(target=_append, args=(self.metrics, row), daemon=True).start()

    def _finding(self, diagnosis: Diagnosis, pids: Mapping[int, int]) -> Finding:
        stacks = {rank: self._stack(rank) for rank in diagnosis.views}
        for rank, pid in pids.items():
            stacks[rank] = stacks[rank] or stack_by_py_spy(pid)
        on_device = any(
            call.on_device for view in diagnosis.views.values() if view.record for call in view.record.calls
        )
        known = nccl.evidence(self.directory, {pid: rank for rank, pid in pids.items()}, on_device=on_device)
        if diagnosis.kind == "stuck" and known.ranks:
            diagnosis = replace(diagnosis, kind="silent", culprits=known.ranks)
        message = [report.headline(diagnosis, self.host, self._hosts), *known.lines]
        if diagnosis.mismatch is None:
            message += [*report.lines(diagnosis), *report.stack_excerpts(diagnosis, stacks)]
        document = {"time": round(time.time(), 3), **report.as_json(diagnosis, self.host, self._hosts, stacks)}
        document |= known.facts
        return Finding(diagnosis, "\n".join(message), document)

    def _answered(self, view: RankView) -> bool:
        """Returns whether a rank has written its stacks, and its flight recorder if its interpreter runs."""
        flown = view.ticks_s > report.GIL_SILENT_S or (self.directory / nccl.flight_name(view.rank)).exists()
        return bool(self._stack(view.rank)) and flown

    def _stack(self, rank: int) -> str:
        try:
            return (self.directory / heartbeat.stacks_name(rank)).read_text(encoding="utf-8", errors="replace")
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


_NODE_POLL_S = 0.2
_FIRST_RANK_S = 60.0  # for the first rank to write its heartbeat
_LAST_WORDS_S = 5.0  # for the others to notice that a rank is gone, before its end is explained
_KILLED_TOGETHER = "killed together, as some mpiexec do when one rank dies; their launcher or the kernel says why"


@dataclass(frozen=True)
class NodeWatch:
    """The orders of a node's watchdog, which it reads from a file in the folder of heartbeats."""

    hosts: tuple[str, ...]  # the host of every rank
    limits: Limits
    reports: str
    metrics: str  # metrics.jsonl; empty for none

    FILE: ClassVar[str] = "watch.json"

    def write(self, directory: Path) -> None:
        (directory / self.FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def main(directory: Path) -> None:
    """Watches the ranks of a node, whose heartbeats are in the folder, until they have ended, and kills them if they
    hang. Removes the folder."""
    try:
        with owned(directory):
            _watch_node(directory, read_as(NodeWatch, read_json(directory / NodeWatch.FILE)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _watch_node(directory: Path, asked: NodeWatch) -> None:
    def say(line: str) -> None:
        echo(f"phalanx: {line}", file=sys.stderr, flush=True)

    reports, rows = Path(asked.reports), Path(asked.metrics) if asked.metrics else None
    watchdog = Watchdog(directory, asked.limits, say, rows, asked.hosts, reports)
    files: dict[Path, HeartbeatFile] = {}
    exits: dict[int, int] = {}  # 0 after the end of training, -1 otherwise, since only their parent knows more

    def running() -> dict[int, int]:
        for path in set(directory.glob(heartbeat.file_name("*"))) - files.keys():
            files[path] = HeartbeatFile(path)
        pids = {}
        for record in [file.read(0) for file in files.values()]:
            process = process_state(record.pid) if record.rank not in exits else None
            if process is not None and process.start_ticks == record.start_ticks and process.state != "Z":
                pids[record.rank] = record.pid
            else:
                exits.setdefault(record.rank, 0 if record.phase >= Phase.END else -1)
        return pids

    began, gone, explained = time.monotonic(), 0.0, False
    first: set[int] = set()  # ranks whose ends nobody explained, of the first look that found any
    pids: dict[int, int] | None = None
    while pids is None or pids or (not exits and time.monotonic() - began < _FIRST_RANK_S):
        time.sleep(_NODE_POLL_S)
        pids = running()
        if finding := watchdog.poll(pids, exits):
            say(finding.message)
            for pid in running().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            write(finding, reports, f"hang.{watchdog.host}")
            return
        if lost := {rank for rank, code in exits.items() if code == -1}:
            first, gone = first or lost, gone or time.monotonic()
            if not explained and (not pids or time.monotonic() - gone > _LAST_WORDS_S):
                explained = True
                # MPICH kills all ranks when one of them is killed: those that went later are no cause.
                words = watchdog.post_mortem({r: None if r in lost - first else c for r, c in exits.items()})
                if words:
                    together = len(first) > 1 and first == exits.keys()
                    say(f"All ranks on {watchdog.host} are gone at once: {_KILLED_TOGETHER}" if together else words)


def join(ranks: Ranks, hosts: Sequence[str], token: str, limits: Limits, reports: Path, metrics: Path | None) -> None:
    """Starts this rank's heartbeat; the first rank that comes on a node also starts the node's watchdog.

    All ranks call it, in their process group. `token` is this attempt's, the same on all ranks: the store may still
    know those of older attempts. The watchdog writes to `reports`; that of rank 0's node appends slow ranks to
    `metrics`. Raises RunError if the folder of the node's heartbeats is not private to this user."""
    import torch.distributed as dist  # the watchdog, a process of its own, imports no torch

    store = dist.distributed_c10d._get_default_store()
    key = f"phalanx/watchdog/{token}/{platform.node()}/{boot_id()}"
    leads = store.add(f"{key}/ranks", 1) == 1
    if leads:
        directory = new_folder()
        store.set(f"{key}/folder", str(directory))
    else:
        directory = Path(store.get(f"{key}/folder").decode())
        if not is_mine(directory):  # its name came over the network
            raise RunError(f"{directory}, where the ranks of this node should write their heartbeats, is not private")
    heartbeat.start(directory, ranks.rank, ranks.world)
    if leads:
        rows = str(metrics) if metrics and hosts[0] == platform.node() else ""
        NodeWatch(tuple(hosts), limits, str(reports), rows).write(directory)
        command = [sys.executable, "-P", "-m", "phalanx.launch.watchdog.watchdog", str(directory)]
        # Its own session: what ends this rank's process group does not end it. It ends after the node's ranks.
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


if __name__ == "__main__":
    # A step of Slurm signals every process in it. The ranks stop, and this process watches them to their end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(Path(sys.argv[1]))
