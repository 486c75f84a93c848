"""How a launcher joins the nodes of a run: as the host, if the endpoint is an address of its machine, or as a guest."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.launch import generation
from phalanx.launch.attempts import say
from phalanx.launch.logs import next_attempt
from phalanx.launch.nodes import key
from phalanx.launch.nodes.addresses import free_port, interface_towards, is_this_machine
from phalanx.launch.nodes.link import GuestLink, HostLink
from phalanx.launch.nodes.membership import Membership, Terms
from phalanx.launch.nodes.messages import NodeState, Round
from phalanx.launch.nodes.node import NodeRendezvous
from phalanx.launch.supervisor import StopSignals

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as the job describes them."""

    endpoint: tuple[str, int]
    """Where the host listens: a name or address of its machine, and a port."""
    terms: Terms
    silence_s: float
    """Seconds without a sign of life after which a node, or the host, is lost."""
    words: Callable[[int], tuple[str, ...]]
    """Returns the words that adapt the job to a number of nodes. Raises PhalanxError if none do."""
    directory: Path
    """The run directory, which all nodes share."""

    @property
    def is_host(self) -> bool:
        """True if the endpoint is an address of this machine."""
        return is_this_machine(self.endpoint[0])

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the ranks: the network interface that leads to the host, unless the user has named one."""
        interface = interface_towards(self.endpoint[0])
        return {name: interface for name in _INTERFACE_VARIABLES if interface and name not in os.environ}

    def join(self, signals: StopSignals) -> NodeRendezvous:
        """Opens this node's link. Raises RunError if the endpoint cannot be used."""
        state = NodeState(platform.node(), self.terms.processes)
        if self.is_host:
            own = key.make(self.directory)
            membership = Membership(self.terms, self._plan, own)
            link = HostLink(self.endpoint, membership, replace(state, key=own), self.silence_s)
        else:
            link = GuestLink(self.endpoint, state, self.silence_s, lambda: key.known(self.directory))

        def stops() -> int | None:
            return signals.requests[0][0] if signals.requests else None

        return NodeRendezvous(link, self.terms.processes, self.terms.patience_s, stops, say)

    def _plan(self, number: int, members: tuple[int, ...], reason: str) -> Round:
        words = self.words(len(members))
        return Round(
            number,
            members,
            reason,
            self.endpoint[0],
            free_port(self.endpoint[0]),
            generation.claim(self.directory),
            next_attempt(self.directory / "logs").name,
            words,
        )
