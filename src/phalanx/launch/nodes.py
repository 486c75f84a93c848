"""A run on several nodes, each with a launcher of its own: who takes part in which round, and how they hear of it.

A round begins when enough nodes wait for one, and ends when one of its nodes is lost or fails, or when another node
could join. Then the nodes that are there begin the next. The host is a node, too, and always the first: without it
there is no round, so that two halves of a cut network can never both go on. (`Membership` decides that, without sockets
and processes.)

A node and the host exchange lines of JSON, several times a second. Every value is checked, and nothing that arrives is
executed: torch's own rendezvous would unpickle it, and its store does not tell who has gone. A node whose launcher ends
is noticed at once, because its connection ends; one whose network is cut after the silence that both sides allow.
"""

from __future__ import annotations

import hmac
import json
import os
import platform
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.bounded import parse_json
from phalanx.config.values import read_as
from phalanx.data.files import open_regular
from phalanx.errors import PhalanxError, RunError
from phalanx.launch import logs
from phalanx.launch.hosts import free_port, interface_towards, is_this_machine
from phalanx.launch.logs import next_attempt
from phalanx.launch.peers import QuietServer

MOST_BYTES = 1 << 16
WORDS = ("run.nnodes", "layout", "layout.bucket_mb", "train.global_batch", "cluster.nodes", "cluster.devices_per_node")
"""Fields of the job that depend on the number of nodes: a host may set these and no others."""


@dataclass(frozen=True)
class NodeFailure:
    """The end of a round on a node whose ranks failed by themselves."""

    code: int  # exit code of the launch, if nothing follows
    message: str
    final: bool


@dataclass(frozen=True)
class NodeState:
    """The state of a node, which it sends to the host several times per second."""

    host: str
    processes: int
    round: int = 0
    """The newest round of this host that it has taken part in; 0 before the first."""
    waits: bool = True  # true while it has no ranks and waits for a round
    done: bool = False  # true once its ranks have ended well: it does not take part in another round
    failure: NodeFailure | None = None  # why its ranks failed in that round, if they did by themselves
    key: str = ""  # the key of the run, which is asked for when it joins
    memory: str = ""  # address of its memory for the state (peers.py); empty if the run keeps none


@dataclass(frozen=True)
class Round:
    """One attempt of all nodes together."""

    number: int  # from 1
    members: tuple[int, ...]
    """The slots of the nodes that take part, in the order of their ranks; the host is first. NOBODY is a place that no
    node has now, where replicas come and go."""
    reason: str  # why it began; empty for the first one
    address: str
    port: int
    generation: str  # generation of the run directory (launch/logs.py)
    attempt: str
    words: tuple[str, ...]
    """Words of the command line that adapt the job to the number of nodes, of the fields WORDS."""
    memory: tuple[str, ...] = ()
    """The members' addresses of `NodeState.memory`: each copies the state of the one before it."""


@dataclass(frozen=True)
class Ending:
    reason: str
    saves: bool = False
    """True if the ranks can stop with a checkpoint; otherwise they are killed."""
    code: int | None = None  # exit code of every node if no other round follows


@dataclass(frozen=True)
class Notice:
    slot: int  # the node's number at this host, from 0: the host itself
    round: Round | None = None
    ending: Ending | None = None
    refusal: str = ""


def encode(message: NodeState | Notice) -> bytes:
    return json.dumps(asdict(message)).encode() + b"\n"


def decode_state(line: bytes) -> NodeState:
    """Returns a node's state. Raises ValueError if it is none."""
    state = read_as(NodeState, parse_json(line))
    if state.processes < 1:
        raise ValueError("a node starts at least one rank")
    return state


def decode_notice(line: bytes) -> Notice:
    """Returns the host's answer. Raises ValueError if it is none."""
    notice = read_as(Notice, parse_json(line))
    if notice.round is not None:
        if any(word.partition("=")[0] not in WORDS for word in notice.round.words):
            raise ValueError("words that do not adapt a job to the number of nodes")
        if not re.fullmatch("attempt_[0-9]+", notice.round.attempt):
            raise ValueError("an attempt whose logs would lie elsewhere")
        if not all(re.fullmatch(r"[0-9.]{7,15}:[0-9]{1,5}", address) for address in notice.round.memory):
            raise ValueError("an address of no node's memory")
    return notice


