"""The store of a group whose ranks another launcher has started: rank 0 holds it, the others look for it.

MASTER_ADDR and MASTER_PORT say where, if they are set. Otherwise rank 0 writes its addresses, and a token by which the
others know it, to a file that all ranks find by the launch's name.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import platform
import secrets
import socket
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
from phalanx.launch.hosts import interfaces
from phalanx.launch.lifeline import is_mine, process_state
from phalanx.launch.ranks import Ranks, seen_by_rank_0, without_rank_0

UNREACHABLE_S = 15.0
"""Seconds for which an address may be unknown or unreachable. One that refuses is waited for: rank 0 may come later."""
_ANSWER_S = 10.0  # in which what listens at an address must answer as a store
_TRY_S = 3.0  # for a connection
_LAST_TRY_S = 1.0  # torch's last try may take so long beyond its limit; a process that ends within it would abort
_POLL_S = (0.02, 0.5)  # pause between two rounds, at first and at most


def key(*names: object) -> str:
    """Returns a key of the store."""
    # Attempts share only an agent's store. Elsewhere the count is no help: it differs between agents.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if agent_listens() else ""
    return "/".join(["phalanx", attempt, *map(str, names)])


def agent_listens() -> bool:
    """Returns whether torchrun's agent holds the store at MASTER_ADDR, which then outlives an attempt of its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def poll(done: Callable[[], bool], seconds: float) -> bool:
    end, pause = time.monotonic() + seconds, _POLL_S[0]
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(2 * pause, _POLL_S[1])
    return True


# Where rank 0 may be: its addresses, the name of a launch, and the file of a launch.
_MOST_ADDRESSES = 8
_MOST_CHARACTERS = 64  # of an address or a token
_FAST = ("hsn", "ib")  # beginnings of the names of interfaces for high-speed networks (Slingshot, InfiniBand)
_IN_MEMORY = Path("/dev/shm")
_LONGEST = 4096
_WRITABLE = 0o022  # rights of others that let them change a folder
_LEFT_OVER_S = 7 * 86400.0

_NAMES = {
    "slurm": (("SLURM_JOB_ID", "SLURM_STEP_ID"), ("SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME")),
    "pals": (("PALS_APID",), ("PBS_JOBID",)),
    # A namespace is a number that comes again; where mpirun listens makes it unique among those that live.
    "openmpi": (("PMIX_NAMESPACE",), ("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid")),
    "mpich": (("I_MPI_HYDRA_UUID",), ()),  # Intel MPI
    "mvapich2": (("MPIRUN_ID",), ("MPIRUN_HOST", "MPIRUN_PORT")),
    "jsrun": (("PMIX_NAMESPACE",), ("LSB_JOBID",)),
    "flux": (("FLUX_JOB_ID",), ("FLUX_URI",)),
}
"""Variables that name a launch, by launcher: those without which it has no name, and those that are added."""


@dataclass(frozen=True)
class Offer:
    addresses: tuple[str, ...]  # addresses or host names, the best one first
    port: int
    token: str  # the store that rank 0 holds knows it: another program at the same place does not

    @classmethod
    def decode(cls, text: str) -> Offer:
        """Returns the offer that JSON stands for. Raises ValueError if it is none."""
        offer = read_as(cls, parse_json(text))
        words = [*offer.addresses, offer.token]
        are_words = all(0 < len(word) <= _MOST_CHARACTERS and word.isprintable() for word in words)
        if not 0 < offer.port < 1 << 16 or len(offer.addresses) > _MOST_ADDRESSES or not are_words:
            raise ValueError("not where a rank may be reached")
        return offer


