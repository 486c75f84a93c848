"""The ranks that another launcher started, from their start to their end: they meet, and they end with one message."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from torch._C._distributed_c10d import (
    HashStore,  # torch.distributed.*, to the type stubs
    Store,  # torch.distributed.*, to the type stubs
    TCPStore,  # torch.distributed.*, to the type stubs
)

from phalanx.bounded import parse_json
from phalanx.errors import JobError, PhalanxError, RunError, StoppedError
from phalanx.launch.lost_peer import LostPeerError
from phalanx.launch.meet.channel import OfferChannel, channel_of
from phalanx.launch.meet.keys import agent_listens, key
from phalanx.launch.meet.roll_call import REFUSAL_S, Problem, RollCall, enter, message_of, placed
from phalanx.launch.meet.store import FoundStore, advice, find, find_at, hold, hold_at, poll
from phalanx.launch.meet.told import GroupError, ToldError, without_rank_0
from phalanx.launch.nodes.addresses import interface_towards
from phalanx.launch.outcome import describe
from phalanx.launch.ranks import Ranks, rendezvous_address
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.layout import Phase


# The connections of this process to its peers.
def break_connections(keep: Store) -> None:
    """Ends the TCP connections of this process, but those of the store `keep`, which may go on to serve.

    A peer inside a collective then fails at once, as it would when this process ends. torch's gloo backend has no such
    operation: `abort` leaves its connections open.
    """
    port = keep.port if isinstance(keep, TCPStore) else 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            _break(int(name), port)


def _break(descriptor: int, kept_port: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if kept_port not in (connection.getsockname()[1], connection.getpeername()[1]):
            connection.shutdown(socket.SHUT_RDWR)


_SPEAKER_S = 1.0
"""Seconds for which a rank with an error waits for rank 0 to say that it prints the same."""
_CAUSE_S = 3.0
"""Seconds for which a rank that only lost a peer waits for the rank that failed first, and rank 0 for the others."""


class Meeting:
    """One rank's part.

    Args:
        ranks: this rank's place, as its launcher says it.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        """This rank's place; after `join` without gaps."""
        self._found: FoundStore | None = None
        self._complete = self._hopeless = False

    @property
    def store(self) -> Store:
        """The store of the group, after `join`."""
        assert self._found is not None, "the ranks have met"
        return self._found.store

    def join(self, timeout_s: float, expected: Mapping[str, object] | None = None) -> Ranks:
        """Returns this rank's place once all ranks are there.

        Ranks of torchrun meet in the store of its agent, which has numbered them: they need no roll call.

        Args:
            timeout_s: seconds for which the ranks wait for each other.
            expected: what must be the same on all ranks (JSON-able), besides their number.

        Raises RunError, of which one rank at most is no ToldError: there is no way to meet, ranks are missing, two
        processes have one rank, or a rank expects something else, or has a problem. JobError if MASTER_ADDR or
        MASTER_PORT is wrong.
        """
        ranks = self.ranks
        if ranks.world == 1:
            self._found, self._complete = FoundStore(HashStore(), ""), True
            return ranks
        try:
            address = rendezvous_address(os.environ)
            channel = None if address else channel_of(ranks, os.environ)
            self._hopeless = True  # until there is a store: an error is then about the meeting itself
            self._found = _open(ranks, address, channel, timeout_s)
            self._hopeless = False
            if agent_listens():
                enter(self.store, ranks)
            else:
                where = f"{address[0]}:{address[1]}" if address else f"{self._found.host}"
                call = RollCall(ranks, self._found, timeout_s, self._own_address(), advice(ranks.world, where))
                verdict = call.answer({"world size": ranks.world, **(expected or {})})
                self.ranks = placed(ranks, verdict)
                _use_interface_towards(verdict.address if self._found.holds else self._found.host)
                if channel and self._found.holds:
                    channel.forget()
        except RuntimeError as error:  # of torch's store
            raise without_rank_0(ranks, failed(ranks, timeout_s, error)) from error
        self._complete = True
        return self.ranks

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Makes an error inside the `with` block end all ranks with one message and the same exit code: one rank raises
        it, rank 0 if it can, the others ToldError."""
        try:
            yield
        except (ToldError, GroupError):
            raise
        except StoppedError as stopped:
            if self.ranks.rank:
                raise ToldError(str(stopped), stopped.exit_code) from stopped  # all ranks stop together
            raise
        except Exception as error:
            if self.ranks.world > 1 and not self._hopeless:
                if self._complete:
                    self._speak(error)
                else:
                    self._refuse(error)
            raise

    def _refuse(self, error: Exception) -> None:
        """Tells the ranks that may still come that this one cannot. Returns if this rank has to print its error."""
        code, message, trace = describe(error)
        try:
            if agent_listens():
                self._found = self._found or _open(self.ranks, rendezvous_address(os.environ), None, REFUSAL_S)
                self._speak(error)
                return
            found = self._found or self._open_for_refusal()
            call = RollCall(self.ranks, found, REFUSAL_S, "", "")
            call.answer({}, self._problem(trace or message, code))
        except GroupError as group:
            if str(group) != (trace or message):
                raise
        except ToldError as told:
            raise ToldError(message, told.exit_code if self._found else code) from error
        except (PhalanxError, RuntimeError, OSError):
            if isinstance(without_rank_0(self.ranks, message), ToldError):
                raise ToldError(message, code) from error

    def _open_for_refusal(self) -> FoundStore:
        """Opens the store even if the cause of the refusal is that MASTER_ADDR or MASTER_PORT is wrong."""
        address = None
        with suppress(JobError):
            address = rendezvous_address(os.environ)
        self._found = _open(self.ranks, address, None if address else channel_of(self.ranks, os.environ), REFUSAL_S)
        return self._found

    def _speak(self, error: Exception) -> None:
        """Returns if this rank has to print its error. Raises ToldError if another rank does."""
        is_victim = isinstance(error, LostPeerError)
        code, message, _ = describe(error)
        waits_s = _CAUSE_S if is_victim else _SPEAKER_S if self.ranks.rank else 0.0
        try:
            poll(lambda: self.store.check([key("speaker")]), waits_s)
            mine = json.dumps({"rank": self.ranks.rank, "code": code, "explains": not is_victim})
            speaker = parse_json(self.store.compare_set(key("speaker"), "", mine))
            if speaker["explains"] or is_victim:
                heartbeat.enter(Phase.DONE)  # or the node's watchdog would say once more that this rank has gone
            self.store.add(key("ended"), 1)
            self._let_others_end()
        except RuntimeError:  # rank 0 has ended, and has said why if it could
            if is_victim:
                raise without_rank_0(self.ranks, message) from error
            return
        if speaker["rank"] != self.ranks.rank:
            raise ToldError(message, speaker["code"]) from error
        if self.ranks.rank and isinstance(error, PhalanxError) and not is_victim:  # or rank 0 had spoken
            raise GroupError(message_of([self._problem(message, code)], self.ranks.world), code) from error

    def _let_others_end(self) -> None:
        """On the rank that holds the store: ends the other ranks' collectives, and keeps the store until they have read
        who prints."""
        if self._found and self._found.holds:
            break_connections(keep=self.store)
            poll(lambda: self.store.add(key("ended"), 0) >= self.ranks.world, _CAUSE_S)

    def _problem(self, message: str, code: int) -> Problem:
        return Problem(message, code, rank=self.ranks.rank, host=platform.node())

    def _own_address(self) -> str:
        """Returns the address of this machine on the way to rank 0; empty if it is unknown."""
        if self._found is None or self._found.holds:
            return ""
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self._found.host, 1))  # sends nothing
            return probe.getsockname()[0]
        return ""


def _use_interface_towards(address: str) -> None:
    """Makes gloo use the network interface that leads to another node, unless the user has named one: by default it
    takes the address that the host's name stands for, which may be loopback."""
    if name := interface_towards(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def failed(ranks: Ranks, timeout_s: float, error: RuntimeError) -> str:
    """Returns the message about a rank that could not join for a reason that torch gives."""
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"Rank {ranks.rank} of {ranks.world} could not join the others (waited at most {timeout_s:g} s): {message}"


def _open(ranks: Ranks, address: tuple[str, int] | None, channel: OfferChannel | None, seconds: float) -> FoundStore:
    """Returns the store at an address, or that of a channel. Raises RunError, and RuntimeError of torch's store."""
    is_first = ranks.rank == 0 and not agent_listens()
    if address:
        return (hold_at if is_first else find_at)(ranks, *address, seconds)
    if channel is None:
        raise RunError(f"{ranks.source} started {ranks.world} ranks, but MASTER_ADDR and MASTER_PORT are not set")
    return (hold if is_first else find)(ranks, channel, seconds)