FIRST_CALL_S = 30.0  # seconds for which the first round waits for more nodes than it needs
HOST, NOBODY = 0, -1


@dataclass(frozen=True)
class Terms:
    """The nodes that a run accepts, and how long it waits for them."""

    least: int  # nodes without which no round begins
    most: int
    processes: int
    patience_s: float  # seconds for which the nodes wait until there are enough of them


Plan = Callable[[int, tuple[int, ...], str], Round]
"""Prepares round `number` of the slots given, which begins for a reason. Raises PhalanxError."""


class Membership:
    """The nodes of a run, and their rounds. Several threads may use it."""

    def __init__(self, terms: Terms, plan: Plan, key: str = "", clock: Callable[[], float] = time.monotonic):
        self.terms, self.plan, self.key, self.clock = terms, plan, key, clock
        self.nodes: dict[int, NodeState] = {}
        self.round: Round | None = None
        self.ending: Ending | None = None
        self._slots = 0
        self._since = clock()
        self._changed = threading.Condition()

    def join(self, state: NodeState) -> Notice:
        """Adds a node, and returns its slot. The first one is the host."""
        refusal = ""
        if not hmac.compare_digest(state.key.encode(), self.key.encode()):
            refusal = (
                "this node does not see the key of the run that the host has written to its run directory: all nodes "
                "need the same run directory, on storage that they share"
            )
        elif state.processes != self.terms.processes:
            refusal = (
                f"this node would start {state.processes} ranks, and the host asks for {self.terms.processes}: give "
                "every node the same job and command"
            )
        if refusal:
            return Notice(-1, refusal=refusal)
        with self._changed:
            slot = self._slots
            self._slots += 1
            self.nodes[slot] = state
            return Notice(slot)

    def report(self, slot: int, state: NodeState) -> Notice:
        """Notes a node's state, and returns what it has to know."""
        with self._changed:
            if slot in self.nodes:
                self.nodes[slot] = state
            return Notice(slot, self.round, self.ending)

    def leave(self, slot: int, reason: str) -> None:
        """Removes a node. If its ranks are not done, the round ends: "node b is lost: REASON"."""
        with self._changed:
            state = self.nodes.pop(slot, None)
            self._changed.notify_all()
            if state and self.round and slot in self.round.members and not state.done:
                self._end(Ending(f"node {state.host} is lost: {reason}"))

    def finish(self, code: int, message: str, seconds: float) -> None:
        """Ends the run for all nodes, and waits until the others have left, for at most so many seconds."""
        with self._changed:
            if self.ending is None or self.ending.code is None:
                self.ending = Ending(message, code=code)
            self._changed.wait_for(lambda: self.nodes.keys() <= {HOST}, seconds)

    @property
    def is_over(self) -> bool:
        return self.ending is not None and self.ending.code is not None

    def tick(self) -> None:
        """Ends the round, or begins the next one, if it is time to."""
        with self._changed:
            if self.is_over:
                return
            if self.round is not None and self.ending is None:
                self._look_at(self.round)
                return
            members = self._next_members()
        if members:
            self._begin(members)

    def _look_at(self, current: Round) -> None:
        """Ends the round if one of its nodes has left it, or if others could join."""
        for slot in current.members:
            state = self.nodes.get(slot)
            if state is None or state.round < current.number:
                continue  # its end was noted, or it has not heard of the round yet
            if state.failure:
                code = state.failure.code if state.failure.final else None
                self._end(Ending(f"node {state.host}: {state.failure.message}", code=code))
            elif state.waits:
                self._end(Ending(f"the ranks of node {state.host} lost their peers"))
        others = [state for slot, state in self.nodes.items() if state.waits and slot not in current.members]
        settled = all(not self.nodes[slot].waits for slot in current.members if slot in self.nodes)
        if others and settled and len(current.members) < self.terms.most:
            self._end(Ending(f"node {others[0].host} joins", saves=True))

    def _next_members(self) -> tuple[int, ...]:
        """Returns the nodes of the next round, once all nodes that are there wait for it and there are enough."""
        waiting = [slot for slot, state in sorted(self.nodes.items()) if state.waits]
        running = [state for state in self.nodes.values() if not (state.waits or state.done)]
        waited = self.clock() - self._since
        enough = len(waiting) >= self.terms.least and HOST in waiting and not running
        if enough and (len(waiting) >= self.terms.most or self.round is not None or waited >= FIRST_CALL_S):
            return tuple(waiting[: self.terms.most])
        if waited > self.terms.patience_s:
            there = ", ".join(self.nodes[slot].host for slot in waiting) or "none"
            least, patience = self.terms.least, self.terms.patience_s
            self.ending = Ending(
                f"{len(waiting)} of at least {least} nodes came within {patience:g} s ({there})", code=1
            )
        return ()

    def _begin(self, members: tuple[int, ...]) -> None:
        reason = self.ending.reason if self.ending else ""
        try:
            # It may search for a layout: the nodes are answered meanwhile.
            planned = self.plan(self.round.number + 1 if self.round else 1, members, reason)
        except PhalanxError as error:
            with self._changed:
                self.ending = Ending(str(error), code=error.exit_code)
            return
        with self._changed:
            if all(slot in self.nodes for slot in members):
                memory = tuple(self.nodes[slot].memory for slot in members)
                self.round, self.ending = replace(planned, memory=memory if all(memory) else ()), None

    def _end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending, self._since = ending, self.clock()


