"""How a launcher joins the nodes of a run: as the host, if the endpoint is an address of its machine, or as a guest."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.data.files import open_regular
from phalanx.launch import generation
from phalanx.launch.attempts import say
from phalanx.launch.logs import next_attempt
from phalanx.launch.nodes.addresses import free_port, interface_towards, is_this_machine
from phalanx.launch.nodes.link import GuestLink, HostLink
from phalanx.launch.nodes.membership import Membership, Terms
from phalanx.launch.nodes.messages import NodeState, Round
from phalanx.launch.nodes.node import NodeRendezvous
from phalanx.launch.supervisor import StopSignals

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
            own = make(self.directory)
            membership = Membership(self.terms, self._plan, own)
            link = HostLink(self.endpoint, membership, replace(state, key=own), self.silence_s)
        else:
            link = GuestLink(self.endpoint, state, self.silence_s, lambda: known(self.directory))

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
