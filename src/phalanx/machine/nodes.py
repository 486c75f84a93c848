"""Compares the nodes of a run: who reaches whom, what each of them sees, and whether all run the same.

A group forms only if every pair of ranks reaches each other. So the nodes first meet in the store of rank 0, and say
there what they have found, as short JSON texts: then rank 0 can name the pair that does not.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed.*, to the type stubs

from phalanx.bounded import parse_json
from phalanx.config.values import read_as
from phalanx.echo import echo
from phalanx.errors import PhalanxError, RunError
from phalanx.launch.hosts import interface_towards, interfaces, is_this_machine
from phalanx.launch.meeting import Meeting, await_listener, key, poll
from phalanx.launch.ranks import LOOPBACK, Ranks, threads_for
from phalanx.machine.checks import CheckedMachine, CheckResult, error, ok, warn, within
from phalanx.machine.network import chosen
from phalanx.machine.storage import nearest_folder
from phalanx.units import counted, seconds


@dataclass(frozen=True)
class NodeListener:
    """A socket on the interface that this node's ranks use, at which other nodes knock."""

    address: str
    port: int
    interface: str
    word: str
    """Its answer, which distinguishes it from another program at the same address."""


@dataclass(frozen=True)
class Hello:
    """The first message of a process."""

    host: str
    leads: bool
    """Whether it is the first of its node."""
    findings: tuple[Any, ...]
    """Its own lines, as CheckResult.from_dict takes them."""
    listener: NodeListener | None


@dataclass(frozen=True)
class Agenda:
    """The leader's answer to it."""

    leaders: Mapping[str, NodeListener | None]
    """The listener of each node, by its first rank."""
    token: str
    """A file that all nodes should see."""
    complete: bool
    """Whether all processes have come."""


@dataclass(frozen=True)
class SeenNodes:
    """The other nodes as the first process of a node sees them."""

    unreached: tuple[tuple[int, str], ...]
    """The first ranks of nodes that it does not reach, and why."""
    peers: int
    """The nodes that it has tried."""
    sees: bool
    """Whether it sees the token."""


@dataclass(frozen=True)
class Go:
    """Whether the processes form a group."""

    yes: bool


@dataclass(frozen=True)
class Formed:
    """What a process finds in the process group."""

    problem: str = ""
    """Why it was not formed."""
    took: float = 0.0
    latency: float = 0.0
    """Seconds of forming it, and of an all-reduce."""
    facts: tuple[str, ...] = ()
    """The names of what was compared."""
    differs: tuple[tuple[str, str, bool], ...] = ()
    """The names of what differs, with a sentence, and whether only rounding differs then."""
    skew: str = ""
    """A sentence about clocks that differ by more than `limit_s`."""
    limit_s: float = 0.0


Message = TypeVar("Message")
_PARTING_S = 5.0


class NodesMeeting:
    """One process's part in a store that all share, as number `rank` of `world`; number 0 leads. It waits `seconds` for
    what others say."""

    def __init__(self, store: Store, rank: int, world: int, seconds: float):
        self.store, self.rank, self.world, self.seconds = store, rank, world, seconds

    def tell(self, topic: str, value: Any) -> None:
        """Tells the leader something about this process."""
        self.store.set(_key(topic, self.rank), json.dumps(asdict(value)))

    def hear(self, topic: str, ranks: Iterable[int], kind: type[Message]) -> dict[int, Message]:
        """Returns what each of `ranks` has told; those that say nothing in time, or something else, are missing."""
        end, found = time.monotonic() + self.seconds, {}
        for rank in ranks:
            with suppress(RuntimeError, ValueError):
                self.store.wait([_key(topic, rank)], timedelta(seconds=max(0.1, end - time.monotonic())))
                found[rank] = read_as(kind, parse_json(self.store.get(_key(topic, rank))))
        return found

    def agree(self, topic: str, value: Message) -> Message | None:
        """Returns the leader's value on every process; None if the leader does not say it in time. The others give any
        of its kind."""
        if self.rank == 0:
            self.tell(topic, value)
            return value
        # The leader waits for the slowest process first.
        patient = NodesMeeting(self.store, self.rank, self.world, 2 * self.seconds)
        return patient.hear(topic, [0], type(value)).get(0)

    def part(self) -> None:
        """Ends the meeting: the leader, which may hold the store, leaves last."""
        with suppress(RuntimeError):
            if self.rank:
                self.store.add(_key("parted", 0), 1)
                return
            poll(lambda: self.store.add(_key("parted", 0), 0) >= self.world - 1, _PARTING_S)


def _key(topic: str, rank: int) -> str:
    return key("doctor", topic, rank)


