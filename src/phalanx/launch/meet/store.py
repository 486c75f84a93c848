"""The store of a group whose ranks another launcher has started: rank 0 holds it, the others look for it."""

from __future__ import annotations

import atexit
import errno
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed.*, to the type stubs

from phalanx.errors import RunError
from phalanx.launch.meet.channel import OfferChannel
from phalanx.launch.meet.keys import key
from phalanx.launch.meet.offer import Offer, listening_socket, own_addresses
from phalanx.launch.meet.told import seen_by_rank_0, without_rank_0
from phalanx.launch.ranks import Ranks

ANSWER_S = 10.0
"""Seconds in which what listens at an address must answer as a store."""
UNREACHABLE_S = 15.0
"""Seconds for which an address may be unknown or unreachable. One that refuses is waited for: rank 0 may come later."""
_TRY_S = 3.0  # for a connection
_POLL_S = (0.02, 0.5)  # pause between two rounds, at first and at most


@dataclass(frozen=True)
class FoundStore:
    """A store, and where it is."""

    store: Store
    host: str
    """The address by which this rank reaches it."""
    holds: bool = False
    """True if it is in this process."""


def hold(ranks: Ranks, channel: OfferChannel, seconds: float) -> FoundStore:
    """Returns the store of rank 0, which all others can find from now on. Raises RunError."""
    with listening_socket(channel.ports, ranks.one_node) as listener:
        port = listener.getsockname()[1]
        store = served(listener, ranks.world, seconds)
    store.set(key("listening", channel.token), str(os.getpid()))
    addresses = ("127.0.0.1",) if ranks.one_node else own_addresses(os.environ)
    atexit.register(channel.forget)  # also after a meeting that fails
    try:
        channel.announce(Offer(addresses, port, channel.token), seconds)
    except OSError as error:
        raise RunError(_not_told(ranks, channel, error)) from error
    return FoundStore(store, addresses[0], holds=True)


def find(ranks: Ranks, channel: OfferChannel, seconds: float) -> FoundStore:
    """Returns the store that rank 0 holds. Raises RunError if it is not found in time."""
    end, pause = time.monotonic() + seconds, _POLL_S[0]
    tried: dict[str, str] = {}
    while True:
        try:
            offers = channel.offers(max(0.1, end - time.monotonic()))
        except OSError as error:
            raise seen_by_rank_0(ranks, _not_told(ranks, channel, error)) from error
        for offer in offers:
            for host in offer.addresses:
                if store := _of_this_launch(host, offer, ranks, end, tried):
                    return FoundStore(store, host)
        if time.monotonic() > end:
            why = "; ".join(f"{place}: {reason}" for place, reason in list(tried.items())[:4]) or "no word of it"
            raise without_rank_0(
                ranks,
                f"After {seconds:g} s, rank {ranks.rank} of {ranks.world} on {platform.node()} has not found rank 0 by "
                f"{channel.how} ({why}). Check that rank 0 was started and that its node can be reached, or set "
                "MASTER_ADDR and MASTER_PORT.",
            )
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(2 * pause, _POLL_S[1])


def _of_this_launch(host: str, offer: Offer, ranks: Ranks, end: float, tried: dict[str, str]) -> Store | None:
    """Returns the store at a place if it is that of this launch, and not that of an earlier run in the same step, in
    which this rank has been."""
    place = f"{host}:{offer.port}"
    seconds = max(0.5, min(_TRY_S, end - time.monotonic()))
    try:
        socket.create_connection((host, offer.port), timeout=seconds).close()
        store = connected(host, offer.port, ranks.world, seconds)
        earlier = [key("verdict"), key("entry", ranks.rank, 1)]
        if store is None or not store.check([key("listening", offer.token)]) or store.check(earlier):
            tried[place] = "another program listens there"
            return None
        store.set_timeout(timedelta(seconds=max(1.0, end - time.monotonic())))
    except OSError as error:
        tried[place] = str(error.strerror or error)
        return None
    except RuntimeError:
        tried[place] = "another program listens there"
        return None
    return store


