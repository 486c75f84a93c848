"""Replicas that come and go: each is a world of ranks of its own, and a coordinator in the launcher tells all of them
who takes part in a step.

Every rank votes on every step whether the sum over the replicas has reached it. When all ranks of the replicas that
live have voted, the step counts if all say yes; a replica that was lost is left out of the next epoch, and one that
waits joins it. So all replicas agree on every step, whatever one of them has seen (torchft: a quorum per step).
Ranks and coordinator exchange lines of JSON; a connection that ends is a rank that is lost, at once.

Where replicas synchronise now and then (`sync=diloco`), an exchange opens with those that come within the grace after
enough of them have; one that comes later copies the state of the others after it (a quorum and a grace window).

On several nodes the coordinator is the host's. Each node has a launcher, which takes a place that is free (`Places`),
and starts the replicas that belong there; where a node is lost, another or the same one takes its place.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from phalanx.bounded import parse_json
from phalanx.config.values import read_as
from phalanx.errors import RunError
from phalanx.launch.nodes import HOST, NOBODY, Ending, Membership, Plan, Round, Terms
from phalanx.launch.peers import QuietServer
from phalanx.launch.verdict import LostPeerError

MOST_BYTES = 1 << 16
FIRST_CALL_S = 30.0
"""Seconds for which the first replicas that are ready wait for the others, as long as there are enough."""
_TICK_S = 0.5
_BEAT_S = 0.2


@dataclass(frozen=True)
class RankMessage:
    """A rank's message: its name, then that it is ready, then the outcome of each step, and last that it is done."""

    key: str = ""
    replica: int = -1
    rank: int = -1
    facts: str = ""
    """Digest of its job and program, which must be those of all."""
    ready: int | None = None
    """The steps of its state when it is ready; -1 if it has none and copies another's."""
    host: str = ""
    """Its address, which the coordinator sees."""
    port: int = 0
    """Where the first rank of a replica has its store."""
    epoch: int = 0
    arrives: bool = False
    """Whether it waits for the exchange that follows `step` to open."""
    summed: bool | None = None
    """Whether the sum of the exchange that follows `step` has reached it."""
    step: int = 0
    taken: int = 0
    """The steps of its state."""
    done: bool = False
    """Whether the run is over: the first member has saved its end."""


@dataclass(frozen=True)
class ReplicaNotice:
    """The coordinator's message to every rank after each step."""

    epoch: int = 0
    """Counts the changes of the members; 0 before the first."""
    members: tuple[int, ...] = ()
    """Replicas in the order in which they came: the first has all others' state."""
    new: tuple[int, ...] = ()
    """Members that copy the state of the first."""
    host: str = ""
    port: int = 0
    """Where the first member's store is."""
    step: int = 0
    """Exchanges that count: one per step, or more where a step is computed again."""
    opened: bool = False
    """Whether the next one has begun with those that have arrived."""
    lost: bool = False
    """Whether a member is gone, so that nothing more comes of this epoch."""
    over: bool = False
    refusal: str = ""


Place = tuple[int, int]
"""Replica, and rank in it."""


class ReplicaTerms(NamedTuple):
    """How many replicas there are, and how long they wait for each other."""

    replicas: int
    least: int
    """Without so many the run waits."""
    grace_s: float | None = None
    """Seconds for which so many wait for the others before an exchange; None if it takes all of them."""


