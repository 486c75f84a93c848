"""The connections of this process to its peers."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed.*, to the type stubs


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
