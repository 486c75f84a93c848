"""Processes, ports and files that a run of the bench leaves behind. Linux only: everything is read from /proc."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "PHALANX_CHAOS"
"""Environment variable that all processes of a run inherit; its value is unique to the run."""
_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


@dataclass(frozen=True)
class Process:
    """A living process."""

    pid: int
    parent: int
    command: str
    rank: int | None
    """The RANK of its environment."""


def marked(mark: str) -> list[Process]:
    """Returns the living processes with `mark` in their environment, zombies excepted."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, IndexError, ValueError):  # it ended meanwhile, or belongs to somebody else
            variables = (folder / "environ").read_bytes().split(b"\0")
            if wanted not in variables:
                continue
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            rank = next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), None)
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if after_name[0] not in "ZX":
                found.append(Process(int(folder.name), int(after_name[1]), command, rank))
    return found


def rank_pids(mark: str) -> dict[int, int]:
    """Returns the process id of every rank: of the processes with its RANK, the one that another process started."""
    by_pid = {process.pid: process for process in marked(mark)}
    found: dict[int, int] = {}
    for process in sorted(by_pid.values(), key=lambda process: process.pid):
        parent = by_pid.get(process.parent)
        if process.rank is not None and (parent is None or parent.rank != process.rank):
            found.setdefault(process.rank, process.pid)
    return found


def wait_gone(mark: str, seconds: float) -> tuple[list[Process], float]:
    """Waits until no process with `mark` is left, at most `seconds`; returns those left, and the seconds waited."""
    began = time.monotonic()
    while (left := marked(mark)) and time.monotonic() - began < seconds:
        time.sleep(0.1)
    return left, time.monotonic() - began


def kill(mark: str) -> None:
    """Kills all processes with `mark`; those that they started meanwhile, too."""
    for _ in range(20):
        left = marked(mark)
        if not left:
            return
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.1)


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Returns the addresses (in hexadecimal, as the kernel shows them) and ports on which `pids` accept connections."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            targets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
            for table in ("tcp", "tcp6"):  # of the process's own network namespace
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in targets:
                        address, port = fields[1].split(":")
                        found.add((address, int(port, 16)))
    return found


def is_loopback(address: str) -> bool:
    """Returns whether a hexadecimal address of `listening` is 127.0.0.0/8, ::1 or an IPv4 loopback inside IPv6."""
    if len(address) == 8:
        return address.endswith("7F")
    return address in ("0" * 24 + "01000000",) or (address.startswith("0" * 16 + "FFFF0000") and address.endswith("7F"))
