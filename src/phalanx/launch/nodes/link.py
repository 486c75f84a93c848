"""The connection between the nodes of a run and its host: one line of JSON there and one back, several times a second.

A node whose launcher ends is noticed at once, because its connection ends; one whose network is cut after the silence
that both sides allow. torch's own rendezvous would unpickle what arrives, and its store does not tell who has gone.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from phalanx.errors import RunError
from phalanx.launch.nodes.membership import HOST, Membership
from phalanx.launch.nodes.messages import (
    MOST_BYTES,
    Ending,
    NodeState,
    Notice,
    decode_notice,
    decode_state,
    encode,
)

POLL_S = 0.2
_TICK_S = 0.05
_RETRY_S = 1.0
_FAREWELL_S = 5.0


class NodeLink(Protocol):
    """A node's view of the rounds."""

    def exchange(self, **changes: Any) -> None:
        """Changes fields of the node's state, which the host learns soon."""
        ...

    @property
    def notice(self) -> Notice:
        """The newest that the host has said."""
        ...

    @property
    def silent_s(self) -> float:
        """Seconds since the host was last heard."""
        ...

    def close(self, code: int, message: str) -> None:
        """Leaves the run."""
        ...


class HostLink:
    """The host's own link, which serves the others. Close it.

    Args:
        address: where it listens: a host name or address of this machine, and a port; nowhere else.
        membership: decides about the rounds.
        state: the host's own, as a node.
        silence_s: seconds after which a node that says nothing is lost.
    """

    def __init__(self, address: tuple[str, int], membership: Membership, state: NodeState, silence_s: float):
        """Raises RunError if the address cannot be used."""
        self.membership, self._state = membership, state
        membership.join(state)
        try:
            self._server = _Server(address, membership, silence_s)
        except OSError as error:
            raise RunError(f"run.rdzv_endpoint {address[0]}:{address[1]}: {error.strerror or error}") from error
        self.port = self._server.server_address[1]
        self._closed = threading.Event()
        for work in (self._server.serve_forever, self._tick):
            threading.Thread(target=work, name="phalanx-nodes", daemon=True).start()

    def exchange(self, **changes: Any) -> None:
        """As NodeLink."""
        self._state = replace(self._state, **changes)
        self.membership.report(HOST, self._state)

    @property
    def notice(self) -> Notice:
        """As NodeLink."""
        return self.membership.report(HOST, self._state)

    @property
    def silent_s(self) -> float:
        """Returns 0: the host hears itself."""
        return 0.0

    def close(self, code: int, message: str) -> None:
        """Ends the run for all nodes."""
        self.membership.finish(code, message, _FAREWELL_S)
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_S):
            self.membership.tick()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], membership: Membership, silence_s: float):
        self.membership, self.silence_s = membership, silence_s
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _Connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whatever a stranger sends, or however a connection breaks, the run goes on."""


class _Connection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        """Serves one node until it leaves, is silent for too long, or says something else than its state."""
        server = self.server
        assert isinstance(server, _Server)
        membership, slot, reason = server.membership, None, "its launcher has ended"
        self.request.settimeout(server.silence_s)
        try:
            while line := self.rfile.readline(MOST_BYTES):
                state = decode_state(line)
                notice = membership.join(state) if slot is None else membership.report(slot, state)
                self.wfile.write(encode(notice))
                if notice.refusal:
                    return
                slot = notice.slot
        except TimeoutError:
            reason = f"nothing was heard from it for {server.silence_s:g} s"
        except (OSError, ValueError) as error:
            reason = f"its connection broke ({error})"
        finally:
            if slot is not None:
                membership.leave(slot, reason)


class GuestLink:
    """The link of a node that is not the host; connects again when the connection breaks. Close it.

    Args:
        address: the host's name and port.
        state: of this node.
        silence_s: seconds for which the host may be silent.
        key: returns the key of the run as this node sees it.
    """

    def __init__(
        self, address: tuple[str, int], state: NodeState, silence_s: float, key: Callable[[], str] = lambda: ""
    ):
        self._address, self._state, self._silence_s, self._key = address, state, silence_s, key
        self._lost = Ending(f"there is no connection to the host, {address[0]}:{address[1]}")
        self._said = state
        self._notice = Notice(-1)
        self._heard = time.monotonic()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="phalanx-nodes", daemon=True)
        self._thread.start()

    def exchange(self, **changes: Any) -> None:
        """As NodeLink."""
        with self._changed:
            self._state = replace(self._state, **changes)
            self._changed.notify_all()

    @property
    def notice(self) -> Notice:
        """As NodeLink."""
        return self._notice

    @property
    def silent_s(self) -> float:
        """Seconds since the host was last heard, or since this link began."""
        return time.monotonic() - self._heard

    def close(self, code: int, message: str) -> None:
        """Leaves the run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(POLL_S + _RETRY_S)

    def _run(self) -> None:
        while not self._closed:
            with (
                suppress(OSError, ValueError),
                socket.create_connection(self._address, timeout=self._silence_s) as connection,
            ):
                self._talk(connection)
            with self._changed:
                # Rounds of the host that answers next are other rounds.
                self._state = replace(self._state, round=0)
                if self._notice.ending is None or self._notice.ending.code is None:
                    self._notice = Notice(-1, self._notice.round, self._lost)
                self._changed.wait_for(lambda: self._closed, _RETRY_S)

    def _talk(self, connection: socket.socket) -> None:
        lines, key = connection.makefile("rb"), self._key()
        while not self._closed:
            with self._changed:
                self._said = self._state
            connection.sendall(encode(replace(self._said, key=key)))
            line = lines.readline(MOST_BYTES)
            if not line:
                return
            self._notice = decode_notice(line)
            self._heard = time.monotonic()
            if self._notice.refusal:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._state is not self._said, POLL_S)