_SHOWN = 6
_LOG = "look at its log: it ended, or hangs"
_NETWORK = (
    "open all TCP ports between the nodes, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to a network that all share"
)
_SAME = "give every node the same installation, job and settings"


def lines(
    world: int,
    hellos: Mapping[int, Hello],
    seen: Mapping[int, SeenNodes],
    groups: Mapping[int, Formed] | None,
    folder: str,
) -> list[CheckResult]:
    """Returns the lines of all nodes, and those about their differences, from what each rank has said, what the first
    rank of each node has seen, and what each found in the group, None if none was tried. `folder` is that of the token;
    empty if there is none."""
    labels = labels_of(hellos)
    everywhere = tuple(dict.fromkeys(labels.values()))
    compared = [*_nodes(world, hellos, seen, labels, folder), *_group_of_all(groups, labels, world)]
    told = [finding for rank, hello in sorted(hellos.items()) for finding in _findings(hello, labels[rank])]
    return [*told, *(replace(line, group="nodes", hosts=line.hosts or everywhere) for line in compared)]


def labels_of(hellos: Mapping[int, Hello]) -> dict[int, str]:
    """Returns a name of each rank's node: its host name, with the node's first rank where several share a name."""
    hosts = [hello.host for hello in hellos.values() if hello.leads]
    found: dict[int, str] = {}
    latest: dict[str, str] = {}
    for rank, hello in sorted(hellos.items()):
        host = hello.host
        if hello.leads or host not in latest:
            latest[host] = host if hosts.count(host) < 2 else f"{host}/rank {rank}"
        found[rank] = latest[host]
    return found


def _line(check: str, finding: CheckResult, hosts: Sequence[str] = ()) -> CheckResult:
    return replace(finding, check=check, hosts=tuple(hosts))


def _findings(hello: Hello, label: str) -> list[CheckResult]:
    try:
        return [replace(CheckResult.from_dict(each), hosts=(label,)) for each in hello.findings]
    except ValueError as problem:
        return [CheckResult("nodes", "report", "ERROR", f"a report is not understood: {problem}", _SAME, (label,))]


def _nodes(
    world: int, hellos: Mapping[int, Hello], seen: Mapping[int, SeenNodes], labels: Mapping[int, str], folder: str
) -> Iterator[CheckResult]:
    """Yields who did not report, the interface of every node, which nodes do not reach which, and whether all see the
    folder."""
    if missing := [rank for rank in range(world) if rank not in hellos]:
        yield _line("ranks", error(f"rank {_some(map(str, missing))} of {world} did not report", _LOG))
    leaders = [rank for rank, hello in sorted(hellos.items()) if hello.leads]
    used = {labels[rank]: hellos[rank].listener for rank in leaders}
    if silent := [label for label, at in used.items() if at is None]:
        remedy = "set GLOO_SOCKET_IFNAME to the interface that leads to the other nodes"
        yield _line("interfaces", warn("it cannot be told which interface gloo takes", remedy), silent)
    shown = [f"{label} {at.interface} ({at.address})" for label, at in used.items() if at]
    if len(used) > 1 and shown:
        yield _line("interfaces", ok(_some(shown)))
    if quiet := [labels[rank] for rank in leaders if rank not in seen]:
        yield _line("reachability", error("did not finish", _LOG), quiet)
    unreached = [(rank, peer, why) for rank, each in sorted(seen.items()) for peer, why in each.unreached]
    for rank, peer, why in unreached[:_SHOWN]:
        at = hellos[peer].listener
        where = f" at {at.address} ({at.interface})" if at else ""
        text = f"{labels[rank]} does not reach {labels[peer]}{where}: {why}"
        yield _line("reachability", error(text, _NETWORK), (labels[rank], labels[peer]))
    if len(unreached) > _SHOWN:
        yield _line("reachability", error(f"and {counted(len(unreached) - _SHOWN, 'more pair')}", _NETWORK))
    if not unreached and not quiet and len(leaders) > 1:
        connections = counted(sum(each.peers for each in seen.values()), "connection")
        yield _line("reachability", ok(f"{connections} between {len(leaders)} nodes"))
    if folder and len(seen) > 1:
        if blind := [labels[rank] for rank, each in sorted(seen.items()) if not each.sees]:
            remedy = "set run.dir to a folder on a file system that every node mounts"
            yield _line("run directory", error(f"{folder} is not the folder that rank 0 sees", remedy), blind)
        else:
            yield _line("run directory", ok(f"{folder} is seen by {len(seen)} nodes"))