def own_addresses(env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the addresses of this machine, in the order in which other nodes should try them: that of
    GLOO_SOCKET_IFNAME, of fast networks, of other interfaces, and loopback for ranks on this machine."""
    wanted, found = env.get("GLOO_SOCKET_IFNAME", "").split(","), list(interfaces().items())
    with suppress(OSError):  # IPv6: the global ones, not those that are valid only on one link
        rows = [row.split() for row in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
        found += [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows if row[3] == "00"]
    found.sort(key=lambda entry: (entry[0] not in wanted, entry[0] == "lo", not entry[0].startswith(_FAST)))
    return tuple(dict.fromkeys(address for _, address in found))[:_MOST_ADDRESSES]


@dataclass(frozen=True)
class Board:
    path: Path

    @classmethod
    def of(cls, name: str, env: Mapping[str, str], one_node: bool) -> Board:
        """Returns the board of a launch: in memory if its ranks are on one node, otherwise in the user's directory for
        state ($XDG_STATE_HOME, by default ~/.local/state), which nodes usually share."""
        folder = Path(env.get("XDG_STATE_HOME") or Path(env.get("HOME", "/"), ".local", "state"), "phalanx", "ranks")
        if one_node and os.access(_IN_MEMORY, os.W_OK | os.X_OK):
            folder = _IN_MEMORY / f"phalanx-ranks-{os.getuid()}"
        return cls(folder / sha256(name.encode()).hexdigest()[:24])

    def write(self, offer: Offer) -> None:
        """Writes rank 0's offer. Raises RunError if the folder cannot be made, or others can write to it."""
        folder = self.path.parent
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            if not is_mine(folder, _WRITABLE):
                raise RunError(
                    f"{folder}, where the ranks leave word for each other, belongs to another user or is writable by "
                    "others: remove it, or set MASTER_ADDR and MASTER_PORT"
                )
            for path in folder.iterdir():
                with suppress(OSError):
                    if time.time() - path.lstat().st_mtime > _LEFT_OVER_S:
                        path.unlink()
            write_atomic(self.path, json.dumps(asdict(offer)).encode())
        except OSError as error:
            raise RunError(
                f"Rank 0 cannot tell the others where it listens: {error.filename or folder}: {error.strerror or error}"
                ". Set XDG_STATE_HOME to a folder that all nodes share, or set MASTER_ADDR and MASTER_PORT."
            ) from error

    def read(self) -> list[Offer]:
        """Returns the offer, if there is one yet."""
        with suppress(OSError, ValueError):
            os.listdir(self.path.parent)  # or NFS may remember for a while that there was no such file
            if is_mine(self.path.parent, _WRITABLE):
                return [Offer.decode(read_text(self.path, _LONGEST))]
        return []

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()


def name_of(ranks: Ranks, env: Mapping[str, str]) -> str | None:
    """Returns the launcher's own name of a launch, the same for its ranks and no others; None if it gives none."""
    needed, added = _NAMES.get(ranks.source, (("",), ()))
    if all(env.get(name) for name in needed):
        return " ".join([ranks.source, *(f"{name}={env.get(name, '')}" for name in (*needed, *added))])
    known = (env.get("PALS_APID") or hydra_port()) if ranks.source == "mpich" else ""
    return f"mpich {known}" if known else None


def hydra_port() -> str:
    """Returns where the mpiexec of MPICH listens for the proxies that start its ranks, as the proxy above this process
    was told; empty if there is none. No variable of MPICH names a launch."""
    process = process_state(os.getpid())
    while process is not None and process.parent > 1:
        with suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{process.parent}/cmdline").read_bytes().decode(errors="replace").split("\0")
            return words[words.index("--control-port") + 1]
        process = process_state(process.parent)
    return ""


def board_of(ranks: Ranks, env: Mapping[str, str]) -> Board:
    """Returns the file of the ranks that a launcher has started. Raises RunError if the launch has no name."""
    name = name_of(ranks, env)
    if name is None:
        raise RunError(
            f"{ranks.source} started {ranks.world} ranks, but gave them nothing by which they find each other: set "
            "MASTER_ADDR to a host name of rank 0's node and MASTER_PORT to a free port, the same for every rank."
        )
    return Board.of(name, env, ranks.one_node)


# The store.
@dataclass(frozen=True)
class FoundStore:
    store: Store
    host: str  # the address by which this rank reaches it
    holds: bool = False


def listening_socket(port: int, one_node: bool) -> socket.socket:
    """Returns a socket that listens on a port (0: any), on loopback if all ranks are on one node. Nobody can take the
    port between its choice and its use. Raises OSError if it is not free."""
    if not one_node and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("127.0.0.1" if one_node else "", port))


