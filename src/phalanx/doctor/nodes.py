"""Compares the nodes of a run: who reaches whom, what each of them sees, and whether all run the same."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from phalanx.doctor import comparison
from phalanx.doctor.findings import CheckResult, within
from phalanx.doctor.machine import CheckedMachine
from phalanx.doctor.meeting import NodesMeeting
from phalanx.doctor.network import chosen
from phalanx.doctor.storage import nearest_folder
from phalanx.errors import PhalanxError, RunError
from phalanx.launch.environment import LOOPBACK
from phalanx.launch.nodes import addresses
from phalanx.launch.ranks import Ranks

MOST_PEERS = 32
"""Nodes to which each node connects: all of a small run, its successors in a large one."""
_CONNECT_S = 3.0
_GROUP_S = 30.0


@dataclass(frozen=True)
class NodeListener:
    """A socket on the interface that this node's ranks use, at which other nodes knock."""

    address: str
    port: int
    interface: str
    word: str
    """Its answer, which distinguishes it from another program at the same address."""


@contextmanager
def listener(machine: CheckedMachine, host: str) -> Iterator[NodeListener | None]:
    """Listens at the interface that gloo takes, or that leads to `host`, inside the `with` block. Yields None if no
    interface is known."""
    known = addresses.interfaces()
    name = chosen(machine, known)[0] or (addresses.interface_towards(host) if host else None)
    if name not in known:
        yield None
        return
    word = secrets.token_hex(8)
    with socket.create_server((known[name], 0), backlog=128) as server:

        def answer() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return  # closed: the meeting is over
                with peer, suppress(OSError):
                    peer.sendall(word.encode())

        threading.Thread(target=answer, name="phalanx-doctor-listener", daemon=True).start()
        yield NodeListener(known[name], server.getsockname()[1], name, word)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # or accept would wait on


def knock(address: str, port: int, word: str) -> str:
    """Returns why a listener is not reached; empty if it answers with its word."""
    try:
        with socket.create_connection((address, port), _CONNECT_S) as peer:
            peer.settimeout(_CONNECT_S)
            found = peer.recv(100).decode(errors="replace")
    except TimeoutError:
        return f"no answer within {_CONNECT_S:g} s: a firewall drops packets, or no route"
    except ConnectionRefusedError:
        return "refused, though it listens: a firewall rejects it, or another host has this address"
    except OSError as problem:
        return str(problem.strerror or problem)
    return "" if found == word else "another program answers there: two hosts have this address, or it is rewritten"


def compare(
    machine: CheckedMachine, meeting: NodesMeeting, ranks: Ranks, findings: Sequence[CheckResult]
) -> list[CheckResult] | None:
    """Exchanges `findings`, those of this process, with all others. Returns the lines of all and of the comparison on
    the leader; None on the others, after the leader has heard them."""
    with listener(machine, os.environ.get("MASTER_ADDR", "")) as own:
        mine = {
            "host": platform.node(),
            "leads": ranks.local_rank == 0,
            "findings": [finding.as_dict() for finding in findings],
            "listener": vars(own) if own else None,
        }
        meeting.tell("hello", mine)
        hellos = meeting.hear("hello", range(meeting.world)) if meeting.rank == 0 else {}
        leaders = {str(rank): hello["listener"] for rank, hello in hellos.items() if hello["leads"]}
        token = within(machine.seconds, lambda: _token(machine), "") if meeting.rank == 0 else ""
        agenda = meeting.agree("agenda", {"leaders": leaders, "token": token, "complete": len(hellos) == meeting.world})
        if agenda is None:
            return None
        if ranks.local_rank == 0:
            meeting.tell("seen", _look(agenda, meeting.rank))
        seen = meeting.hear("seen", map(int, leaders)) if meeting.rank == 0 else {}
        # Every node listens until the leader has heard from all that knock.
        go = meeting.agree("group", agenda["complete"] and _may_form(hellos, seen))
    if token:
        Path(token).unlink(missing_ok=True)
    formed = _group(machine, meeting, ranks) if go else None
    if formed is not None:
        meeting.tell("formed", formed)
    if meeting.rank:
        return None
    groups = meeting.hear("formed", range(meeting.world)) if go else None
    return comparison.lines(meeting.world, hellos, seen, groups, str(Path(token).parent) if token else "")


