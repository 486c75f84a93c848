"""Slurm's compressed lists of hosts: `node[01-03,7],login1` is node01, node02, node03, node7, login1."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

MOST_HOSTS = 100_000
"""Most hosts that a list may stand for."""
_LONGEST = 1 << 20  # characters of a list
_MOST_BRACKETS = 8  # in one name
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand(text: str, most: int = MOST_HOSTS) -> list[str]:
    """Returns the hosts that a list stands for, in order, each as often as it is named.

    A name may have several brackets, of which the last one runs fastest; numbers keep their leading zeros. See the
    "hostlist expressions" in Slurm's manual.

    Raises ValueError if it is no such list, or stands for more than `most` hosts.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"a list of hosts of {len(text):,} characters; the most is {_LONGEST:,}")
    hosts: list[str] = []
    for name in _names(text):
        hosts += islice(_expanded(name), most + 1 - len(hosts))
        if len(hosts) > most:
            raise ValueError(f"a list of more than {most:,} hosts: {text[:80]}")
    return hosts


def _names(text: str) -> Iterator[str]:
    """Yields the names of a list, still compressed: a comma inside brackets separates no names."""
    for match in re.finditer(r"((?:[^\[\],]|\[[^\[\]]*\])*)(,|$|.)", text, re.DOTALL):
        name, end = match.groups()
        if end not in (",", "") or not name.strip():
            if name or end:
                raise ValueError(f"not a list of hosts: {text[:80]!r}")
            return
        yield name.strip()
        if not end:
            return


def _expanded(name: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    if name.count("[") > _MOST_BRACKETS:
        raise ValueError(f"more than {_MOST_BRACKETS} brackets in one name: {name[:80]!r}")
    inside, _, after = rest.partition("]")
    ranges = [_RANGE.fullmatch(part.strip()) for part in inside.split(",")]
    for found in ranges:
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"not a range of hosts: [{inside[:80]}]")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            for end in _expanded(after):
                yield f"{before}{number:0{len(found[1])}}{end}"
