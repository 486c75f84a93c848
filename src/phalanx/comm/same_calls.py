"""Makes sure that all ranks have made the same collectives, also on different machines.

The watchdog of a machine compares its own ranks while they run (launch/watchdog). Here the ranks compare themselves,
whoever started them: before a checkpoint, so that none holds sums of values that do not belong together, and at the
end.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.comm.agree import gather_json
from phalanx.errors import MismatchError
from phalanx.launch.watchdog import diagnosis, heartbeat
from phalanx.launch.watchdog.diagnosis import first_difference
from phalanx.launch.watchdog.heartbeat import CHANNELS, ChannelKey, HeartbeatFile, RecordedCall


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
