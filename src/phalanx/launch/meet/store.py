"""The store of a group whose ranks another launcher has started: rank 0 holds it, the others look for it.

Rank 0 offers its addresses and a token by which the others know it, through whatever the launcher has for that: its
process manager, a place that every rank can compute, or a file that the ranks share.
"""

from __future__ import annotations

import atexit
import base64
import errno
import fcntl
import json
import os
import platform
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed.*, to the type stubs

from phalanx.bounded import parse_json, read_text
from phalanx.config.typed import read_as
from phalanx.data.files import write_atomic
from phalanx.errors import RunError
from phalanx.launch.hosts import expand
from phalanx.launch.meet import pmi
from phalanx.launch.ranks import Ranks, seen_by_rank_0, without_rank_0


def key(*names: object) -> str:
    """Returns a key of the store."""
    # Attempts share only an agent's store. Elsewhere the count is no help: it differs between agents.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if agent_listens() else ""
    return "/".join(["phalanx", attempt, *map(str, names)])


def agent_listens() -> bool:
    """Returns whether torchrun's agent holds the store at MASTER_ADDR, which then outlives an attempt of its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


_SIOCGIFADDR = 0x8915  # linux/sockios.h
_MOST_ADDRESSES = 8
_MOST_CHARACTERS = 64  # characters of an address or a token
_FAST = ("hsn", "ib")
"""Beginnings of the names of interfaces for high-speed networks (Slingshot, InfiniBand)."""


@dataclass(frozen=True)
class Offer:
    """Where rank 0 may be reached."""

    addresses: tuple[str, ...]
    """Addresses or host names, the best one first."""
    port: int
    token: str
    """The store that rank 0 holds knows it: another program at the same place does not."""

    def encode(self) -> str:
        """Returns the offer as one word of printable ASCII."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, text: str) -> Offer:
        """Returns the offer that a word stands for. Raises ValueError if it is none."""
        offer = read_as(cls, parse_json(base64.urlsafe_b64decode(text)))
        words = [*offer.addresses, offer.token]
        are_words = all(0 < len(word) <= _MOST_CHARACTERS and word.isprintable() for word in words)
        if not 0 < offer.port < 1 << 16 or len(offer.addresses) > _MOST_ADDRESSES or not are_words:
            raise ValueError("not where a rank may be reached")
        return offer


def listening_socket(ports: tuple[int, ...], one_node: bool) -> socket.socket:
    """Returns a socket that listens on the first free of `ports` (0: any), on loopback if all ranks are on one node.

    Nobody can take the port between its choice and its use. Raises OSError if none is free.
    """
    for port in ports:
        try:
            if not one_node and socket.has_dualstack_ipv6():
                return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("127.0.0.1" if one_node else "", port))
        except OSError:
            if port == ports[-1]:
                raise
    raise AssertionError("there is at least one port")


