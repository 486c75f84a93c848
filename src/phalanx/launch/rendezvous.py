"""Where the ranks of a group find each other: their store, and the roll call before the group is formed.

A process group forms only among ranks that are all there, once each, and expect the same world. Otherwise every one of
them waits for the whole timeout, and torch names nobody. So ranks that a user or a scheduler numbers first answer a
roll call in the store. Our own launcher and torchrun's agent number their ranks themselves.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore  # torch.distributed.*, to the type stubs

from phalanx.errors import RunError
from phalanx.launch.environment import STORE
from phalanx.launch.ranks import Ranks

_GRACE_S = 5.0
"""Seconds that others wait longer than rank 0, which names who is missing; and that its store waits to be read."""
_POLL_S = (0.005, 0.2)
"""Pause between two looks at the store, at first and at most."""
_SECOND_SERVER_S = 3.0
"""Seconds in which the holder of a port that is in use must answer as a store."""
_SHOWN_RANKS = 16
_COMPLETE = "complete"
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def open_store(ranks: Ranks, backend: str, timeout_s: float) -> Store:
    """Returns the store through which the ranks form their process group.

    Ranks of our own launcher meet in its file, a lone rank in memory, others at MASTER_ADDR:MASTER_PORT, where rank 0
    listens, or torchrun's agent. Where it is rank 0, all ranks have answered the roll call when this returns.

    Raises RunError: there is no address or no store, ranks are missing after `timeout_s` seconds, two processes have
    one rank, or a rank expects another world size or backend than rank 0. All ranks that are there name the culprit.
    """
    if STORE in os.environ:
        store = FileStore(os.environ[STORE], ranks.world)
        _enter(store, ranks)
        return store
    if ranks.world == 1:
        return HashStore()
    if not all(os.environ.get(name) for name in _ADDRESS) or not os.environ["MASTER_PORT"].isdigit():
        raise RunError(
            f"{ranks.source} started {ranks.world} ranks, but gave no rendezvous address: set MASTER_ADDR to a "
            "host name of rank 0's node and MASTER_PORT to a free port, the same for every rank."
        )
    try:
        if _agent_listens():
            store = _connect(ranks, timeout_s, listen=False)
            _enter(store, ranks)
            return store
        return _RollCall(ranks, timeout_s).answer({"world size": ranks.world, "backend": backend})
    except RuntimeError as error:
        raise RunError(_failed(ranks, timeout_s, error)) from error


def not_formed(ranks: Ranks, store: Store, timeout_s: float, error: RuntimeError) -> str:
    """Returns the message about a group that could not be formed after `open_store`: who is missing, if anyone."""
    failed = _failed(ranks, timeout_s, error)
    with suppress(RuntimeError):
        if missing := _missing(store, ranks.world):
            return f"{failed}\nNot there: {missing}. See the end of its log."
    return f"{failed}\nAll ranks joined; see the first error in their logs."


class _RollCall:
    """One rank's part in the roll call, in a store that rank 0 holds."""

    def __init__(self, ranks: Ranks, timeout_s: float):
        self.ranks, self.timeout_s = ranks, timeout_s
        self.readers = ranks.world
        """Ranks that read the verdict before the store ends with its holder."""
        self.holds_store = ranks.rank == 0
        try:
            self.store = _connect(ranks, timeout_s, listen=self.holds_store)
        except RuntimeError as error:
            if not self.holds_store or "EADDRINUSE" not in str(error):
                raise
            # Perhaps another process with rank 0 listens here. Then its store says so.
            store = _store_that_answers(ranks)
            if store is None:
                raise
            self.store, self.holds_store = store, False

    def answer(self, expected: dict[str, object]) -> Store:
        """Returns the store once all ranks are there. Raises RunError on every rank that is there if one is missing,
        or differs in what it `expected`."""
        problem = ""
        try:
            _enter(self.store, self.ranks)
            self._compare(expected)
            self.store.add(_key("arrived"), 1)
            if self.ranks.rank == 0:
                self._await_all()
        except RunError as error:
            problem = str(error)
            self.store.compare_set(_key("verdict"), "", problem)
        self.store.wait([_key("verdict")], timedelta(seconds=self.timeout_s + _GRACE_S))
        verdict = self.store.get(_key("verdict")).decode(errors="replace")
        if verdict == _COMPLETE and not problem:
            return self.store
        self.store.add(_key("heard"), 1)
        if self.holds_store:
            with suppress(RuntimeError):  # another process with rank 0 held the store that all connected to
                _poll(lambda: self.store.add(_key("heard"), 0) >= self.readers, _GRACE_S)
        raise RunError(problem if verdict == _COMPLETE else verdict)

    def _compare(self, expected: dict[str, object]) -> None:
        """Raises RunError if rank 0 expects something else."""
        if self.ranks.rank == 0:
            self.store.set(_key("expected"), json.dumps(expected))
            return
        first = json.loads(self.store.get(_key("expected")))
        for name, value in expected.items():
            if first.get(name) != value:
                raise RunError(
                    f"rank {self.ranks.rank} on host {platform.node()} has {name} {value}, but rank 0 "
                    f"{first.get(name)}: start all ranks with the same settings"
                )

    def _await_all(self) -> None:
        """Waits for all ranks, or for a rank that reports a problem. Raises RunError after the timeout."""
        store, world = self.store, self.ranks.world
        if _poll(lambda: store.add(_key("arrived"), 0) >= world or store.check([_key("verdict")]), self.timeout_s):
            store.compare_set(_key("verdict"), "", _COMPLETE)
            return
        self.readers = store.add(_key("arrived"), 0)
        raise RunError(
            f"After {self.timeout_s:g} s, {_missing(store, world)} of {world} did not come.\n{_advice(world)}"
        )


