"""The state of every rank of a node, as its watchdog writes it once a second beside the logs of the attempt:
logs/attempt_k/ranks-HOST.json. The live view reads it, on this node and on any other that sees the directory."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.bounded import field as field_of
from phalanx.bounded import read_json

PATTERN = "ranks-*.json"
MOST_RANKS = 100_000
_MOST_BYTES = 2**24
_STALE_S = 10.0
_SILENT_S = 10.0
"""Seconds without a sign of life after which a rank counts as silent."""


@dataclass(frozen=True)
class RankState:
    """The phase and figures of one rank."""

    rank: int
    phase: str
    step: int
    """Steps done."""
    silent_s: float
    """Seconds since its last sign of life."""
    memory: int = 0
    """Peak bytes so far; 0: not known."""
    memory_limit: int = 0
    """Bytes that it can have; 0: not known."""
    host: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether it has given no sign of life for some time; one that is done need not give any."""
        return self.silent_s > _SILENT_S and self.phase != "done"


def file_name(host: str) -> str:
    """Returns the name of a node's file."""
    return f"ranks-{re.sub(r'[^A-Za-z0-9._-]', '_', host)[:100]}.json"


def write(folder: Path, host: str, ranks: Sequence[RankState], messages: Sequence[tuple[float, str]]) -> None:
    """Replaces a node's file. It is not worth waiting for the disk: the next one comes in a second. Raises OSError."""
    document = {"time": time.time(), "host": host, "ranks": [asdict(rank) for rank in ranks], "messages": messages}
    path = folder / file_name(host)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document), encoding="utf-8")
    os.replace(temporary, path)


@dataclass(frozen=True)
class NodeStates:
    """The ranks of all nodes of the newest attempt."""

    ranks: tuple[RankState, ...] = ()
    messages: tuple[tuple[float, str], ...] = ()
    """Time and text of what the watchdogs said, oldest first."""


def read_nodes(logs: Path) -> NodeStates:
    """Returns the states of the newest attempt's ranks, in order. Files that cannot be read are left out."""
    ranks: dict[int, RankState] = {}
    messages: list[tuple[float, str]] = []
    numbers = []
    with suppress(OSError):
        numbers = [int(m[1]) for name in os.listdir(logs) if (m := re.fullmatch(r"attempt_(\d{1,6})", name))]
    folder = logs / f"attempt_{max(numbers)}" if numbers else None
    for path in sorted(folder.glob(PATTERN)) if folder else ():
        with suppress(OSError, ValueError):
            document = read_json(path, _MOST_BYTES)
            late = max(0.0, time.time() - field_of(document, "time", float))
            for entry in field_of(document, "ranks", list)[:MOST_RANKS]:
                state = _state(entry, field_of(document, "host", str), late if late > _STALE_S else 0.0)
                ranks[state.rank] = state
            messages += [_message(entry) for entry in field_of(document, "messages", list)]
    return NodeStates(tuple(ranks[rank] for rank in sorted(ranks)), tuple(sorted(messages)))


def _state(entry: Any, host: str, late: float) -> RankState:
    whole = {name: field_of(entry, name, int) for name in ("rank", "step", "memory", "memory_limit")}
    if min(whole.values()) < 0:
        raise ValueError("a negative number")
    silent = field_of(entry, "silent_s", float) + late
    return RankState(phase=field_of(entry, "phase", str), silent_s=silent, host=host, **whole)


def _message(entry: Any) -> tuple[float, str]:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], int | float):
        raise ValueError("no message")
    return float(entry[0]), str(entry[1])