class ReplicaMembers:
    """Who takes part, and which steps count; without sockets. Not for several threads at once."""

    def __init__(self, terms: ReplicaTerms, ranks: int, clock: Callable[[], float] = time.monotonic):
        (self.replicas, self.least, self.grace_s), self.ranks, self.clock = terms, ranks, clock
        self.arrived, self._enough_since = set[Place](), math.inf
        self.late: dict[Place, RankMessage] = {}
        """Ranks that an exchange was opened without."""
        self.ready: dict[Place, RankMessage] = {}
        self.votes: dict[Place, bool] = {}
        self.alive: list[int] = []
        """Members of the epoch that are not lost."""
        self.notice, self.taken = ReplicaNotice(), 0
        self.facts, self._since = "", 0.0

    @property
    def present(self) -> list[int]:
        """Replicas all of whose ranks are ready."""
        every = range(self.replicas)
        return [each for each in every if all((each, rank) in self.ready for rank in range(self.ranks))]

    def enter(self, place: Place, message: RankMessage) -> None:
        if not self.ready:
            self._since = self.clock()
        self.ready[place] = message

    def vote(self, place: Place, message: RankMessage) -> None:
        if (message.epoch, message.step) == (self.notice.epoch, self.notice.step) and place[0] in self.alive:
            self.votes[place], self.taken = bool(message.summed), message.taken

    def arrive(self, place: Place, message: RankMessage) -> None:
        if place in self.late:
            self.ready[place] = replace(self.late.pop(place), ready=-1)
        elif (message.epoch, message.step) == (self.notice.epoch, self.notice.step):
            self.arrived.add(place)

    def leave(self, replica: int) -> bool:
        """Removes a replica one of whose ranks is gone; returns whether that is a loss."""
        for rank in range(self.ranks):
            for known in (self.ready, self.votes, self.late):
                known.pop((replica, rank), None)
            self.arrived.discard((replica, rank))
        lost = replica in self.alive and not self.notice.over
        self.alive = [each for each in self.alive if each != replica]
        self.notice = replace(self.notice, lost=self.notice.lost or lost)
        return lost

    def decide(self) -> bool:
        """Ends a step, or begins the first epoch, if it is time to; returns whether there is another notice."""
        waiting = [each for each in self.present if each not in self.alive]
        if self.notice.over:
            return False
        if not self.alive:
            return self._begin(waiting)
        if self.grace_s is not None and not self.notice.opened:
            return self._open(self.grace_s, len(waiting))
        voters = {(replica, rank) for replica in self.alive for rank in range(self.ranks)}
        if not voters <= self.votes.keys() or len(self.alive) + len(waiting) < self.least:
            return False
        step = self.notice.step + all(self.votes[voter] for voter in voters)
        changed = step == self.notice.step or bool(waiting) or len(self.alive) < len(self.notice.members)
        self._next(step, [*self.alive, *waiting] if changed else None, waiting)
        return True

    def _open(self, grace_s: float, waiting: int) -> bool:
        """Opens an exchange with those that have arrived, after the grace without the others; so many more join after
        it."""
        there = [each for each in self.alive if all((each, rank) in self.arrived for rank in range(self.ranks))]
        now, enough = self.clock(), bool(there) and len(there) + waiting >= self.least
        self._enough_since = min(self._enough_since, now) if enough else math.inf
        if not enough or (len(there) < len(self.alive) and now < self._enough_since + grace_s):
            return False
        for place in [place for place in self.ready if place[0] in self.alive and place[0] not in there]:
            self.late[place] = self.ready.pop(place)
            if place in self.arrived:  # it waits already, for the ranks beside it
                self.arrive(place, self.late[place])
        self.arrived.clear()
        self._enough_since = math.inf
        self._next(self.notice.step, there if len(there) < len(self.notice.members) else None, [])
        self.notice = replace(self.notice, opened=True)
        return True

    def _begin(self, waiting: list[int]) -> bool:
        """Begins with all replicas, or after some time with enough; the one that has done most steps is the first."""
        enough = len(waiting) == self.replicas or self.clock() - self._since > FIRST_CALL_S
        of = {each: self.ready[each, 0].ready or 0 for each in waiting}
        if not enough or len(waiting) < self.least or max(of.values(), default=-1) < 0:
            return False
        first, *others = sorted(waiting, key=lambda each: (-of[each], each))
        self.taken = of[first]
        self._next(of[first], [first, *others], others)
        return True

    def _next(self, step: int, members: list[int] | None, new: list[int]) -> None:
        self.votes.clear()
        self.notice = replace(self.notice, step=step, lost=False, opened=False)
        if members is not None:
            self.alive = list(members)
            first, epoch = self.ready[members[0], 0], self.notice.epoch + 1
            self.notice = replace(self.notice, epoch=epoch, members=tuple(members), new=tuple(new))
            self.notice = replace(self.notice, host=first.host, port=first.port)