def _some(words: Iterable[str]) -> str:
    first = [*words]
    return ", ".join(first[:_SHOWN]) + (", …" if len(first) > _SHOWN else "")


def _group_of_all(groups: Mapping[int, Formed] | None, labels: Mapping[int, str], world: int) -> Iterator[CheckResult]:
    """Yields whether gloo formed a group, and the facts in which its ranks differ."""
    if groups is None:
        yield _line(
            "process group", error("not tried: the nodes do not reach each other yet", "repair the other errors first")
        )
        return
    failed = {rank: each.problem for rank, each in groups.items() if each.problem}
    if failed or len(groups) < world:
        # The ranks that waited for the one that failed first say only that.
        by_worth = sorted(failed.items(), key=lambda item: ("timeout" in item[1], item[0]))
        why = next((f"rank {rank} on {labels[rank]}: {text}" for rank, text in by_worth), "some ranks are silent")
        yield _line("process group", error(f"gloo could not form it: {why}", _NETWORK))
        return
    took, latency = (max(getattr(each, name) for each in groups.values()) for name in ("took", "latency"))
    text = f"gloo formed it, {world} ranks, in {seconds(took)}; an all-reduce takes {1000 * latency:.1f}ms"
    yield _line("process group", ok(text))
    first = groups[0]
    for _, text, only_rounding in first.differs:
        if only_rounding:
            yield _line("same program", warn(f"{text}: rounding differs", "use nodes of one kind"))
        else:
            yield _line("same program", error(text, _SAME))
    if not first.differs:
        yield _line("same program", ok(f"{len(first.facts)} facts agree: versions, source files, settings, job"))
    if first.skew:
        yield _line("clocks", warn(first.skew, "set the clocks by NTP (chronyc tracking)"))
    else:
        yield _line("clocks", ok(f"no two clocks differ by more than {first.limit_s:g} s"))


MOST_PEERS = 32
"""Nodes to which each node connects: all of a small run, its successors in a large one."""
_CONNECT_S = 3.0
_GROUP_S = 30.0


@contextmanager
def listener(machine: CheckedMachine, host: str) -> Iterator[NodeListener | None]:
    """Listens at the interface that gloo takes, or that leads to `host`, inside the `with` block. Yields None if no
    interface is known."""
    known = interfaces()
    name = chosen(machine, known)[0] or (interface_towards(host) if host else None)
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
        told = tuple(finding.as_dict() for finding in findings)
        meeting.tell("hello", Hello(platform.node(), ranks.local_rank == 0, told, own))
        hellos = meeting.hear("hello", range(meeting.world), Hello) if meeting.rank == 0 else {}
        leaders = {str(rank): hello.listener for rank, hello in hellos.items() if hello.leads}
        token = within(machine.seconds, lambda: _token(machine), "") if meeting.rank == 0 else ""
        agenda = meeting.agree("agenda", Agenda(leaders, token, len(hellos) == meeting.world))
        if agenda is None:
            return None
        if ranks.local_rank == 0:
            meeting.tell("seen", _look(agenda, meeting.rank))
        seen = meeting.hear("seen", map(int, leaders), SeenNodes) if meeting.rank == 0 else {}
        # Forming the group takes its whole timeout where two nodes do not reach each other, or gloo finds no interface.
        heard = [line for hello in hellos.values() for line in _findings(hello, hello.host)]
        broken = any((line.group, line.status) == ("network", "ERROR") for line in heard)
        may = agenda.complete and not broken and not any(each.unreached for each in seen.values())
        # Every node listens until the leader has heard from all that knock.
        go = meeting.agree("group", Go(may))
    if token:
        Path(token).unlink(missing_ok=True)
    goes = go is not None and go.yes
    formed = _group(machine, meeting, ranks) if goes else None
    if formed is not None:
        meeting.tell("formed", formed)
    if meeting.rank:
        return None
    groups = meeting.hear("formed", range(meeting.world), Formed) if goes else None
    return lines(meeting.world, hellos, seen, groups, str(Path(token).parent) if token else "")


def _token(machine: CheckedMachine) -> str:
    """Writes a file that all nodes should see, in the run directory or the first folder above it that exists. Returns
    its path; empty if that fails, which `storage` reports."""
    from phalanx.train.agreement import write_token
    from phalanx.train.run_directory import RunDirectory

    folder = nearest_folder(machine.folder)
    try:
        return str(folder / write_token(RunDirectory(folder)))
    except RunError:
        return ""


