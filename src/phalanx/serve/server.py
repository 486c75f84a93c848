"""Runs the application on a port until a signal comes, and lets running requests end."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.echo import echo
from phalanx.errors import RunError
from phalanx.serve.app import Service, application
from phalanx.serve.worker import EngineThread

MOST_CONNECTIONS = 256
IDLE_S = 30.0
"""Seconds after which a connection without a whole request head is closed."""


class TimedProtocol(H11Protocol):
    """HTTP/1.1 on a connection that must bring requests. uvicorn waits for ever for the rest of a request's head, so
    that clients which send nothing could take all connections."""

    def connection_made(self, transport: Any) -> None:
        """Begins to watch a new connection."""
        super().connection_made(transport)
        self.loop.call_later(IDLE_S, self._close_if_idle, None)

    def _close_if_idle(self, idle_since: Any) -> None:
        """Closes the connection if no request came after `idle_since`, the request that had been answered last; the
        connection itself stands for none."""
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self.cycle is idle_since:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(IDLE_S, self._close_if_idle, self.cycle if answered else self)


class SignalledServer(uvicorn.Server):
    """A server whose signals are handled by `serve`: uvicorn would end the process with the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises RunError if the address is taken or is none of this machine's."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise RunError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def serve(service: Service, listener: socket.socket, ready: Callable[[SignalledServer], None] = lambda _: None) -> int:
    """Serves until SIGTERM or SIGINT, after which running requests have `limits.grace` seconds to end, or until the
    engine fails. Returns the exit code: 0, or 1 if the engine failed. Called outside the main thread, it leaves the
    signals alone; `ready` gets the server, whose `should_exit` ends it."""
    config = uvicorn.Config(
        application(service),
        http=TimedProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(service.limits.grace),
    )
    server = SignalledServer(config)

    def stop(*_: object) -> None:
        server.should_exit = True

    service.thread = EngineThread(service.thread.engine, failed=stop)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if server.should_exit:
            server.force_exit = True
        else:
            name = signal.Signals(number).name
            echo(f"phalanx: {name}: ending; {service.texts} texts have {service.limits.grace:g} s", file=sys.stderr)
        stop()

    previous = _handle(on_signal)
    try:
        ready(server)
        server.run([listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 1 if service.thread.broken else 0


def _handle(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, signal._HANDLER]:
    """Sets the handlers of SIGTERM and SIGINT; returns those before. Only the main thread may."""
    try:
        return {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:
        return {}
