"""The watchdog of one node, a process of its own: for ranks that torchrun, srun or mpiexec started.

    python -m phalanx.launch.watchdog.node HEARTBEATS REPORTS HANG_S START_S METRICS [follows]

It watches the ranks whose heartbeats are in the folder, prints and writes what it finds, and kills them when they hang.
It ends when they have ended, and removes the folder. It imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.echo import echo
from phalanx.launch.watchdog import layout as at
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.folder import owned
from phalanx.launch.watchdog.layout import Phase
from phalanx.launch.watchdog.processes import process_state
from phalanx.launch.watchdog.reader import HeartbeatFile, RankRecord
from phalanx.launch.watchdog.watchdog import Watchdog, write

HOSTS = "hosts.json"
"""The file in the folder of heartbeats with the host of every rank."""

_POLL_S = 0.2
_FIRST_RANK_S = 60.0  # for the first rank to write its heartbeat
_LAST_WORDS_S = 5.0  # for the others to notice that a rank is gone, before its end is explained


class NodeRanks:
    """The ranks whose heartbeats are in one folder."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[Path, HeartbeatFile] = {}
        self.exits: dict[int, int] = {}
        """Ended ranks: 0 after the end of training, -1 otherwise, since only their parent knows more."""

    def running(self) -> dict[int, int]:
        """Returns the process ids of running ranks, and notes those that have ended since the last call."""
        for path in set(self._directory.glob(at.file_name("*"))) - self._files.keys():
            self._files[path] = HeartbeatFile(path)
        pids = {}
        for record in [file.read(0) for file in self._files.values()]:
            if record.rank in self.exits:
                continue
            if _runs(record):
                pids[record.rank] = record.pid
            else:
                self.exits[record.rank] = 0 if record.phase >= Phase.END else -1
        return pids

    def kill(self) -> None:
        """Kills the ranks that still run."""
        for pid in self.running().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def watch(watchdog: Watchdog, reports: Path) -> None:
    """Watches the ranks of a node until they have ended, and kills them if they hang."""
    ranks, began, gone = NodeRanks(watchdog.directory), time.monotonic(), None
    explained = False
    while True:
        time.sleep(_POLL_S)
        pids = ranks.running()
        if finding := watchdog.poll(pids, ranks.exits):
            _say(finding.message)
            ranks.kill()
            write(finding, reports, f"hang.{watchdog.host}")
            return
        if gone is None and -1 in ranks.exits.values():
            gone = time.monotonic()
        if gone and not explained and (not pids or time.monotonic() - gone > _LAST_WORDS_S):
            explained = True
            if words := watchdog.post_mortem(ranks.exits):
                _say(words)
        if not pids and (ranks.exits or time.monotonic() - began > _FIRST_RANK_S):
            return


def _runs(record: RankRecord) -> bool:
    process = process_state(record.pid)
    return process is not None and process.start_ticks == record.start_ticks and process.state != "Z"


def _say(line: str) -> None:
    echo(f"phalanx: {line}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
    """Runs the watchdog of one node; the module's text names its arguments."""
    folder, reports, hang_s, start_s, metrics = argv[:5]
    directory = Path(folder)
    try:
        hosts = json.loads((directory / HOSTS).read_text(encoding="utf-8"))
        limits = Limits(float(hang_s), float(start_s), follows="follows" in argv[5:])
        with owned(directory):
            rows, states = Path(metrics) if metrics else None, Path(reports)
            watch(Watchdog(directory, limits, _say, rows, hosts, states), states)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    # A step of Slurm signals every process in it. The ranks stop, and this process watches them to their end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(sys.argv[1:])
