"""Lists of hosts as schedulers and MPI write them: Slurm's compressed node lists, node files of PBS, host files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.bounded import read_text
from phalanx.errors import MOST_PROBLEMS, JobError

MOST_HOSTS = 100_000
"""Most hosts of a list. The largest machines have a tenth of that."""
_MOST_BYTES = 2**24
_HOST = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})"


@dataclass(frozen=True)
class HostSlots:
    """A host, and the processes that its list has for it."""

    name: str
    slots: int | None = None
    """None if the list does not say."""


def expand(nodelist: str) -> list[str]:
    """Returns the hosts of Slurm's compressed form: "n[1-2,07],rack[0-1]x[1-3]" (SLURM_JOB_NODELIST), in its order.

    Raises ValueError for anything else, and for more than MOST_HOSTS.
    """
    found: list[str] = []
    for item in _items(nodelist):
        found += _expanded(item, MOST_HOSTS - len(found))
    if not found or not all(re.fullmatch(_HOST, name) for name in found):
        raise ValueError(f"not a list of nodes: {nodelist[:200]!r}")
    return found


def _items(text: str) -> Iterator[str]:
    """Yields the parts between the commas outside brackets."""
    depth = start = 0
    for place, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def _expanded(item: str, most: int) -> list[str]:
    names = [""]
    for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
        names = [f"{name}{end}" for name in names for end in ([literal] if literal else _numbers(ranges, most))]
        if len(names) > most:
            raise ValueError(f"more than {MOST_HOSTS:,} hosts")
    if item.count("[") != item.count("]") or not item:
        raise ValueError(f"not a list of nodes: {item[:200]!r}")
    return names


def _numbers(ranges: str, most: int) -> list[str]:
    """Returns the numbers of "1-3,007", with their leading zeros."""
    found: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if not match:
            raise ValueError(f"not a range of nodes: {part[:200]!r}")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= most:
            raise ValueError(f"more than {MOST_HOSTS:,} hosts")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


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
    """Returns the names of hosts."""
    return tuple(host.name for host in hosts)
