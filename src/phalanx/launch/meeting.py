"""The ranks that another launcher started, from their start to their end: they meet, and they end with one message.

A process group forms only among ranks that are all there. Otherwise every one of them waits for the whole timeout, and
torch names nobody. So a roll call comes first: all ranks are there, once each, expect the same, and have no problem;
otherwise rank 0 says why. And N ranks that find the same mistake in a job would print it N times.

They meet in a store that rank 0 holds. MASTER_ADDR and MASTER_PORT say where, if they are set; otherwise rank 0 writes
its addresses, and a token by which the others know it, to a file that all ranks find by the launch's name.
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore  # torch.distributed.*, to the type stubs

from phalanx.bounded import parse_json, read_text
from phalanx.config.values import read_as
from phalanx.data.files import write_atomic
from phalanx.errors import JobError, PhalanxError, RunError, StoppedError
from phalanx.launch.hosts import address_towards, interface_towards, interfaces
from phalanx.launch.lifeline import boot_id, hydra_port, is_mine
from phalanx.launch.ranks import STORE, GroupError, Ranks, ToldError, rendezvous_address, seen_by_rank_0, without_rank_0
from phalanx.launch.verdict import LostPeerError, describe
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.units import listed

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
        state ($XDG_STATE_HOME, by default ~/.local/state), which nodes usually share. Where compute nodes do not mount
        the home directory, or only to read (ARCHER2, Frontier), it is in the working directory."""
        home = Path(env.get("HOME", "/"))
        folder = Path(env.get("XDG_STATE_HOME") or home / ".local" / "state", "phalanx", "ranks")
        if not (env.get("XDG_STATE_HOME") or os.access(home, os.W_OK | os.X_OK)):
            folder = Path(".phalanx", "ranks").absolute()
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