def _connect(ranks: Ranks, seconds: float, listen: bool) -> Store:
    """Returns the store at MASTER_ADDR:MASTER_PORT, as the one that listens there or as a client. Raises RunError if
    nothing listens there in time, or does not answer; RuntimeError if it answers, but not as a store."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def store() -> Store:
        limit = timedelta(seconds=seconds)
        return TCPStore(address, port, ranks.world, listen, limit, wait_for_workers=False, multi_tenant=True)

    if listen:
        return store()
    _await_listener(ranks, address, port, seconds)
    found: list[Store | RuntimeError] = []

    def connect() -> None:
        try:
            found.append(store())
        except RuntimeError as error:
            found.append(error)

    # torch waits without limit for the answer of something that only accepts the connection.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise RunError(
            f"After {seconds:g} s, what listens at {address}:{port} has not answered rank {ranks.rank} of "
            f"{ranks.world}: another program uses the port, or rank 0 hangs.\n{_advice(ranks.world)}"
        )
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def _await_listener(ranks: Ranks, address: str, port: int, seconds: float) -> None:
    """Waits for something that listens. torch waits too, but writes stack traces meanwhile."""
    reason: list[object] = []

    def listens() -> bool:
        try:
            socket.create_connection((address, port), timeout=max(1.0, seconds)).close()
        except OSError as error:
            reason[:] = [error.strerror or error]
            return False
        return True

    if not _poll(listens, seconds):
        raise RunError(
            f"After {seconds:g} s, rank 0 of {ranks.world} did not come: {address}:{port}: {reason[0]}.\n"
            f"{_advice(ranks.world)}"
        )


def _store_that_answers(ranks: Ranks) -> Store | None:
    """Returns the store of another process at the address, or None if what listens there does not answer as one."""
    with suppress(RuntimeError, RunError):
        return _connect(ranks, _SECOND_SERVER_S, listen=False)
    return None


def _enter(store: Store, ranks: Ranks) -> None:
    """Enters this process under its rank. Raises RunError if another process has the same rank."""
    number = store.add(_key("entries", ranks.rank), 1)
    me = f"process {os.getpid()} on host {platform.node()}"
    store.set(_key("entry", ranks.rank, number), me)
    if number > 1 and not _agent_listens():
        first = store.get(_key("entry", ranks.rank, 1)).decode(errors="replace")
        raise RunError(
            f"Two processes have rank {ranks.rank} of {ranks.world}: {first}, and {me}. Give every process its own "
            "RANK; where one was restarted, restart all of them."
        )


def _agent_listens() -> bool:
    """Returns whether torchrun's agent holds the store at MASTER_ADDR, which then outlives an attempt of its ranks."""
    return STORE not in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _key(*names: object) -> str:
    # Attempts share only an agent's store. Elsewhere the count is no help: it differs between agents.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if _agent_listens() else ""
    return "/".join(["phalanx", attempt, *map(str, names)])


def _missing(store: Store, world: int) -> str:
    missing = [str(rank) for rank in range(world) if not store.check([_key("entry", rank, 1)])]
    if not missing:
        return ""
    more = f" and {len(missing) - _SHOWN_RANKS} more" if len(missing) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing[:_SHOWN_RANKS])}{more}"


def _failed(ranks: Ranks, timeout_s: float, error: RuntimeError) -> str:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    failed = f"Rank {ranks.rank} of {ranks.world} could not join the others (waited at most {timeout_s:g} s): {message}"
    return failed if STORE in os.environ or ranks.world == 1 else f"{failed}\n{_advice(ranks.world)}"


def _advice(world: int) -> str:
    return (
        f"Check that all {world} ranks were started, that every node reaches "
        f"{':'.join(os.environ[name] for name in _ADDRESS)} (rank 0's node; name, firewall, port not in use), and that "
        "GLOO_SOCKET_IFNAME, where set, names an interface of every node."
    )


def _poll(done: Callable[[], bool], seconds: float) -> bool:
    """Returns whether `done` came true in time."""
    end, pause = time.monotonic() + seconds, _POLL_S[0]
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])
    return True
