"""What rank 0 tells the others: where it listens, and a token by which they know it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.bounded import field, parse_json

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_MOST_ADDRESSES = 8
_LONGEST = 64  # characters of an address or a token
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
        entry = parse_json(base64.urlsafe_b64decode(text))
        addresses, port, token = field(entry, "addresses", list), field(entry, "port", int), field(entry, "token", str)
        words = [*addresses, token]
        if not 0 < port < 1 << 16 or len(addresses) > _MOST_ADDRESSES:
            raise ValueError("not where a rank may be reached")
        if not all(isinstance(word, str) and 0 < len(word) <= _LONGEST and word.isprintable() for word in words):
            raise ValueError("not where a rank may be reached")
        return cls(tuple(addresses), port, token)


def listening_socket(ports: tuple[int, ...], one_node: bool) -> socket.socket:
    """Returns a socket that listens on the first free of `ports` (0: any), on loopback if all ranks are on one node.

    Nobody can take the port between its choice and its use. Raises OSError if none is free.
    """
    for port in ports:
        try:
            return _listening_socket(port, one_node)
        except OSError:
            if port == ports[-1]:
                raise
    raise AssertionError("there is at least one port")


def _listening_socket(port: int, one_node: bool) -> socket.socket:
    if one_node:
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


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