def own_addresses(env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the addresses of this machine, in the order in which other nodes should try them: that of
    GLOO_SOCKET_IFNAME, of fast networks, of other interfaces, and loopback for ranks on this machine."""
    wanted = env.get("GLOO_SOCKET_IFNAME", "").split(",")
    addresses = _ipv4_addresses() + _ipv6_addresses()

    def order(entry: tuple[str, str]) -> tuple[bool, bool, bool]:
        name, _ = entry
        return name not in wanted, name == "lo", not name.startswith(_FAST)

    found = [address for _, address in sorted(addresses, key=order)]
    return tuple(dict.fromkeys(found))[:_MOST_ADDRESSES]


def _ipv4_addresses() -> list[tuple[str, str]]:
    """Returns interfaces with their address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Returns interfaces with their global addresses (not those that are valid only on one link)."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows if row[3] == "00"]


# Tells all ranks what rank 0 says, through a file that they share: for launchers that offer nothing better.
_IN_MEMORY = Path("/dev/shm")
_LONGEST = 4096
_LEFT_OVER_S = 7 * 86400.0


@dataclass(frozen=True)
class Board:
    """The file of one launch."""

    path: Path

    @classmethod
    def of(cls, key: str, env: Mapping[str, str], one_node: bool) -> Board:
        """Returns the board of the launch that is called `key`: in memory if its ranks are on one node, otherwise in
        the user's directory for state ($XDG_STATE_HOME, by default ~/.local/state), which nodes usually share."""
        folder = Path(env.get("XDG_STATE_HOME") or Path(env.get("HOME", "/"), ".local", "state"), "phalanx", "ranks")
        if one_node and os.access(_IN_MEMORY, os.W_OK | os.X_OK):
            folder = _IN_MEMORY / f"phalanx-ranks-{os.getuid()}"
        return cls(folder / sha256(key.encode()).hexdigest()[:24])

    def write(self, offer: Offer) -> None:
        """Writes rank 0's offer. Raises RunError if the folder cannot be made, or others can write to it."""
        folder = self.path.parent
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            _require_private(folder)
            _remove_left_over(folder)
            write_atomic(self.path, offer.encode().encode())
        except OSError as error:
            raise RunError(
                f"Rank 0 cannot tell the others where it listens: {error.filename or folder}: {error.strerror or error}"
                ". Set XDG_STATE_HOME to a folder that all nodes share, or set MASTER_ADDR and MASTER_PORT."
            ) from error

    def read(self) -> list[Offer]:
        """Returns the offer, if there is one yet."""
        with suppress(OSError, ValueError, RunError):
            os.listdir(self.path.parent)  # or NFS may remember for a while that there was no such file
            _require_private(self.path.parent)
            return [Offer.decode(read_text(self.path, _LONGEST).strip())]
        return []

    def remove(self) -> None:
        """Removes the file once all ranks have met."""
        with suppress(OSError):
            self.path.unlink()


def _require_private(folder: Path) -> None:
    """Raises RunError unless only this user can write to a folder, which may be in a place where others can."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise RunError(
            f"{folder}, where the ranks leave word for each other, belongs to another user or is writable by others: "
            "remove it, or set MASTER_ADDR and MASTER_PORT"
        )


def _remove_left_over(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LEFT_OVER_S:
                path.unlink()


# The launcher's own name of a launch, the same for its ranks and no others. Pure functions of the environment.
_NAMES = {
    "slurm": (("SLURM_JOB_ID", "SLURM_STEP_ID"), ("SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME")),
    "pals": (("PALS_APID",), ("PBS_JOBID",)),
    # A namespace is a number that comes again; where mpirun listens makes it unique among those that live.
    "openmpi": (("PMIX_NAMESPACE",), ("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid")),
    "mpich": (("PALS_APID",), ()),
    "mvapich2": (("MPIRUN_ID",), ("MPIRUN_HOST", "MPIRUN_PORT")),
    "jsrun": (("PMIX_NAMESPACE",), ("LSB_JOBID",)),
    "flux": (("FLUX_JOB_ID",), ("FLUX_URI",)),
}
"""Variables that name a launch, by launcher: those without which it has no name, and those that are added."""

_FIRST_PORT, _PORTS = 10_000, 20_000
"""Below 32768, where Linux begins to choose ports for connections."""
_TRIES = 8


def name_of(ranks: Ranks, env: Mapping[str, str]) -> str | None:
    """Returns the name of the launch, or None if its launcher gives none."""
    needed, added = _NAMES.get(ranks.source, (("",), ()))
    if not all(env.get(name) for name in needed):
        return None
    return " ".join([ranks.source, *(f"{name}={env.get(name, '')}" for name in (*needed, *added))])


def token_of(name: str) -> str:
    """Returns the token of a launch, for ranks that can only compute it. It is no secret."""
    return sha256(f"phalanx token {name}".encode()).hexdigest()[:32]


def ports_of(name: str) -> tuple[int, ...]:
    """Returns the ports that rank 0 of a launch tries to listen on, in order."""
    digest = sha256(f"phalanx ports {name}".encode()).digest()
    return tuple(
        _FIRST_PORT + int.from_bytes(digest[2 * index : 2 * index + 2], "big") % _PORTS for index in range(_TRIES)
    )


_MOST_BYTES = 1 << 22  # of a node file


@dataclass(frozen=True)
class OfferChannel:
    """The way by which an offer of rank 0 reaches the others."""

    how: str
    """For messages: by what the ranks find each other."""
    ports: tuple[int, ...]
    """Ports that rank 0 tries, in order; 0 stands for any."""
    token: str
    """What rank 0's store must know; the offer may hold another one, which then counts."""
    announce: Callable[[Offer, float], None]
    """Publishes rank 0's offer, within so many seconds. Raises OSError or RunError."""
    offers: Callable[[float], list[Offer]]
    """Returns where rank 0 may be, as far as this rank knows now; waits for at most so many seconds. Raises OSError."""
    forget: Callable[[], None] = lambda: None
    """Removes what `announce` has left behind."""


def channel_of(ranks: Ranks, env: Mapping[str, str]) -> OfferChannel:
    """Returns the channel of the ranks that a launcher has started.

    MPICH's process manager (PMI-1), which only this launch's ranks can ask, and which names no launch; otherwise a file
    that the ranks share, and for Slurm and PALS also the first host of the launch with ports that every rank computes.

    Raises RunError if there is none.
    """
    if pmi.is_there(env):
        return _managed(env)
    name = name_of(ranks, env)
    if name is None:
        raise RunError(
            f"{ranks.source} started {ranks.world} ranks, but gave them nothing by which they find each other: set "
            "MASTER_ADDR to a host name of rank 0's node and MASTER_PORT to a free port, the same for every rank."
        )
    board = Board.of(name, env, ranks.one_node)
    host = "127.0.0.1" if ranks.one_node else first_host(ranks, env)
    ports, token = ports_of(name), token_of(name)
    computed = [Offer((host,), port, token) for port in ports] if host else []

    def announce(offer: Offer, _: float) -> None:
        try:
            board.write(offer)
        except RunError:
            if not computed:
                raise

    return OfferChannel(
        how=f"{f'host {host} or ' if host else ''}the file {board.path}",
        ports=ports if computed else (0,),
        token=token if computed else secrets.token_hex(16),
        announce=announce,
        offers=lambda _: board.read() + computed,
        forget=board.remove,
    )


def first_host(ranks: Ranks, env: Mapping[str, str]) -> str | None:
    """Returns the host of rank 0, from the node list of the Slurm step, or the node file of PBS; None if neither says
    it. Slurm's variable SLURM_LAUNCH_NODE_IPADDR is where srun runs, which may be a login node."""
    with suppress(ValueError, OSError):
        if ranks.source == "slurm":
            return next(iter(expand(env.get("SLURM_STEP_NODELIST", ""))), None)
        if ranks.source == "pals" and "PBS_NODEFILE" in env:
            with Path(env["PBS_NODEFILE"]).open(encoding="utf-8") as file:
                return next(iter(file.read(_MOST_BYTES).split()), None)
    return None


def _managed(env: Mapping[str, str]) -> OfferChannel:
    """Returns the channel through a process manager, which all ranks ask once."""
    known: list[Offer] = []

    def announce(offer: Offer, seconds: float) -> None:
        pmi.exchange(env, offer.encode(), seconds)

    def offers(seconds: float) -> list[Offer]:
        if not known:
            try:
                known.append(Offer.decode(pmi.exchange(env, None, seconds)))
            except ValueError as error:
                raise OSError(f"what rank 0 has put there is no address: {error}") from error
        return known

    return OfferChannel("the process manager (PMI)", (0,), secrets.token_hex(16), announce, offers)


ANSWER_S = 10.0
"""Seconds in which what listens at an address must answer as a store."""
UNREACHABLE_S = 15.0
"""Seconds for which an address may be unknown or unreachable. One that refuses is waited for: rank 0 may come later."""
_TRY_S = 3.0  # for a connection
_LAST_TRY_S = 1.0
"""Seconds that torch's last try may take beyond its limit. A process that ends in the middle of it would abort."""
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
    thread.join(seconds + _LAST_TRY_S)
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
    _require_own_address(store, ranks.world, host, port)
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


def _require_own_address(store: Store, world: int, host: str, port: int) -> None:
    """Raises RunError if a connection to MASTER_ADDR does not come to this store, which rank 0 holds: another machine
    may listen at the same port."""
    mine = key("own", secrets.token_hex(8))
    store.set(mine, "")
    try:
        socket.create_connection((host, port), timeout=_TRY_S).close()
        found = connected(host, port, world, _TRY_S)
        reason = "" if found is not None and found.check([mine]) else "another program answers there"
    except OSError as error:
        reason = str(error.strerror or error)
    except RuntimeError:
        reason = "another program answers there"
    if reason:
        here = platform.node()
        raise RunError(
            f"MASTER_ADDR={host} does not lead to rank 0, which runs on {here} ({reason}): set it to a name or address "
            f"of {here}, or unset MASTER_ADDR and MASTER_PORT where srun or mpiexec start the ranks."
        )


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
