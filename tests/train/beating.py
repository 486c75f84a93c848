"""Runs with heartbeats on the ranks of a test's pool, and the views of them that a watchdog would have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.launch.ranks import Ranks
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.diagnosis import RankView
from phalanx.launch.watchdog.heartbeat import HeartbeatFile


def beating(ranks: Ranks, directory: Path, work: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `work(ranks, *arguments)` with a heartbeat in `directory`."""
    heartbeat.adopt(heartbeat.Heartbeat(directory, ranks.rank, ranks.world))
    try:
        return work(ranks, *arguments)
    finally:
        heartbeat.adopt(None)


def views(directory: Path) -> dict[int, RankView]:
    records = [HeartbeatFile(path).read() for path in directory.glob(heartbeat.file_name("*"))]
    return {record.rank: RankView(record.rank, record, 0.0) for record in records}
