"""Addresses of this machine, and the network interfaces that they belong to. Imports no torch."""

from __future__ import annotations

import fcntl
import socket
import struct

from phalanx.errors import RunError

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def is_this_machine(host: str) -> bool:
    """Returns whether an address, or what a name stands for, is one of this machine's. Raises RunError for a name that
    stands for nothing."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RunError(
            f"run.rdzv_endpoint: {host} is no known host: {error.strerror}; give a name or an address that every node "
            "can look up"
        ) from error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def interface_towards(host: str) -> str | None:
    """Returns the name of the network interface that leads to a host; None if it cannot be found out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
    return next((name for name, address in interfaces().items() if address == own), None)


def interfaces() -> dict[str, str]:
    """Returns the IPv4 address of every network interface of this machine that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def free_port(address: str) -> int:
    """Returns a port that is free at an address of this machine, now."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