class ReplicaCoordinator:
    """The launcher's side: serves the ranks of all replicas, at an address of this machine. A context manager."""

    def __init__(
        self, terms: ReplicaTerms, ranks: int, tell: Callable[[str], None], host: str = "127.0.0.1", key: str = ""
    ):
        self.members, self.tell, self.key = ReplicaMembers(terms, ranks), tell, key or secrets.token_hex(16)
        self._connections: dict[Place, _RankConnection] = {}
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._server = _RankServer((host, 0), self)
        self.address = host, self._server.server_address[1]
        self.where = {"host": host, "port": self.address[1], "key": self.key}
        """The coordinator's address and key, which a replica's ranks need beside its number."""
        for work in (self._server.serve_forever, self._tick):
            threading.Thread(target=work, name="phalanx-replicas", daemon=True).start()

    def __enter__(self) -> ReplicaCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    def drop(self, replicas: Iterable[int]) -> None:
        """Removes replicas whose node is lost: their connections may never end."""
        with self._lock:
            for connection in [each for place, each in self._connections.items() if place[0] in replicas]:
                self.forget(connection)

    def hear(self, connection: _RankConnection, message: RankMessage) -> None:
        """Takes what a rank says; the first message says who it is. Raises ValueError."""
        with self._lock:
            place, members = connection.place, self.members
            if place is None:
                place = message.replica, message.rank
                known = hmac.compare_digest(message.key.encode(), self.key.encode())
                if not known or not (0 <= place[0] < members.replicas and 0 <= place[1] < members.ranks):
                    raise ValueError("no rank of this run")
                members.facts = members.facts or message.facts
                refusal = "" if message.facts == members.facts else "its job or program differs from the others'"
                connection.say(replace(members.notice, members=tuple(members.alive), refusal=refusal))
                if before := self._connections.get(place):
                    self.forget(before)  # its end was not heard yet
                connection.place, self._connections[place] = place, connection
            elif message.done:
                members.notice = replace(members.notice, over=True)
                self._publish(True)
            elif message.ready is not None:
                members.enter(place, replace(message, host=connection.client_address[0]))
                if members.notice.over:
                    connection.say(members.notice)
                elif message.ready < 0 and not members.alive:  # those it came to copy from were lost meanwhile
                    connection.end()
                self._decide()
            else:
                (members.arrive if message.arrives else members.vote)(place, message)
                self._decide()

    def forget(self, connection: _RankConnection) -> None:
        """Removes the replica of a rank whose connection has ended: the others of it cannot go on without it."""
        with self._lock:
            if connection.place is None or self._connections.get(connection.place) is not connection:
                return
            replica, members = connection.place[0], self.members
            if members.leave(replica) and not self._closed.is_set():
                left, step = len(members.alive), members.taken + 1
                rest = f"{left} of {members.replicas} go on" if left >= members.least else "the run waits for others"
                self.tell(f"replica {replica} is lost in step {step}; {rest}")
                self._publish(True)
            for place in [place for place in self._connections if place[0] == replica]:
                self._connections.pop(place).end()
            if not members.alive and not members.notice.over:  # nobody has the state: they begin from a checkpoint
                for place in [place for place, message in members.ready.items() if message.ready == -1]:
                    self._connections[place].end()
            self._decide()

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_S):
            with self._lock:
                self._decide()

    def _decide(self) -> None:
        self._publish(self.members.decide())

    def _publish(self, changed: bool) -> None:
        if changed:
            for place, connection in list(self._connections.items()):
                if place in self.members.ready or place in self.members.late:
                    connection.say(self.members.notice)


class _RankServer(QuietServer):
    def __init__(self, address: tuple[str, int], coordinator: ReplicaCoordinator):
        self.coordinator = coordinator
        super().__init__(address, _RankConnection)


class _RankConnection(socketserver.StreamRequestHandler):
    place: Place | None = None
    disable_nagle_algorithm = True

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, _RankServer)
        try:
            while line := self.rfile.readline(MOST_BYTES):
                server.coordinator.hear(self, read_as(RankMessage, parse_json(line)))
        finally:
            server.coordinator.forget(self)

    def say(self, notice: ReplicaNotice) -> None:
        with suppress(OSError):
            self.wfile.write(json.dumps(asdict(notice)).encode() + b"\n")

    def end(self) -> None:
        with suppress(OSError):
            self.request.shutdown(socket.SHUT_RDWR)