def served(listener: socket.socket, world: int, seconds: float) -> Store:
    """Returns a store that serves on a socket that listens, and takes the socket over."""
    port, limit = listener.getsockname()[1], timedelta(seconds=seconds)
    return TCPStore("127.0.0.1", port, world, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def connected(host: str, port: int, world: int, seconds: float, *, knocks: bool = True) -> Store | None:
    """Returns the store at an address; None if what listens there does not answer in time, or not as a store. Raises
    OSError if nothing listens there, which is tried first (`knocks`): torch would write stack traces."""
    if knocks:
        socket.create_connection((host, port), timeout=seconds).close()
    found: list[Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            found.append(TCPStore(host, port, world, False, timedelta(seconds=seconds), wait_for_workers=False))

    # torch waits without limit for the answer of something that only accepts the connection.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds + _LAST_TRY_S)
    return found[0] if found else None


def hold(ranks: Ranks, board: Board, seconds: float) -> FoundStore:
    """Returns the store of rank 0, which all others can find from now on. Raises RunError."""
    with listening_socket(0, ranks.one_node) as listener:
        port, token = listener.getsockname()[1], secrets.token_hex(16)
        store = served(listener, ranks.world, seconds)
    store.set(key("listening", token), str(os.getpid()))
    addresses = ("127.0.0.1",) if ranks.one_node else own_addresses(os.environ)
    atexit.register(board.remove)  # also after a meeting that fails
    board.write(Offer(addresses, port, token))
    return FoundStore(store, addresses[0], holds=True)


def find(ranks: Ranks, board: Board, seconds: float) -> FoundStore:
    """Returns the store that rank 0 holds. Raises RunError if it is not found in time."""
    end = time.monotonic() + seconds
    tried: dict[str, str] = {}
    found: list[FoundStore] = []

    def looked() -> bool:
        for offer in board.read():
            for host in offer.addresses:
                if store := _of_this_launch(host, offer, ranks, end, tried):
                    found.append(FoundStore(store, host))
                    return True
        return False

    if poll(looked, seconds):
        return found[0]
    why = "; ".join(f"{place}: {reason}" for place, reason in list(tried.items())[:4]) or "no word of it"
    raise without_rank_0(
        ranks,
        f"After {seconds:g} s, rank {ranks.rank} of {ranks.world} on {platform.node()} has not found rank 0 by the "
        f"file {board.path} ({why}). Check that rank 0 was started, that its node can be reached, and that all nodes "
        "see the folder of the file ($XDG_STATE_HOME names another), or set MASTER_ADDR and MASTER_PORT.",
    )


def _of_this_launch(host: str, offer: Offer, ranks: Ranks, end: float, tried: dict[str, str]) -> Store | None:
    """Returns the store at a place if it is that of this launch, and not that of an earlier run in the same step, in
    which this rank has been."""
    place = f"{host}:{offer.port}"
    try:
        store = connected(host, offer.port, ranks.world, max(0.5, min(_TRY_S, end - time.monotonic())))
        earlier = [key("verdict"), key("entry", ranks.rank, 1)]
        if store is not None and store.check([key("listening", offer.token)]) and not store.check(earlier):
            store.set_timeout(timedelta(seconds=max(1.0, end - time.monotonic())))
            return store
        tried[place] = "another program listens there"
    except OSError as error:
        tried[place] = str(error.strerror or error)
    except RuntimeError:
        tried[place] = "another program listens there"
    return None


def hold_at(ranks: Ranks, host: str, port: int, seconds: float) -> FoundStore:
    """Returns the store of rank 0 at MASTER_ADDR:MASTER_PORT. Of two processes with rank 0 the second one gets that of
    the first, which tells them apart.

    Raises RunError if the port is in use, or the address is not of this machine."""
    try:
        listener = listening_socket(port, one_node=False)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            with suppress(OSError):
                if store := connected(host, port, ranks.world, _TRY_S):
                    return FoundStore(store, host)
        reason = os.strerror(error.errno or errno.EADDRINUSE).lower()
        raise RunError(
            f"Rank 0 of {ranks.world} cannot listen on MASTER_PORT={port} of {platform.node()}: "
            f"{reason}. Set MASTER_PORT to a free port, the same for every rank, "
            "or unset MASTER_ADDR and MASTER_PORT where srun or mpiexec start the ranks: they then find a free one."
        ) from error
    store = served(listener, ranks.world, seconds)
    require_own_address(store, ranks.world, host, port)
    return FoundStore(store, host, holds=True)


def require_own_address(store: Store, world: int, host: str, port: int) -> None:
    """Raises RunError if a connection to MASTER_ADDR does not come to this store, which rank 0 holds: another machine
    may listen at the same port."""
    mine = key("own", secrets.token_hex(8))
    store.set(mine, "")
    reason = "another program answers there"
    try:
        found = connected(host, port, world, _TRY_S)
        if found is not None and found.check([mine]):
            return
    except OSError as error:
        reason = str(error.strerror or error)
    except RuntimeError:  # it answers, but not as a store
        pass
    here = platform.node()
    raise RunError(
        f"MASTER_ADDR={host} does not lead to rank 0, which runs on {here} ({reason}): set it to a name or address "
        f"of {here}, or unset MASTER_ADDR and MASTER_PORT where srun or mpiexec start the ranks."
    )


def find_at(ranks: Ranks, host: str, port: int, seconds: float) -> FoundStore:
    """Returns the store at MASTER_ADDR:MASTER_PORT. Raises RunError if there is none in time."""
    began, limit = time.monotonic(), min(seconds, _ANSWER_S)
    checks = advice(ranks.world, f"{host}:{port}")
    if problem := await_listener(host, port, seconds):
        # Rank 0 looks up its own address, too.
        ends = seen_by_rank_0 if isinstance(problem, socket.gaierror) else without_rank_0
        raise ends(
            ranks,
            f"After {time.monotonic() - began:.0f} s, rank 0 of {ranks.world} did not come: {host}:{port}: "
            f"{problem.strerror or problem}.\n{checks}",
        )
    store = connected(host, port, ranks.world, limit, knocks=False)
    if store is None:
        raise seen_by_rank_0(
            ranks,
            f"After {limit:g} s, what listens at {host}:{port} has not answered rank {ranks.rank} of {ranks.world}: "
            f"another program uses the port, or rank 0 hangs.\n{checks}",
        )
    store.set_timeout(timedelta(seconds=seconds))
    return FoundStore(store, host)


def await_listener(host: str, port: int, seconds: float) -> OSError | None:
    """Waits for something that listens, and returns why there is nothing. An address that is unknown or unreachable is
    waited for UNREACHABLE_S at most."""
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


def advice(world: int, where: str) -> str:
    """Returns what to check if ranks do not meet."""
    return (
        f"Check that all {world} ranks were started, that every node reaches {where} (rank 0's node; name, firewall, "
        "port not in use), and that GLOO_SOCKET_IFNAME, where set, names an interface of every node."
    )