def served(listener: socket.socket, world: int, seconds: float) -> Store:
    """Returns a store that serves on a socket that listens, and takes the socket over."""
    port, limit = listener.getsockname()[1], timedelta(seconds=seconds)
    return TCPStore("127.0.0.1", port, world, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def connected(host: str, port: int, world: int, seconds: float) -> Store | None:
    """Returns the store at an address; None if what listens there does not answer in time. Raises RuntimeError if it
    answers, but not as a store."""
    found: list[Store | RuntimeError] = []

    def connect() -> None:
        try:
            found.append(TCPStore(host, port, world, False, timedelta(seconds=seconds), wait_for_workers=False))
        except RuntimeError as error:
            found.append(error)

    # torch waits without limit for the answer of something that only accepts the connection.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        return None
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def hold_at(ranks: Ranks, host: str, port: int, seconds: float) -> FoundStore:
    """Returns the store of rank 0 at MASTER_ADDR:MASTER_PORT. Of two processes with rank 0 the second one gets that of
    the first, which tells them apart.

    Raises RunError if the port is in use, or the address is not of this machine."""
    try:
        listener = listening_socket((port,), one_node=False)
    except OSError as error:
        store = _store_of_another_rank_0(host, port, ranks.world) if error.errno == errno.EADDRINUSE else None
        if store is None:
            reason = os.strerror(error.errno or errno.EADDRINUSE).lower()
            raise RunError(
                f"Rank 0 of {ranks.world} cannot listen on MASTER_PORT={port} of {platform.node()}: "
                f"{reason}. Set MASTER_PORT to a free port, the same for every rank, "
                "or unset MASTER_ADDR and MASTER_PORT where srun or mpiexec start the ranks: they then find a free one."
            ) from error
        return FoundStore(store, host)
    store = served(listener, ranks.world, seconds)
    _require_own_address(host, port)
    return FoundStore(store, host, holds=True)


def find_at(ranks: Ranks, host: str, port: int, seconds: float) -> FoundStore:
    """Returns the store at MASTER_ADDR:MASTER_PORT. Raises RunError if there is none in time."""
    _await_listener(ranks, host, port, seconds)
    limit = min(seconds, ANSWER_S)
    store = connected(host, port, ranks.world, limit)
    if store is None:
        raise seen_by_rank_0(
            ranks,
            f"After {limit:g} s, what listens at {host}:{port} has not answered rank {ranks.rank} of {ranks.world}: "
            f"another program uses the port, or rank 0 hangs.\n{advice(ranks.world, f'{host}:{port}')}",
        )
    store.set_timeout(timedelta(seconds=seconds))
    return FoundStore(store, host)


def _store_of_another_rank_0(host: str, port: int, world: int) -> Store | None:
    try:
        socket.create_connection((host, port), timeout=_TRY_S).close()
        return connected(host, port, world, _TRY_S)
    except (OSError, RuntimeError):
        return None


def _require_own_address(host: str, port: int) -> None:
    """Raises RunError if a connection to MASTER_ADDR does not come to this machine, where rank 0 listens."""
    try:
        socket.create_connection((host, port), timeout=_TRY_S).close()
    except OSError as error:
        raise RunError(
            f"MASTER_ADDR={host} does not lead to rank 0, which runs on {platform.node()} "
            f"({error.strerror or error}): set it to a name or address of {platform.node()}, or unset MASTER_ADDR and "
            "MASTER_PORT where srun or mpiexec start the ranks."
        ) from error


def _await_listener(ranks: Ranks, host: str, port: int, seconds: float) -> None:
    began = time.monotonic()
    problem = await_listener(host, port, seconds)
    if problem is not None:
        # Rank 0 looks up its own address, too.
        ends = seen_by_rank_0 if isinstance(problem, socket.gaierror) else without_rank_0
        raise ends(
            ranks,
            f"After {time.monotonic() - began:.0f} s, rank 0 of {ranks.world} did not come: {host}:{port}: "
            f"{problem.strerror or problem}.\n{advice(ranks.world, f'{host}:{port}')}",
        )


def await_listener(host: str, port: int, seconds: float) -> OSError | None:
    """Waits for something that listens, and returns why there is nothing. torch waits too, but writes stack traces
    meanwhile. An address that is unknown or unreachable is waited for UNREACHABLE_S at most."""
    refused = time.monotonic()
    problem: OSError | None = None

    def is_over() -> bool:
        nonlocal problem, refused
        try:
            socket.create_connection((host, port), timeout=max(1.0, min(_TRY_S, seconds))).close()
        except OSError as error:
            problem = error
            if isinstance(error, ConnectionRefusedError):
                refused = time.monotonic()
            return time.monotonic() - refused > UNREACHABLE_S
        problem = None
        return True

    poll(is_over, seconds)
    return problem


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Returns whether `done` came true in time."""
    end, pause = time.monotonic() + seconds, _POLL_S[0]
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])
    return True


def advice(world: int, where: str) -> str:
    """Returns what to check if ranks do not meet."""
    return (
        f"Check that all {world} ranks were started, that every node reaches {where} (rank 0's node; name, firewall, "
        "port not in use), and that GLOO_SOCKET_IFNAME, where set, names an interface of every node."
    )


def _not_told(ranks: Ranks, channel: OfferChannel, error: OSError) -> str:
    return (
        f"The {ranks.world} ranks of {ranks.source} cannot find each other by {channel.how}: "
        f"{error.strerror or error}. Check that all of them were started, and that no program before this one ran in "
        "the same mpiexec; or set MASTER_ADDR and MASTER_PORT, the same for every rank."
    )