def _look(agenda: Agenda, rank: int) -> SeenNodes:
    """Returns which other nodes are not reached from here, with the reason, and whether the token is seen."""
    from phalanx.train.agreement import VISIBLE_S, sees

    others = sorted(int(other) for other in agenda.leaders if int(other) != rank)
    later = [other for other in others if other > rank]
    peers = [*later, *(other for other in others if other < rank)][:MOST_PEERS]
    listeners = {peer: agenda.leaders[str(peer)] for peer in peers}

    def reach(peer: int) -> str:
        found = listeners[peer]
        return knock(found.address, found.port, found.word) if found else ""

    with ThreadPoolExecutor(MOST_PEERS) as threads:
        answers = dict(zip(peers, threads.map(reach, peers), strict=True))
    token = agenda.token
    return SeenNodes(
        tuple((peer, why) for peer, why in answers.items() if why),
        len(peers),
        not token or within(2 * VISIBLE_S, lambda: sees(Path(token), time.monotonic() + VISIBLE_S), False),
    )


def _group(machine: CheckedMachine, meeting: NodesMeeting, ranks: Ranks) -> Formed:
    """Joins the process group as a run does, and returns the differences between ranks, or why it was not formed."""
    import torch
    import torch.distributed as dist

    from phalanx.comm import blocking
    from phalanx.comm.agree import clock_skew, disagreements
    from phalanx.train.agreement import MAX_CLOCK_SKEW_S, MAY_DIFFER_WITH_WARNING, job_facts, program_facts

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
        return Formed((str(problem).splitlines() or [type(problem).__name__])[0][:500] or "no message")
    differs = tuple((each.name, each.text, each.name in MAY_DIFFER_WITH_WARNING) for each in differing)
    return Formed("", took, latency, tuple(sorted(facts)), differs, skew, MAX_CLOCK_SKEW_S)


PATIENCE = 6
"""Factor on the seconds of a check: processes start, and import torch, at different times."""
Compared = tuple[list[CheckResult], int]
"""The lines of all nodes, and the number of processes that took part."""


def by_launcher(machine: CheckedMachine, ranks: Ranks, findings: Sequence[CheckResult]) -> Compared | None:
    """Compares the processes that a launcher started. Returns all lines on rank 0, and None on the others. Raises
    PhalanxError or RuntimeError if they cannot meet."""
    meeting, wait = Meeting(ranks), machine.seconds * PATIENCE
    ranks = meeting.join(wait)
    return _meet(machine, meeting.store, ranks, wait, findings)


def by_endpoint(machine: CheckedMachine, findings: Sequence[CheckResult]) -> Compared | None:
    """Compares the nodes of `run.nnodes`, of which each has started this command, as `by_launcher` does."""
    run, wait = machine.job.run, machine.seconds * PATIENCE
    host, port = run.endpoint
    leads = is_this_machine(host)
    echo(f"doctor: waiting up to {wait:g} s for {run.nnodes} nodes at {host}:{port}", file=sys.stderr)
    began = time.monotonic()
    if not leads and (problem := await_listener(host, port, wait)):
        waited = time.monotonic() - began
        raise RunError(f"nobody answers at {host}:{port} after {waited:.0f} s: {problem.strerror or problem}")
    store = TCPStore(host, port, None, leads, timedelta(seconds=wait), wait_for_workers=False, multi_tenant=True)
    number, world = _numbered(store, leads, run.most_nodes, wait)
    if interface := interface_towards(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if world < run.least_nodes or world == 1:
        raise RunError(f"{counted(world, 'node')} of {run.nnodes} came to {host}:{port} within {wait:g} s")
    # Every node counts as one process, whatever ranks it will have.
    return _meet(machine, store, Ranks(number, world, 0, 1, number, "phalanx"), wait, findings)


def _meet(
    machine: CheckedMachine, store: Store, ranks: Ranks, wait: float, findings: Sequence[CheckResult]
) -> Compared | None:
    meeting = NodesMeeting(store, ranks.rank, ranks.world, wait / 2)  # all are there already
    found = compare(machine, meeting, ranks, findings)
    meeting.part()
    return None if found is None else (found, ranks.world)


def _numbered(store: Store, leads: bool, most: int, wait: float) -> tuple[int, int]:
    """Returns this node's number, 0 for the one that holds the store, and how many came in time."""
    if not leads:
        number = store.add("phalanx-doctor/nodes", 1)
        store.wait(["phalanx-doctor/world"], timedelta(seconds=2 * wait))
        return number, int(store.get("phalanx-doctor/world"))
    poll(lambda: store.add("phalanx-doctor/nodes", 0) >= most - 1, wait)
    world = min(most, 1 + store.add("phalanx-doctor/nodes", 0))
    store.set("phalanx-doctor/world", str(world))
    return 0, world
