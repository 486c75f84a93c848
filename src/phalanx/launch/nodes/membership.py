"""Who takes part in which round: the host's decisions, without sockets and processes.

A round begins when enough nodes wait for one, and ends when one of its nodes is lost or fails, or when another node
could join. Then the nodes that are there begin the next. The host is a node, too, and always the first: without it
there is no round, so that two halves of a cut network can never both go on.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import PhalanxError
from phalanx.launch.nodes.messages import Ending, NodeState, Notice, Round

FIRST_CALL_S = 30.0
"""Seconds for which the first round waits for more nodes than it needs."""
HOST = 0
"""The host's slot."""


@dataclass(frozen=True)
class Terms:
    """What a run asks of its nodes."""

    least: int
    """Nodes without which no round begins."""
    most: int
    processes: int
    """Ranks of every node."""
    patience_s: float
    """Seconds for which the nodes wait until there are enough of them."""


Plan = Callable[[int, tuple[int, ...], str], Round]
"""Prepares round `number` of the slots given, which begins for a reason. Raises PhalanxError."""


class Membership:
    """The nodes of a run, and their rounds. Several threads may use it."""

    def __init__(self, terms: Terms, plan: Plan, key: str = "", clock: Callable[[], float] = time.monotonic):
        self.terms, self.plan, self.key, self.clock = terms, plan, key, clock
        self.nodes: dict[int, NodeState] = {}
        """The nodes that are there, by slot."""
        self.round: Round | None = None
        self.ending: Ending | None = None
        """Set once the newest round is to end."""
        self._slots = 0
        self._since = clock()
        self._changed = threading.Condition()

    def join(self, state: NodeState) -> Notice:
        """Adds a node, and returns its slot. The first one is the host."""
        if not hmac.compare_digest(state.key.encode(), self.key.encode()):
            return Notice(
                -1,
                refusal="this node does not see the key of the run that the host has written to its run directory: "
                "all nodes need the same run directory, on storage that they share",
            )
        with self._changed:
            if state.processes != self.terms.processes:
                return Notice(
                    -1,
                    refusal=f"this node would start {state.processes} ranks, and the host asks for "
                    f"{self.terms.processes}: give every node the same job and command",
                )
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
        """True if no other round follows."""
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
                self.round, self.ending = planned, None

    def _end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending, self._since = ending, self.clock()