def _may_form(hellos: comparison.Told, seen: comparison.Told) -> bool:
    """Returns whether forming the group is worth while. It takes its whole timeout where two nodes do not reach each
    other, or gloo finds no interface."""
    findings = [finding for hello in hellos.values() for finding in hello["findings"]]
    broken = any((finding["group"], finding["status"]) == ("network", "ERROR") for finding in findings)
    return not broken and not any(each["unreached"] for each in seen.values())


def _token(machine: CheckedMachine) -> str:
    """Writes a file that all nodes should see, in the run directory or the first folder above it that exists. Returns
    its path; empty if that fails, which `storage` reports."""
    from phalanx.train.run_directory import RunDirectory
    from phalanx.train.shared import write_token

    folder = nearest_folder(machine.folder)
    try:
        return str(folder / write_token(RunDirectory(folder)))
    except RunError:
        return ""


def _look(agenda: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Returns which other nodes are not reached from here, with the reason, and whether the token is seen."""
    from phalanx.train.shared import VISIBLE_S, sees

    others = sorted(int(other) for other in agenda["leaders"] if int(other) != rank)
    later = [other for other in others if other > rank]
    peers = [*later, *(other for other in others if other < rank)][:MOST_PEERS]
    listeners = {peer: agenda["leaders"][str(peer)] for peer in peers}

    def reach(peer: int) -> str:
        found = listeners[peer]
        return knock(found["address"], found["port"], found["word"]) if found else ""

    with ThreadPoolExecutor(MOST_PEERS) as threads:
        answers = dict(zip(peers, threads.map(reach, peers), strict=True))
    token = agenda["token"]
    return {
        "unreached": [[peer, why] for peer, why in answers.items() if why],
        "peers": len(peers),
        "sees": not token or within(2 * VISIBLE_S, lambda: sees(Path(token), time.monotonic() + VISIBLE_S), False),
    }


def _group(machine: CheckedMachine, meeting: NodesMeeting, ranks: Ranks) -> dict[str, Any]:
    """Joins the process group as a run does, and returns the differences between ranks, or why it was not formed."""
    import torch
    import torch.distributed as dist

    from phalanx.comm import blocking
    from phalanx.comm.agree import clock_skew, disagreements
    from phalanx.train.agreement import MAX_CLOCK_SKEW_S, MAY_DIFFER_WITH_WARNING, job_facts, program_facts
    from phalanx.train.device import threads_for

    if ranks.one_node:
        os.environ.update(LOOPBACK)
    began = time.monotonic()
    try:
        limit = timedelta(seconds=max(_GROUP_S, meeting.seconds))
        dist.init_process_group("gloo", store=meeting.store, rank=meeting.rank, world_size=meeting.world, timeout=limit)
        took = time.monotonic() - began
        blocking.all_reduce(torch.zeros(1))
        began = time.monotonic()
        blocking.all_reduce(torch.zeros(1))
        latency = time.monotonic() - began
        torch.set_num_threads(threads_for(machine.job.run.threads, machine.local_ranks))
        facts = program_facts(torch.device("cpu")) | (job_facts(machine.job) if machine.has_job else {})
        differing = disagreements({"job given": machine.has_job, **facts})
        skew = clock_skew(MAX_CLOCK_SKEW_S)
        dist.destroy_process_group()
    except (RuntimeError, PhalanxError) as problem:
        return {"problem": (str(problem).splitlines() or [type(problem).__name__])[0][:500]}
    return {
        "took": took,
        "latency": latency,
        "facts": sorted(facts),
        "differs": [[each.name, each.text, each.name in MAY_DIFFER_WITH_WARNING] for each in differing],
        "skew": skew,
        "limit_s": MAX_CLOCK_SKEW_S,
    }
