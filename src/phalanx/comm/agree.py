"""Values that ranks tell each other: the result or failure of an action, or one value of every rank.

A rank that raises alone leaves the others waiting in their next collective. So actions succeed or fail on all ranks.
Values travel as JSON bytes in tensors: torch's own object collectives unpickle what they receive, which lets a peer
execute code.

Ranks that should have the same facts compare a digest of 64 bytes; only ranks that differ exchange more. They also
compare the collectives that they have made, on whatever machines they run: before a checkpoint, so that none holds sums
of values that do not belong together, and at the end.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import errors
from phalanx.comm import blocking
from phalanx.errors import MismatchError
from phalanx.launch.watchdog import diagnosis, heartbeat
from phalanx.launch.watchdog.diagnosis import first_difference
from phalanx.launch.watchdog.heartbeat import CHANNELS, ChannelKey, HeartbeatFile, RecordedCall
from phalanx.registry import blamed

T = TypeVar("T")


def on_rank_zero(work: Callable[[], Any]) -> Any:
    """Calls `work` on rank 0 and returns its result (JSON-able) on every rank.

    A PhalanxError raised by it is raised on every rank, with the same class and message. Without a process group (one
    process) it is a plain call.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    return broadcast_json(on_every_rank(lambda: work() if dist.get_rank() == 0 else None))


def on_every_rank(work: Callable[[], T]) -> T:
    """Calls `work` on every rank and returns this rank's own result once all have one.

    If it raises a PhalanxError on any rank, all ranks raise that of the first such rank, with the same class and
    message. Without a process group (one process) it is a plain call.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    answer: dict[str, Any] = {}
    failure: Exception | None = None
    result: list[T] = []
    try:
        result.append(work())
    except errors.PhalanxError as error:
        failure, answer = error, {"error": type(error).__name__, "message": f"{blamed(error)}{error}"}
    except Exception as error:  # raised again below, once the others know
        rank = dist.get_rank()
        failure = error
        answer = {"error": "RunError", "message": f"rank {rank} failed: {blamed(error)}{type(error).__name__}: {error}"}
    first = torch.tensor([dist.get_world_size() if failure is None else dist.get_rank()])
    blocking.all_reduce(first, dist.ReduceOp.MIN)
    if first.item() < dist.get_world_size():
        answer = broadcast_json(answer, int(first.item()))
        if failure is not None and not isinstance(failure, errors.PhalanxError):
            raise failure
        raise getattr(errors, answer["error"])(answer["message"])
    return result[0]


def broadcast_json(mine: Any, source: int = 0) -> Any:
    """Returns the value (JSON-able) of rank `source` on every rank; the values of the others are ignored."""
    data = _encode(mine) if dist.get_rank() == source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    blocking.broadcast(length, source)
    payload = data if data.numel() else torch.empty(int(length.item()), dtype=torch.uint8)
    blocking.broadcast(payload, source)
    return _decode(payload)


def gather_json(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the value (JSON-able) of every rank of `group`, by default of all ranks, in rank order.

    Every rank receives the largest value's bytes once per rank. A collective; its messages are not counted. Without a
    process group (one process) it is the value alone."""
    if not dist.is_initialized():
        return [mine]
    size = dist.get_world_size(group)
    data = _encode(mine)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    blocking.all_gather(lengths, torch.tensor([data.numel()]), group)
    sizes = [int(length.item()) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    payloads = [torch.empty_like(padded) for _ in range(size)]
    blocking.all_gather(payloads, padded, group)
    return [_decode(payload[:length]) for payload, length in zip(payloads, sizes, strict=True)]


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


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


def require_same_calls() -> None:
    """Raises MismatchError on all ranks if they have made different calls of a process group.

    A collective of all ranks. Every rank sends some tens of bytes per channel; only ranks that differ send their calls.
    """
    beat = heartbeat.own()
    counts = [] if beat is None else _counts(beat)
    every = gather_json(counts)
    seen: dict[Any, set[tuple[int, int]]] = defaultdict(set)
    for theirs in every:
        for group, source, target, started, digest in theirs:
            seen[group, source, target].add((started, digest))
    differing = {key for key, states in seen.items() if len(states) > 1}
    if not differing:
        return
    record = HeartbeatFile(beat.path).read() if beat is not None and counts else None
    mine = [asdict(call) for call in record.calls if call.main and tuple(call.channel) in differing] if record else []
    calls = {rank: [_call(**fields) for fields in theirs] for rank, theirs in enumerate(gather_json(mine))}
    if mismatch := first_difference(calls):
        raise MismatchError(diagnosis.mismatch_words(mismatch, platform.node()))
    if more := _one_more(calls):
        raise MismatchError(more)


def _counts(beat: heartbeat.Heartbeat) -> list[tuple[str, int, int, int, int]]:
    """Returns group, source, target, number of calls and their digest of all channels but the last, which is shared."""
    found = []
    for (group, kind, peer), channel in list(beat.channels.items()):
        if channel.number < CHANNELS - 1:
            ends = {"all": (-1, -1), "send": (beat.rank, peer), "receive": (peer, beat.rank)}[kind]
            found.append((group, *ends, channel.started, channel.digest))
    return found


def _call(*, channel: Sequence[Any], shape: Sequence[int], **fields: Any) -> RecordedCall:
    return RecordedCall(channel=ChannelKey(*channel), shape=tuple(shape), **fields)


def _one_more(calls_of: Mapping[int, Sequence[RecordedCall]]) -> str:
    """Returns a sentence about a channel of which one rank has made more calls than another; empty if there is none,
    because the threads beside the training made them."""
    last: dict[ChannelKey, list[tuple[int, int, RecordedCall]]] = defaultdict(list)
    for rank, calls in calls_of.items():
        for key, call in {call.channel: call for call in calls}.items():
            last[key].append((call.sequence, rank, call))
    for ends in last.values():
        most, least = max(ends, key=lambda end: end[0]), min(ends, key=lambda end: end[0])
        if most[0] > least[0]:
            return (
                f"Mismatched collectives: rank {most[1]} called {diagnosis.call_words(most[2])}, and rank {least[1]} "
                f"did not: its last one is #{least[0]}. All ranks of a group must make the same calls in the same "
                "order."
            )
    return ""
