"""This node's part in the rounds of a run, and what the launcher asks between polls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx.errors import StoppedError
from phalanx.launch.environment import GENERATION
from phalanx.launch.nodes.link import POLL_S, NodeLink
from phalanx.launch.nodes.messages import Ending, NodeFailure, Round
from phalanx.launch.processes import NodePart

_ELSEWHERE = Ending("the host goes on without this node")


@dataclass(frozen=True)
class Over:
    """The end of the run on this node, which another one or the user has decided."""

    code: int
    message: str


class NodeRendezvous:
    """Lets a node's launcher take part in one round after the other.

    Args:
        link: to the host.
        processes: ranks of this node, as of every other.
        patience_s: seconds for which the host may be away.
        stops: the signal by which the user has asked this launcher to stop; None if none has.
        say: prints a line.
    """

    def __init__(
        self,
        link: NodeLink,
        processes: int,
        patience_s: float,
        stops: Callable[[], int | None],
        say: Callable[[str], None],
    ):
        self.link, self.processes, self.patience_s, self.stops, self.say = link, processes, patience_s, stops, say
        self.round: Round | None = None
        """The round that this node takes part in, or has taken part in."""
        self.over: Over | None = None
        """Set once no round follows."""

    @property
    def ending(self) -> Ending | None:
        """The host's order to end the round that this node's ranks are in; None while they may go on. That all ranks
        end well, or stop with a checkpoint, is no order: these do, too."""
        notice, current = self.link.notice, self.round
        if current is None or (notice.ending and notice.ending.code in (0, StoppedError.exit_code)):
            return None
        if notice.round is None or notice.round.generation != current.generation:
            return _ELSEWHERE
        return notice.ending

    @property
    def world(self) -> int:
        """Ranks of the round, on all its nodes."""
        assert self.round is not None, "no round has begun"
        return len(self.round.members) * self.processes

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables for the ranks of the round."""
        assert self.round is not None, "no round has begun"
        return {GENERATION: self.round.generation}

    def failed(self, failure: NodeFailure) -> None:
        """Tells the host that this node's ranks failed by themselves."""
        self.link.exchange(failure=failure)

    def done(self) -> None:
        """Tells the host that this node's ranks have ended well."""
        self.link.exchange(done=True)

    def next_round(self) -> NodePart | None:
        """Waits for the next round of this node. Returns None, with `over` set, if none follows: the run has ended
        elsewhere, the host is away for too long, or this launcher was asked to stop."""
        last = self.round
        self.link.exchange(waits=True)
        while True:
            notice = self.link.notice
            if number := self.stops():
                return self._end(128 + number, "stopped while it waited for other nodes")
            if notice.refusal:
                return self._end(2, notice.refusal)
            if notice.ending and notice.ending.code is not None:
                return self._end(notice.ending.code, notice.ending.reason)
            if self.link.silent_s > self.patience_s:
                why = notice.ending.reason if notice.ending else "the host is silent"
                return self._end(
                    1, f"{why}: it was not heard for {self.patience_s:g} s (run.rdzv_endpoint, run.timeout_s)"
                )
            begins = notice.round is not None and notice.ending is None and notice.slot in notice.round.members
            if begins and notice.round and (last is None or notice.round.generation != last.generation):
                return self._take_part(notice.round, notice.slot)
            time.sleep(POLL_S / 4)

    def _take_part(self, current: Round, slot: int) -> NodePart:
        self.round = current
        self.link.exchange(waits=False, round=current.number, failure=None)
        place = current.members.index(slot)
        nodes = f"{len(current.members)} node{'s' if len(current.members) > 1 else ''}"
        adapted = f", {' '.join(current.words)}" if current.words else ""
        self.say(f"round {current.number} on {nodes}, this is node {place}{adapted}")
        return NodePart(place, len(current.members), current.address, current.port)

    def _end(self, code: int, message: str) -> None:
        self.over = Over(code, message)