POLL_S = 0.2
_TICK_S = 0.05
_RETRY_S = 1.0
_FAREWELL_S = 5.0


class HostLink:
    """The host's own link, which serves the others. Close it. It listens at an address of this machine, and nowhere
    else; a node that says nothing for `silence_s` is lost."""

    def __init__(self, address: tuple[str, int], membership: Membership, state: NodeState, silence_s: float):
        """Raises RunError if the address cannot be used."""
        self.membership, self._state = membership, state
        membership.join(state)
        try:
            self._server = _Server(address, membership, silence_s)
        except OSError as error:
            raise RunError(f"run.rdzv_endpoint {address[0]}:{address[1]}: {error.strerror or error}") from error
        self.port = self._server.server_address[1]
        self._closed = threading.Event()
        for work in (self._server.serve_forever, self._tick):
            threading.Thread(target=work, name="phalanx-nodes", daemon=True).start()

    silent_s = 0.0  # the host hears itself

    def exchange(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self.membership.report(HOST, self._state)

    @property
    def notice(self) -> Notice:
        return self.membership.report(HOST, self._state)

    def close(self, code: int, message: str) -> None:
        self.membership.finish(code, message, _FAREWELL_S)
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_S):
            self.membership.tick()


class _Server(QuietServer):
    def __init__(self, address: tuple[str, int], membership: Membership, silence_s: float):
        self.membership, self.silence_s = membership, silence_s
        super().__init__(address, _Connection)


class _Connection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        """Serves one node until it leaves, is silent for too long, or says something else than its state."""
        server = self.server
        assert isinstance(server, _Server)
        membership, slot, reason = server.membership, None, "its launcher has ended"
        self.request.settimeout(server.silence_s)
        try:
            while line := self.rfile.readline(MOST_BYTES):
                state = decode_state(line)
                notice = membership.join(state) if slot is None else membership.report(slot, state)
                self.wfile.write(encode(notice))
                if notice.refusal:
                    return
                slot = notice.slot
        except TimeoutError:
            reason = f"nothing was heard from it for {server.silence_s:g} s"
        except (OSError, ValueError) as error:
            reason = f"its connection broke ({error})"
        finally:
            if slot is not None:
                membership.leave(slot, reason)


