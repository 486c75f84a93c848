"""Hosts: lists of them as schedulers and MPI write them (Slurm's node lists, node files of PBS, host files), and the
addresses and network interfaces of this machine.
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from phalanx.bounded import read_text
from phalanx.errors import MOST_PROBLEMS, JobError, RunError

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


def address_towards(host: str) -> str:
    """Returns the address of this machine on the way to a host; empty if it cannot be found out."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        return probe.getsockname()[0]
    return ""


def interface_towards(host: str) -> str | None:
    """Returns the name of the network interface that leads to a host; None if it cannot be found out."""
    own = address_towards(host)
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


MOST_HOSTS = 100_000
"""Most hosts of a list. The largest machines have a tenth of that."""
_MOST_BYTES = 2**24
_MOST_BRACKETS = 8  # in one name
_HOST = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})"


@dataclass(frozen=True)
class HostSlots:
    name: str
    slots: int | None = None  # None if the list does not say


def expand(nodelist: str, most: int = MOST_HOSTS) -> list[str]:
    """Returns the hosts of Slurm's compressed form: "n[1-2,07],rack[0-1]x[1-3]" (SLURM_JOB_NODELIST), in its order.

    A name may have several brackets, of which the last one runs fastest; numbers keep their leading zeros. See the
    "hostlist expressions" in Slurm's manual.

    Raises ValueError if it is no such list, or stands for more than `most` hosts.
    """
    if len(nodelist) > _MOST_BYTES:
        raise ValueError(f"a list of hosts of {len(nodelist):,} characters; the most is {_MOST_BYTES:,}")
    hosts: list[str] = []
    for name in _names(nodelist):
        hosts += islice(_expanded(name), most + 1 - len(hosts))
        if len(hosts) > most:
            raise ValueError(f"a list of more than {most:,} hosts: {nodelist[:80]}")
    if not hosts or not all(re.fullmatch(_HOST, name) for name in hosts):
        raise ValueError(f"not a list of hosts: {nodelist[:200]!r}")
    return hosts


def _names(text: str) -> Iterator[str]:
    """Yields the names of a list, still compressed: a comma inside brackets separates no names."""
    for match in re.finditer(r"((?:[^\[\],]|\[[^\[\]]*\])*)(,|$|.)", text, re.DOTALL):
        name, end = match.groups()
        if end not in (",", "") or not name.strip():
            raise ValueError(f"not a list of hosts: {text[:200]!r}")
        yield name.strip()
        if not end:
            return


def _expanded(name: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    if name.count("[") > _MOST_BRACKETS:
        raise ValueError(f"more than {_MOST_BRACKETS} brackets in the name of a host: {name[:80]!r}")
    inside, _, after = rest.partition("]")
    ranges = [re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip()) for part in inside.split(",")]
    for found in ranges:
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"not a range of hosts: [{inside[:80]}]")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            for end in _expanded(after):
                yield f"{before}{number:0{len(found[1])}}{end}"


def read_hosts(path: Path) -> list[HostSlots]:
    """Returns the hosts of a file, each once, in the order of their first lines.

    Takes the forms of MPICH (`host:4`), Open MPI (`host slots=4`) and PBS (a line per slot); # begins a comment.
    Raises JobError with every line that is none of them, if the file cannot be read, and if it names no host.
    """
    try:
        text = read_text(path, _MOST_BYTES)
    except OSError as error:
        raise JobError(f"hosts: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise JobError(f"hosts: {path} is not text (byte {error.start})") from None
    return parse_hosts(text, str(path))


def parse_hosts(text: str, name: str) -> list[HostSlots]:
    """Returns the hosts of a host file's text; `name` stands for the file in messages. Raises as read_hosts."""
    problems: list[str] = []
    slots: dict[str, int] = {}
    stated: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words or len(problems) > MOST_PROBLEMS:
            continue
        match = re.fullmatch(rf"({_HOST})(?::([0-9]{{1,5}}))?", words[0])
        counts = [re.fullmatch(r"slots=([0-9]{1,5})", word) for word in words[1:]]
        others = [word for word in words[1:] if not re.fullmatch(r"(max[_-])?slots=[0-9]{1,5}", word)]
        if not match or others:
            problems.append(f"{name}:{number}: expected HOST, HOST:4 or HOST slots=4, found {line.strip()[:200]!r}")
            continue
        found = [int(count[1]) for count in counts if count] + ([int(match[2])] if match[2] else [])
        if len({*found}) > 1:
            problems.append(f"{name}:{number}: {match[1]} has {' and '.join(map(str, found))} slots: keep one of them")
        if 0 in found:
            problems.append(
                f"{name}:{number}: {match[1]} has no slots, so no process would run there: leave the line out"
            )
        if found:
            stated.add(match[1])
        slots[match[1]] = slots.get(match[1], 0) + (found[0] if found else 1)
    if len(slots) > MOST_HOSTS:
        problems.append(f"{name}: more than {MOST_HOSTS:,} hosts")
    if not slots and not problems:
        problems.append(f"{name}: names no host")
    if problems:
        raise JobError(problems)
    return [HostSlots(host, count if count > 1 or host in stated else None) for host, count in slots.items()]


def names_of(hosts: Iterable[HostSlots]) -> tuple[str, ...]:
    return tuple(host.name for host in hosts)