def served(listener: socket.socket, world: int, seconds: float, host: str = "127.0.0.1") -> Store:
    """Returns a store that serves on a socket that listens, at `host` among others, and takes the socket over."""
    port, limit = listener.getsockname()[1], timedelta(seconds=seconds)
    return TCPStore(host, port, world, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


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


GRACE_S = 5.0
"""Seconds that others wait longer than rank 0, which names who is missing; and that its store waits to be read."""
REFUSAL_S = 30.0  # seconds for which a rank with a problem waits for the others to tell them
_MORE_PROBLEMS_S = 2.0  # from the first problem until rank 0 gives its verdict, if not all ranks are there
_SHOWN = 16  # ranks in a message
_SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class Problem:
    message: str
    code: int = RunError.exit_code
    own: bool = True  # true if the message does not say which rank has it
    rank: int = -1
    host: str = ""


@dataclass(frozen=True)
class Verdict:
    message: str  # empty if the group is complete
    code: int
    nodes: tuple[int, ...]
    """The node of every rank, numbered as they come; empty if all ranks know their place on their node."""
    address: str
    """An address of a rank on another node than rank 0, as rank 0's node can reach it; empty if there is none."""


def enter(store: Store, ranks: Ranks) -> Problem | None:
    """Enters this process under its rank. Returns a problem if another process has the same rank."""
    number = store.add(key("entries", ranks.rank), 1)
    me = f"process {os.getpid()} on host {platform.node()}"
    store.set(key("entry", ranks.rank, number), me)
    if number == 1 or agent_listens():
        return None
    first = store.get(key("entry", ranks.rank, 1)).decode(errors="replace")
    return Problem(
        f"Two processes have rank {ranks.rank} of {ranks.world}: {first}, and {me}. Give every process its own "
        "RANK; where one was restarted, restart all of them.",
        own=False,
    )


def missing(store: Store, world: int) -> str:
    """Returns the ranks that have not entered, in words; empty if all have."""
    return _ranks([rank for rank in range(world) if not store.check([key("entry", rank, 1)])])


def roll_call(
    ranks: Ranks,
    found: FoundStore,
    timeout_s: float,
    expected: Mapping[str, object],
    problem: Problem | None = None,
    *,
    address: str = "",
    advice: str = "",
) -> Verdict:
    """Answers the roll call in a store that rank 0 holds, and returns the verdict once all ranks are there. Rank 0
    waits `timeout_s` for them, and tells what to check (`advice`) if some are missing. `expected` must be the same on
    all ranks (JSON-able); with a `problem` this rank cannot take part; `address` is its own, as rank 0's node can reach
    it.

    Raises on every rank that is there, if one is missing, has a problem, or expects something else: GroupError on
    rank 0, ToldError on the others. RuntimeError if the store is gone.
    """
    store, rank = found.store, ranks.rank
    store.add(key("callers"), 1)
    if rank == 0:
        store.set(key("expected"), json.dumps(expected))
    difference = _difference(ranks, expected, parse_json(store.get(key("expected"))))
    problem = enter(store, ranks) or problem or difference
    if problem:
        me = replace(problem, rank=rank, host=platform.node())
        store.set(key("problem", store.add(key("numbers"), 1)), json.dumps(asdict(me)))
        store.add(key("problems"), 1)
    is_second = problem is not None and not problem.own and problem.message.startswith("Two processes")
    if not is_second:
        store.set(key("node", rank), json.dumps([_node(ranks), address]))
        if ranks.local_rank is None or ranks.local_world is None:
            store.add(key("unplaced"), 1)
        store.add(key("arrived"), 1)
        if rank == 0:
            store.set(key("verdict"), json.dumps(asdict(_judged(store, ranks.world, timeout_s, advice))))
    store.wait([key("verdict")], timedelta(seconds=(REFUSAL_S if problem else timeout_s) + GRACE_S))
    verdict = read_as(Verdict, parse_json(store.get(key("verdict"))))
    if not verdict.message:
        return verdict
    with suppress(RuntimeError):  # another process with rank 0 held the store that all connected to
        store.add(key("heard"), 1)
    if found.holds:
        atexit.register(_wait_for_readers, store, ranks.world)
    raise (ToldError if rank or is_second else GroupError)(verdict.message, verdict.code)


def _difference(ranks: Ranks, expected: Mapping[str, object], first: Mapping[str, object]) -> Problem | None:
    """Returns what rank 0 expects otherwise."""
    name = next((name for name, value in expected.items() if first.get(name, value) != value), None)
    if name is None:
        return None
    return Problem(
        f"rank {ranks.rank} on host {platform.node()} has {name} {expected[name]}, but rank 0 {first[name]}: start all "
        "ranks with the same settings",
        own=False,
    )


def _judged(store: Store, world: int, timeout_s: float, advice: str) -> Verdict:
    """Waits for all ranks, or for a while after the first problem. Returns rank 0's verdict."""
    end = time.monotonic() + timeout_s

    def complete() -> bool:
        nonlocal end
        if store.add(key("problems"), 0):
            end = min(end, time.monotonic() + _MORE_PROBLEMS_S)
        return store.add(key("arrived"), 0) >= world or time.monotonic() > end

    poll(complete, timeout_s + GRACE_S)
    names = [key("problem", number) for number in range(1, store.add(key("numbers"), 0) + 1)]
    if problems := [read_as(Problem, parse_json(store.get(name))) for name in names if store.check([name])]:
        return Verdict(message_of(problems, world), max(each.code for each in problems), (), "")
    if absent := missing(store, world):
        return Verdict(
            f"After {timeout_s:g} s, {absent} of {world} did not come.\n{advice}", RunError.exit_code, (), ""
        )
    nodes = [parse_json(text) for text in store.multi_get([key("node", rank) for rank in range(world)])]
    address = next((address for node, address in nodes if address and node != nodes[0][0]), "")
    if not store.add(key("unplaced"), 0):
        return Verdict("", 0, (), address)
    numbers = {node: number for number, node in enumerate(dict.fromkeys(node for node, _ in nodes))}
    return Verdict("", 0, tuple(numbers[node] for node, _ in nodes), address)


def _wait_for_readers(store: Store, world: int) -> None:
    """Keeps the store, once the message has been printed, until all ranks have read the verdict: also those that come
    later, unless ranks were missing anyway."""
    has_problems = store.add(key("problems"), 0) > 0
    readers = world if has_problems else store.add(key("callers"), 0)
    poll(lambda: store.add(key("heard"), 0) >= readers, REFUSAL_S if has_problems else GRACE_S)


def message_of(problems: Sequence[Problem], world: int) -> str:
    """Returns the message about the problems of some ranks, each once: what all ranks have needs no rank; else it says
    which ranks have it, and their hosts."""
    ranks_by_message: dict[str, list[Problem]] = {}
    for each in sorted(problems, key=lambda each: each.rank):
        ranks_by_message.setdefault(each.message, []).append(each)
    lines = []
    for message, found in list(ranks_by_message.items())[:_SHOWN_PROBLEMS]:
        if not found[0].own or len(found) == world:
            lines.append(message)
            continue
        hosts = list(dict.fromkeys(each.host for each in found))
        where = f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts ({', '.join(hosts[:4])})"
        lines.append(f"{_ranks([each.rank for each in found])} of {world} on {where}: {message}")
    if (rest := len(ranks_by_message) - _SHOWN_PROBLEMS) > 0:
        lines.append(f"and {rest} more problems")
    return "\n".join(lines)


def placed(ranks: Ranks, verdict: Verdict) -> Ranks:
    """Returns a rank's place with what its launcher has not said: its place among the ranks of its node."""
    if not verdict.nodes:
        return ranks
    node = verdict.nodes[ranks.rank]
    local_rank = verdict.nodes[: ranks.rank].count(node) if ranks.local_rank is None else ranks.local_rank
    local_world = ranks.local_world or Counter(verdict.nodes)[node]
    return replace(ranks, local_rank=local_rank, local_world=local_world, node_rank=node)


def _node(ranks: Ranks) -> str:
    """Returns what the ranks of one node have in common. Virtual nodes of Slurm share the name of their machine."""
    name = os.environ.get("SLURMD_NODENAME", "") if ranks.source == "slurm" else ""
    return f"{platform.node()} {boot_id()} {name}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, _SHOWN)}" if ranks else ""


# The connections of this process to its peers.
class Leaving(Protocol):
    """What connects this process with peers and is no socket, such as memory that ranks share."""

    def leave(self) -> None:
        """Makes peers that wait for this process fail."""
        ...


connections: WeakSet[Leaving] = WeakSet()


def break_connections(keep: Store) -> None:
    """Ends the connections of this process, but those of the store `keep`, which may go on to serve.

    A peer inside a collective then fails at once, as it would when this process ends. torch's gloo backend has no such
    operation: `abort` leaves its connections open.
    """
    for connection in list(connections):
        connection.leave()
    port = keep.port if isinstance(keep, TCPStore) else 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                )
                if is_tcp and port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_RDWR)


