"""What torch and NCCL know of a hang beside the heartbeats: torch's flight recorder of every rank on this machine, and
NCCL's RAS service.

Heartbeats see the collectives that the host starts. On GPUs those are queued, and FSDP2's are torch's own: the flight
recorder has all of them with how far the device came (PyTorch, "Flight Recorder for Debugging Stuck Jobs"; Gloo fills
it where TORCH_FR_BUFFER_SIZE is set). RAS, threads of NCCL that watch each other since 2.24, knows processes that died
or do not answer, on every machine (NCCL user guide, "RAS"); its JSON needs NCCL 2.28. Imports no torch, and unpickles
nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.bounded import parse_json, read_json

ASK = "flight.ask"
"""The file in the folder of heartbeats that asks every rank for its flight recorder."""
_MOST_BYTES = 64 * 2**20
_WORLD = "default_pg"  # torch's name of the group of all ranks
_NONE = ""  # the number of a group in which a rank has called nothing yet
_SAME_SIZE = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "_reduce_scatter_base", "_all_gather_base")
"""Operations to which every rank of a group brings equal sizes."""


def flight_name(rank: int) -> str:
    """Returns the name of the file to which a rank writes its flight recorder."""
    return f"rank_{rank}.flight.json"


def answer(directory: Path, rank: int) -> None:
    """Writes this process's flight recorder if it is asked for and not written yet. Called by the heartbeat's thread:
    it needs the interpreter, but not the thread that hangs."""
    path = directory / flight_name(rank)
    library = sys.modules.get("torch._C._distributed_c10d")
    if library is None or not (directory / ASK).exists() or path.exists():
        return
    dump = getattr(library, "_dump_nccl_trace_json", None) or getattr(library, "_dump_fr_trace_json", None)
    written = dump(includeCollectives=True, onlyActive=False) if dump is not None else b"{}"
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(written)
    unfinished.replace(path)


@dataclass(frozen=True)
class FlightRecord:
    """One rank's flight recorder. Groups and collectives go by the number of the group on that rank."""

    names: dict[str, str] = field(default_factory=dict)
    """The name of each group, the same on all its ranks; its number may differ between them."""
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)  # where the backend records them
    reached: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By group: the newest collective that the host has called, and that the device has begun (-1: not recorded)."""
    calls: dict[tuple[str, int], str] = field(default_factory=dict)
    """By group and number: operation and types, with sizes where all ranks bring equal ones."""


def read_flight(path: Path) -> FlightRecord | None:
    """Returns a rank's flight recorder; None if it has not answered, or answered something else."""
    try:
        return _flight(read_json(path, _MOST_BYTES))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _flight(document: dict[str, Any]) -> FlightRecord:
    found = FlightRecord()
    described = document.get("pg_config") or {}
    for entry in document.get("entries") or []:
        group = str(entry["pg_id"])
        name, about = (str(part) for part in entry["process_group"])
        known = "group" if about in ("", "undefined") else about
        found.names[group] = known if known == _WORLD else f"{known} ({name})"
        ranks = json.loads((described.get(name) or {}).get("ranks") or "[]")
        found.members[group] = tuple(int(rank) for rank in ranks)
        operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
        if not entry["is_p2p"]:
            words = [operation, *map(str, entry["input_dtypes"])]
            if operation in _SAME_SIZE:
                words += [" × ".join(str(int(n)) for n in size) or "scalar" for size in entry["input_sizes"]]
            found.calls[group, int(entry["collective_seq_id"])] = ", ".join(words)
    for group, status in (document.get("pg_status") or {}).items():
        found.reached[group] = int(status["last_enqueued_collective"]), int(status["last_started_collective"])
    return found


