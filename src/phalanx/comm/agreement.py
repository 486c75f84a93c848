"""Finds out whether all ranks have the same facts, and if not, which rank differs in what.

Ranks that agree need one all-reduce of 64 bytes, at any world size. Only ranks that differ exchange more: a digest and
a host name per rank, and the facts once per group of equal ranks.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm import blocking
from phalanx.comm.agree import broadcast_json, gather_json

Facts = Mapping[str, Any]
"""Values (JSON-able) by name."""

MAX_GROUPS = 32
"""Groups of equal ranks whose facts are exchanged. More differ only where a fact that is particular to each rank is
compared by mistake."""
SHOWN_CHARACTERS = 60
"""Length to which a value is shortened in messages."""
SHOWN_RANGES = 6
"""Ranges of ranks that a message lists."""


@dataclass(frozen=True)
class Disagreement:
    """One fact in which ranks differ."""

    name: str
    text: str
    """`rank 3 on host b has optimizer.lr 0.001, the other 7 ranks 0.0003`."""


def disagreements(facts: Facts) -> list[Disagreement]:
    """Returns the facts in which ranks differ, in the order of the facts; empty if all agree.

    A collective of all ranks with the same result on each. Ranks may have different names of facts."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    if _all_equal(digest):
        return []
    every = gather_json([digest.hex(), platform.node()])
    groups: dict[str, list[int]] = {}
    for rank, (theirs, _) in enumerate(every):
        groups.setdefault(theirs, []).append(rank)
    known = list(groups.values())[:MAX_GROUPS]
    stated = [broadcast_json(dict(facts), ranks[0]) for ranks in known]
    return differences(list(zip(known, stated, strict=True)), [host for _, host in every])


def differences(groups: Sequence[tuple[Sequence[int], Facts]], hosts: Sequence[str]) -> list[Disagreement]:
    """Returns the facts in which groups of ranks, each with its facts, differ. `hosts` has the host of every rank."""
    names = list(dict.fromkeys(name for _, facts in groups for name in facts))
    found = []
    for name in names:
        ranks_by_value: dict[str, list[int]] = {}
        for ranks, facts in groups:
            value = json.dumps(facts[name], sort_keys=True) if name in facts else "nothing"
            ranks_by_value.setdefault(value, []).extend(ranks)
        if len(ranks_by_value) > 1:
            found.append(Disagreement(name, _sentence(name, ranks_by_value, hosts)))
    return found


def clock_skew(limit_s: float) -> str:
    """Returns which rank's clock is furthest from the median and by how much, or "" if no two clocks differ by more
    than `limit_s` seconds. A collective of all ranks with the same result on each."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    blocking.all_reduce(torch.zeros(1))  # brings the ranks together, within the latency of a message
    mine = time.time_ns()
    extremes = torch.tensor([mine, -mine])
    blocking.all_reduce(extremes, dist.ReduceOp.MAX)
    if int(extremes.sum()) <= limit_s * 1e9:
        return ""
    every = gather_json([mine, platform.node()])
    median = statistics.median_low([when for when, _ in every])
    rank = max(range(len(every)), key=lambda rank: abs(every[rank][0] - median))
    off = (every[rank][0] - median) / 1e9
    return (
        f"the clock of rank {rank} on host {every[rank][1]} is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} "
        "the median of all ranks: times in logs and metrics cannot be compared"
    )


def _all_equal(digest: bytes) -> bool:
    """Returns whether all ranks have the same digest, by its largest and its smallest words."""
    words = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    extremes = torch.cat((words, ~words))  # the maximum of ~x is ~ the minimum of x
    blocking.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, smallest = extremes.chunk(2)
    return torch.equal(largest, ~smallest)


def _sentence(name: str, ranks_by_value: Mapping[str, list[int]], hosts: Sequence[str]) -> str:
    """Returns the values of all ranks, the most frequent one last; among equals, that of the first rank."""
    by_size = sorted(ranks_by_value.items(), key=lambda item: (len(item[1]), -min(item[1])))
    *few, (usual, most) = by_size
    parts = []
    for value, ranks in sorted(few, key=lambda item: min(item[1])):
        has = "has" if len(ranks) == 1 else "have"
        parts.append(f"{_who(sorted(ranks), hosts)} {has} {'' if parts else name + ' '}{_shown(value)}")
    others = "rank" if len(most) == 1 else f"{len(most)} ranks"
    return f"{', '.join(parts)}, the other {others} {_shown(usual)}"


def _who(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    on = sorted({hosts[rank] for rank in ranks})
    where = f"host {on[0]}" if len(on) == 1 else f"{len(on)} hosts"
    return f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)} on {where}"


def _ranges(ranks: Sequence[int]) -> str:
    """Returns sorted ranks as "0-3, 5, 7", shortened after a few ranges."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges[:SHOWN_RANGES]]
    return ", ".join(texts) + (", …" if len(ranges) > SHOWN_RANGES else "")


def _shown(value: str) -> str:
    """Returns JSON as a user reads it: a string without quotes, a long value shortened, with a digest of the whole."""
    plain = value[1:-1] if value[0] == '"' and len(value) > 2 and value.isprintable() else value
    if len(plain) <= SHOWN_CHARACTERS:
        return plain
    return f"{plain[:SHOWN_CHARACTERS]}… (sha256 {hashlib.sha256(value.encode()).hexdigest()[:8]})"
