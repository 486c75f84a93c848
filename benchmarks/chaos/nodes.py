"""Two nodes on one machine: network namespaces with hostnames of their own, joined by a pair of virtual interfaces."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

_LOST = "02:00:00:00:00:01"  # a hardware address that nobody has


class Nodes:
    """Nodes 0 and 1, at 10.78.0.1 and 10.78.0.2; their hosts are `name`-a and `name`-b. A context manager: needs root
    and the program ip."""

    def __init__(self, name: str = "chaos") -> None:
        self.names = [f"{name}{os.getpid()}-{letter}" for letter in "ab"]
        self.hosts = [f"{name}-a", f"{name}-b"]
        self.addresses = ["10.78.0.1", "10.78.0.2"]

    def __enter__(self) -> Nodes:
        first, second = self.names
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        text = "".join(f"{a} {h}\n" for a, h in zip(self.addresses, self.hosts, strict=True))
        with tempfile.NamedTemporaryFile("w", prefix="chaos_hosts_", delete=False) as file:
            file.write(f"127.0.0.1 localhost\n{text}")
        self._hosts_file = Path(file.name)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self._hosts_file.unlink(missing_ok=True)

    def prefix(self, node: int) -> list[str]:
        """Returns the words in front of a command that make it run on a node. The process id stays the same."""
        script = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", script, "-", str(self._hosts_file), self.hosts[node]]
        return ["ip", "netns", "exec", self.names[node], *inside]

    def environment(self) -> dict[str, str]:
        """Returns the variables that make gloo and NCCL take the link between the nodes."""
        return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth0")

    def cut(self) -> None:
        """Takes the link down."""
        _ip("-n", self.names[0], "link", "set", "eth0", "down")

    def join(self) -> None:
        """Brings the link back."""
        _ip("-n", self.names[0], "link", "set", "eth0", "up")
        for name in self.names:
            subprocess.run(
                ["ip", "-n", name, "neigh", "flush", "all", "nud", "permanent", "dev", "eth0"],
                capture_output=True,
                check=False,
            )

    def lose(self, node: int) -> None:
        """Loses all packets to a node, silently and in one direction: frames go to an address that nobody has."""
        other = 1 - node
        _ip(
            "-n", self.names[other], "neigh", "replace", self.addresses[node],
            "lladdr", _LOST, "nud", "permanent", "dev", "eth0",
        )  # fmt: skip

    def rate(self, text: str) -> None:
        """Limits both directions of the link, for example to 5mbit."""
        for name in self.names:
            limit = ["rate", text, "burst", "32kb", "latency", "200ms"]
            subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit],
                check=True,
                capture_output=True,
            )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