@dataclass(frozen=True)
class Evidence:
    """What was found: in words, the ranks that it names, and the facts for hang.json."""

    lines: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def compare(flights: Mapping[int, FlightRecord]) -> Evidence:
    """Returns what the flight recorders say: calls with one number in one group that differ, else ranks that have not
    called, or of which the device has not begun, what others of the group have. A rank that waits for others in one
    group is not to blame for its absence in another."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, str]] = defaultdict(dict)
    for rank, flight in flights.items():
        for group, name in flight.names.items():
            groups[name, flight.members.get(group, ())][rank] = group
    lines: list[str] = []
    late, waiting = set[int](), set[int]()
    for (name, members), numbers in groups.items():
        everyone = flights if name == _WORLD else members or numbers
        here = {rank: numbers.get(rank, _NONE) for rank in everyone if rank in flights}
        if found := _of_group(name, here, flights):
            line, its_late, its_waiting = found
            lines.append(f"Flight recorder: {line}")
            late |= its_late
            waiting |= its_waiting
    return Evidence(tuple(lines), tuple(sorted(late - waiting or late)))


def _of_group(
    name: str, numbers: Mapping[int, str], flights: Mapping[int, FlightRecord]
) -> tuple[str, set[int], set[int]] | None:
    """Returns what is wrong in one group, the ranks that are late or alone with their call, and those that wait."""
    by_number: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, group in numbers.items():
        for (its, number), words in flights[rank].calls.items():
            if its == group:
                by_number[number][words].append(rank)
    for number, ways in sorted(by_number.items()):
        if len(ways) > 1:
            rarest, *others = sorted(ways.items(), key=lambda way: len(way[1]))
            told = "; ".join(f"{_words(ranks)}: {words}" for words, ranks in (rarest, *others))
            return f"collective #{number} of {name} differs: {told}", set(rarest[1]), set()
    for what, place in (("has not called", 0), ("is with its device before", 1)):
        reached = {rank: flights[rank].reached.get(group, (0, 0))[place] for rank, group in numbers.items()}
        newest = max(reached.values(), default=0)
        late = [rank for rank, number in reached.items() if 0 <= number < newest]
        if late:
            others = [rank for rank in reached if rank not in late]
            call = "".join(f" ({words})" for words in by_number.get(newest, ()))
            told = f"{_words(late)} {what} collective #{newest} of {name}{call}, unlike {_words(others)}"
            return told, {*late}, {*others}
    return None


def _words(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


RAS_ADDRESS = ("localhost", 28028)
"""Where NCCL listens, unless NCCL_RAS_ADDR says HOST:PORT."""
_CONNECT_S, _ANSWER_S = 1.0, 12.0  # NCCL itself waits up to 10 s for processes that do not answer


def ask_ras(address: tuple[str, int] | None = None) -> Any:
    """Returns RAS's status of the job, the JSON document of `ncclras -f json`; None if nobody answers, or in another
    form."""
    if address is None:
        host, _, port = os.environ.get("NCCL_RAS_ADDR", "").rpartition(":")
        address = (host.strip("[]"), int(port)) if host and port.isdecimal() else RAS_ADDRESS
    ends = time.monotonic() + _ANSWER_S
    with suppress(OSError, ValueError), socket.create_connection(address, _CONNECT_S) as connection:
        reader = connection.makefile("rb")
        for order, expected in ((b"CLIENT PROTOCOL 2\n", b"SERVER PROTOCOL "), (b"SET FORMAT json\n", b"OK\n")):
            connection.sendall(order)
            if not reader.readline(4096).startswith(expected):
                return None
        connection.sendall(b"VERBOSE STATUS\n")
        answered = bytearray()
        while len(answered) <= _MOST_BYTES and (left := ends - time.monotonic()) > 0:
            connection.settimeout(left)
            part = reader.read1(65536)
            if not part:
                return parse_json(bytes(answered))
            answered += part
    return None


def judge_ras(document: Any, processes: Mapping[int, int]) -> Evidence:
    """Returns what a status of RAS says: processes that died or do not answer, and ranks that have begun fewer
    collectives of a kind than the others of their communicator. `processes` has the ranks of this machine by process
    id: others are named by host and process."""
    lines: dict[str, None] = {}
    ranks: set[int] = set()
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        for communicator in document["communicators"]:
            size = int(communicator["size"])
            for lost in communicator["missing_ranks"]:
                state = lost["status"]
                dead, silent = bool(state["considered_dead"]), bool(state["unresponsive"])
                if dead or silent:
                    told = "is dead" if dead else "does not answer"
                    lines[f"NCCL RAS: {_process(lost, processes, ranks)} {told}"] = None
            kinds: dict[str, dict[int, int]] = defaultdict(dict)
            members = communicator["ranks"]
            for place, member in enumerate(members):
                for kind, count in member["collective_counts"].items():
                    kinds[str(kind)][place] = int(count)
            for kind, counts in kinds.items():
                most = max(counts.values())
                for place, count in counts.items():
                    if count < most:
                        who = _process(members[place], processes, ranks)
                        told = f"has begun {count:,} × {kind}, others {most:,}, in a communicator of {size}"
                        lines[f"NCCL RAS: {who} {told}"] = None
    return Evidence(tuple(lines), tuple(sorted(ranks)))


def _process(entry: Mapping[str, Any], processes: Mapping[int, int], ranks: set[int]) -> str:
    pid, device = int(entry["pid"]), int(entry["cuda_dev"])
    rank = processes.get(pid)
    if rank is not None:
        ranks.add(rank)
        return f"rank {rank} (GPU {device})"
    return f"process {pid} on {entry['host']} (GPU {device})"


def evidence(directory: Path, processes: Mapping[int, int], *, on_device: bool) -> Evidence:
    """Returns all that torch and NCCL say. `processes`: the ranks of this machine by process id. RAS is asked where
    collectives run on devices."""
    answered = {rank: read_flight(directory / flight_name(rank)) for rank in processes.values()}
    flights = {rank: flight for rank, flight in answered.items() if flight is not None}
    recorded = compare(flights) if len(flights) > 1 else Evidence()
    document = ask_ras() if on_device else None
    ras = judge_ras(document, processes) if document is not None else Evidence()
    facts = {
        "flight_recorder": {str(rank): {flight.names[g]: at for g, at in flight.reached.items() if g in flight.names}
                            for rank, flight in flights.items()},
        "ras": document,
    }  # fmt: skip
    known = {name: value for name, value in facts.items() if value}
    return Evidence((*recorded.lines, *ras.lines), tuple(sorted({*recorded.ranks, *ras.ranks})), known)