class Places(Membership):
    """The nodes of a run whose replicas come and go: there is one round, with a place for each of the nodes that the
    layout is for; a node that waits takes one that is free, and a lost one leaves its own."""

    def __init__(self, coordinator: ReplicaCoordinator, generation: str, terms: Terms, plan: Plan, key: str):
        super().__init__(terms, plan, key)
        self.coordinator, places = coordinator, (NOBODY,) * terms.most
        self.current = Round(0, places, "", *coordinator.address, generation, "attempt_0", ())

    def leave(self, slot: int, reason: str) -> None:
        """Removes a node, and its replicas if they are not done."""
        place = None
        with self._changed:
            state, members = self.nodes.pop(slot, None), self.current.members
            self._changed.notify_all()
            if slot in members:
                self._seat(place := members.index(slot), NOBODY)
        if state and place is not None and not state.done:
            self.coordinator.tell(f"node {state.host} is lost: {reason}")
            each = self.coordinator.members.replicas // self.terms.most
            self.coordinator.drop(range(place * each, (place + 1) * each))

    def tick(self) -> None:
        with self._changed:
            for slot, state in sorted(self.nodes.items()):
                members = self.current.members
                if state.waits and slot not in members and NOBODY in members:
                    self._seat(members.index(NOBODY), slot)
            ready = self.coordinator.members.notice.epoch > 0
            if not ready and not self.is_over and self.clock() - self._since > self.terms.patience_s:
                least, of = self.coordinator.members.least, self.coordinator.members.replicas
                self.ending = Ending(
                    f"fewer than {least} of {of} replicas came within {self.terms.patience_s:g} s", code=1
                )

    def others(self) -> bool:
        """Returns whether nodes beside the host have replicas that are not done."""
        with self._changed:
            return any(not self.nodes[slot].done for slot in self.current.members if slot not in (HOST, NOBODY))

    def _seat(self, place: int, slot: int) -> None:
        members = list(self.current.members)
        members[place] = slot
        self.round = self.current = replace(self.current, number=self.current.number + 1, members=tuple(members))


def _order(notice: ReplicaNotice) -> tuple[int, int, bool, bool]:
    return notice.epoch, notice.step, notice.opened, notice.over


def _gone(error: OSError) -> LostPeerError:
    return LostPeerError(f"a replica was lost: its launcher is gone: {error.strerror or error}")


class ReplicaLink:
    """A rank's connection to the coordinator."""

    def __init__(self, where: Mapping[str, Any], rank: int, facts: str):
        """Raises RunError if the coordinator refuses this rank, and LostPeerError if it is gone."""
        self.replica = int(where["replica"])
        self._changed, self._notice, self._ended = threading.Condition(), ReplicaNotice(), False
        try:
            self._socket = socket.create_connection((where["host"], int(where["port"])))
        except OSError as error:
            raise _gone(error) from error
        self.address = self._socket.getsockname()[0]
        """This machine's, on the way to the coordinator."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._socket.makefile("rb")
        self._say(RankMessage(key=where["key"], replica=self.replica, rank=rank, facts=facts))
        met = self._read()
        if met is None:
            raise LostPeerError("a replica was lost: its launcher does not answer")
        if met.refusal:
            raise RunError(f"replica {self.replica} may not take part: {met.refusal}")
        self.met = met
        threading.Thread(target=self._listen, name="phalanx-replica", daemon=True).start()

    @property
    def copies(self) -> bool:
        """True if other replicas were training when this one came: it copies their state."""
        return bool(self.met.members)

    def ready(self, step: int, port: int) -> None:
        self._say(RankMessage(ready=step, port=port))

    def arrive(self, notice: ReplicaNotice) -> None:
        self._say(RankMessage(epoch=notice.epoch, step=notice.step, arrives=True))

    def vote(self, notice: ReplicaNotice, taken: int, *, summed: bool) -> None:
        self._say(RankMessage(epoch=notice.epoch, step=notice.step, taken=taken, summed=summed))

    def finish(self) -> None:
        self._say(RankMessage(done=True))

    @property
    def over(self) -> bool:
        return self._notice.over or self.met.over

    def lost(self, notice: ReplicaNotice) -> bool:
        """Returns whether a member of the notice is known to be gone."""
        return self._ended or self._notice.epoch != notice.epoch or self._notice.lost or self._notice.over

    def newer(self, notice: ReplicaNotice, beat: Callable[[], None]) -> ReplicaNotice:
        """Waits for what follows a notice, and calls `beat` meanwhile. Raises LostPeerError if nothing can."""
        while True:
            with self._changed:
                new = self._notice
                if _order(new) > _order(notice):
                    return new
                if self._ended:
                    raise LostPeerError("a replica was lost: there is nobody to copy from, or no launcher")
                self._changed.wait(_BEAT_S)
            beat()

    def _say(self, message: RankMessage) -> None:
        try:
            self._socket.sendall(json.dumps(asdict(message)).encode() + b"\n")
        except OSError as error:
            raise _gone(error) from error

    def _read(self) -> ReplicaNotice | None:
        with suppress(OSError, ValueError):
            if line := self._lines.readline(MOST_BYTES):
                return read_as(ReplicaNotice, parse_json(line))
        return None

    def _listen(self) -> None:
        while (notice := self._read()) is not None:
            with self._changed:
                self._notice = notice
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