_SPEAKER_S = 1.0  # seconds for which a rank with an error waits for rank 0 to say that it prints the same
_CAUSE_S = 3.0
"""Seconds for which a rank that only lost a peer waits for the rank that failed first, and rank 0 for the others."""


class Meeting:
    """One rank's part."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks  # this rank's place; after `join` without gaps
        self._found: FoundStore | None = None
        self._complete = self._hopeless = False

    @property
    def store(self) -> Store:
        assert self._found is not None, "the ranks have met"
        return self._found.store

    def join(self, timeout_s: float, expected: Mapping[str, object] | None = None) -> Ranks:
        """Returns this rank's place once all ranks are there and expect the same (JSON-able). Ranks of torchrun meet in
        the store of its agent, which has numbered them: they need no roll call.

        Raises RunError, of which one rank at most is no ToldError: there is no way to meet, ranks are missing, two
        processes have one rank, or a rank expects something else, or has a problem. JobError if MASTER_ADDR or
        MASTER_PORT is wrong.
        """
        ranks = self.ranks
        if ranks.world == 1:
            self._found, self._complete = FoundStore(HashStore(), ""), True
            return ranks
        if STORE in os.environ:  # a file of our own launcher, which has numbered its ranks
            self._found, self._complete = FoundStore(FileStore(os.environ[STORE], ranks.world), ""), True
            if problem := enter(self.store, ranks):
                raise RunError(problem.message)
            return ranks
        try:
            address = rendezvous_address(os.environ)
            board = None if address else board_of(ranks, os.environ)
            self._hopeless = True  # until there is a store: an error is then about the meeting itself
            self._found = _open(ranks, address, board, timeout_s)
            self._hopeless = False
            if agent_listens():
                enter(self.store, ranks)
            else:
                where = f"{address[0]}:{address[1]}" if address else f"{self._found.host}"
                checks, expected = advice(ranks.world, where), {"world size": ranks.world, **(expected or {})}
                own = "" if self._found.holds else address_towards(self._found.host)
                verdict = roll_call(ranks, self._found, timeout_s, expected, address=own, advice=checks)
                self.ranks = placed(ranks, verdict)
                # gloo by default takes the address that the host's name stands for, which may be loopback.
                if name := interface_towards(verdict.address if self._found.holds else self._found.host):
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                if board and self._found.holds:
                    board.remove()
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
            if self._found is None:
                address = None
                with suppress(JobError):  # that MASTER_ADDR or MASTER_PORT is wrong may be the cause of the refusal
                    address = rendezvous_address(os.environ)
                board = None if address else board_of(self.ranks, os.environ)
                self._found = _open(self.ranks, address, board, REFUSAL_S)
            roll_call(self.ranks, self._found, REFUSAL_S, {}, self._problem(trace or message, code))
        except GroupError as group:
            if str(group) != (trace or message):
                raise
        except ToldError as told:
            raise ToldError(message, told.exit_code if self._found else code) from error
        except (PhalanxError, RuntimeError, OSError):
            if isinstance(without_rank_0(self.ranks, message), ToldError):
                raise ToldError(message, code) from error

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
            if self._found and self._found.holds:
                # The others' collectives end; the store stays until they have read who prints.
                break_connections(keep=self.store)
                poll(lambda: self.store.add(key("ended"), 0) >= self.ranks.world, _CAUSE_S)
        except RuntimeError:  # rank 0 has ended, and has said why if it could
            if is_victim:
                raise without_rank_0(self.ranks, message) from error
            return
        if speaker["rank"] != self.ranks.rank:
            raise ToldError(message, speaker["code"]) from error
        if self.ranks.rank and isinstance(error, PhalanxError) and not is_victim:  # or rank 0 had spoken
            raise GroupError(message_of([self._problem(message, code)], self.ranks.world), code) from error

    def _problem(self, message: str, code: int) -> Problem:
        return Problem(message, code, rank=self.ranks.rank, host=platform.node())


def failed(ranks: Ranks, timeout_s: float, error: RuntimeError) -> str:
    """Returns the message about a rank that could not join for a reason that torch gives."""
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"Rank {ranks.rank} of {ranks.world} could not join the others (waited at most {timeout_s:g} s): {message}"


def _open(ranks: Ranks, address: tuple[str, int] | None, board: Board | None, seconds: float) -> FoundStore:
    """Returns the store at an address, or that of a board. Raises RunError, and RuntimeError of torch's store."""
    is_first = ranks.rank == 0 and not agent_listens()
    if address:
        return (hold_at if is_first else find_at)(ranks, *address, seconds)
    if board is None:
        raise RunError(f"{ranks.source} started {ranks.world} ranks, but MASTER_ADDR and MASTER_PORT are not set")
    return (hold if is_first else find)(ranks, board, seconds)