class GuestLink:
    """The link of a node that is not the host; connects again when the connection breaks. Close it. `key` returns the
    key of the run as this node sees it."""

    def __init__(
        self, address: tuple[str, int], state: NodeState, silence_s: float, key: Callable[[], str] = lambda: ""
    ):
        self._address, self._state, self._silence_s, self._key = address, state, silence_s, key
        self._lost = Ending(f"there is no connection to the host, {address[0]}:{address[1]}")
        self._said = state
        self.notice = Notice(-1)  # the newest that the host has said
        self._heard = time.monotonic()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="phalanx-nodes", daemon=True)
        self._thread.start()

    def exchange(self, **changes: Any) -> None:
        """Changes fields of the node's state, which the host learns soon."""
        with self._changed:
            self._state = replace(self._state, **changes)
            self._changed.notify_all()

    @property
    def silent_s(self) -> float:
        """Seconds since the host was last heard, or since this link began."""
        return time.monotonic() - self._heard

    def close(self, code: int, message: str) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(POLL_S + _RETRY_S)

    def _run(self) -> None:
        while not self._closed:
            with (
                suppress(OSError, ValueError),
                socket.create_connection(self._address, timeout=self._silence_s) as connection,
            ):
                self._talk(connection)
            with self._changed:
                # Rounds of the host that answers next are other rounds.
                self._state = replace(self._state, round=0)
                if self.notice.ending is None or self.notice.ending.code is None:
                    self.notice = Notice(-1, self.notice.round, self._lost)
                self._changed.wait_for(lambda: self._closed, _RETRY_S)

    def _talk(self, connection: socket.socket) -> None:
        lines, key, closed = connection.makefile("rb"), self._key(), False
        while not closed:
            with self._changed:  # what was said last before it closed is heard, too
                self._said, closed = self._state, self._closed
            connection.sendall(encode(replace(self._said, key=key)))
            line = lines.readline(MOST_BYTES)
            if not line:
                return
            self.notice = decode_notice(line)
            self._heard = time.monotonic()
            if self.notice.refusal:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._state is not self._said, POLL_S)


# The key of a run on several nodes: a file in the run directory that only its user can read.
FILE = ".nodes_key"
_BYTES = 16


def make(directory: Path) -> str:
    """Returns the key of a run directory; makes it if there is none. Raises OSError, or RunError for a file that is not
    a regular one."""
    with suppress(FileExistsError):
        descriptor = os.open(directory / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_BYTES))
            file.flush()
            os.fsync(file.fileno())
    return known(directory)


def known(directory: Path) -> str:
    """Returns the key as this node sees it; empty if it sees none."""
    try:
        os.listdir(directory)  # or NFS may remember for a while that there was no such file
        with os.fdopen(open_regular(directory / FILE, os.O_RDONLY), encoding="ascii", errors="replace") as file:
            return file.read(4 * _BYTES)
    except OSError:
        return ""


_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as the job describes them."""

    endpoint: tuple[str, int]  # where the host listens: a name or address of its machine, and a port
    terms: Terms
    silence_s: float  # seconds without a sign of life after which a node, or the host, is lost
    words: Callable[[int], tuple[str, ...]]
    """Returns the words that adapt the job to a number of nodes. Raises PhalanxError if none do."""
    directory: Path
    membership: Callable[[Terms, Plan, str], Membership] = Membership
    """Makes the host's view of the nodes."""

    @property
    def is_host(self) -> bool:
        """True if the endpoint is an address of this machine."""
        return is_this_machine(self.endpoint[0])

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the ranks: the network interface that leads to the host, unless the user has named one."""
        interface = interface_towards(self.endpoint[0])
        return {name: interface for name in _INTERFACE_VARIABLES if interface and name not in os.environ}

    def join(self, memory: str = "") -> HostLink | GuestLink:
        """Opens this node's link; `memory` is the address of its memory. Raises RunError if the endpoint cannot be
        used."""
        state = NodeState(platform.node(), self.terms.processes, memory=memory)
        if not self.is_host:
            return GuestLink(self.endpoint, state, self.silence_s, lambda: known(self.directory))
        own = make(self.directory)
        membership = self.membership(self.terms, self._plan, own)
        return HostLink(self.endpoint, membership, replace(state, key=own), self.silence_s)

    def _plan(self, number: int, members: tuple[int, ...], reason: str) -> Round:
        words = self.words(len(members))
        host, attempt = self.endpoint[0], next_attempt(self.directory / "logs").name
        return Round(number, members, reason, host, free_port(host), logs.claim(self.directory), attempt, words)
