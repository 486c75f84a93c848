"""Divides a recorded step among its parts: passes, exposed communication, waiting for other ranks, and the rest.

All times are nanoseconds; the shares of a step add up to its time. Imports no torch.

A rank that computes on a CPU has one thread that trains: while it starts a collective or waits for one, communication
is exposed. While it waits and another rank has not yet begun the same call, it waits for that rank: a bubble of the
pipeline (axis pp), or a straggler. On a GPU, kernels count instead: communication is exposed while no other one runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

Intervals = list[tuple[int, int]]
"""Sorted intervals that do not overlap."""


@dataclass
class Communication:
    """One call of one rank, with the intervals in which nothing hides it unless the device computes."""

    axis: str
    collective: str
    channel: str
    sequence: int
    start: int
    end: int
    waited: int
    """When the rank began to wait, 0 if it did not."""
    launched: int
    bytes: int = 0
    sends: bool = False
    receives: bool = False


@dataclass
class ProfiledRank:
    """The activity of one rank in the profiled steps."""

    rank: int
    steps: list[tuple[int, int]]
    """Start and end of each."""
    work: dict[str, Intervals]
    """Intervals by part, the innermost first: recompute, forward, backward, optimizer, data."""
    calls: list[Communication]
    device: str = "cpu"
    coordinates: dict[str, int] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Returns the record as plain values, for other ranks."""
        return {**asdict(self), "calls": [astuple(call) for call in self.calls]}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> ProfiledRank:
        """Returns the record of `document`."""
        values = dict(document)
        values["calls"] = [Communication(*call) for call in values["calls"]]
        values["steps"] = [(start, end) for start, end in values["steps"]]
        values["work"] = {name: [(a, b) for a, b in spans] for name, spans in values["work"].items()}
        return cls(**values)


@dataclass
class Shares:
    """Where a step's time went on one rank, in seconds."""

    step: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    exposed: dict[str, dict[str, float]] = field(default_factory=dict)
    """Communication that nothing hides, by axis and collective."""
    waiting: dict[str, float] = field(default_factory=dict)
    """Waiting for ranks that come later to the same call, by axis: pp is the bubble."""
    optimizer: float = 0.0
    data: float = 0.0
    other: float = 0.0
    overlapped: dict[str, dict[str, float]] = field(default_factory=dict)
    """Communication in flight while the rank does something else; not part of the step's time. An upper bound on a CPU:
    a message counts until the rank asks for it."""

    def parts(self) -> list[tuple[str, float]]:
        """Returns the name and seconds of every part; they add up to `step`."""
        return [
            *((name, getattr(self, name)) for name in ("forward", "backward", "recompute")),
            *((f"{axis} exposed", sum(by.values())) for axis, by in self.exposed.items()),
            *((f"{axis} waiting", seconds) for axis, seconds in self.waiting.items()),
            *((name, getattr(self, name)) for name in ("optimizer", "data", "other")),
        ]


def union(spans: Iterable[tuple[int, int]]) -> Intervals:
    """Returns the intervals that lie in any of `spans`."""
    merged: Intervals = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def minus(spans: Intervals, hidden: Intervals) -> Intervals:
    """Returns the intervals that lie in `spans` and in none of `hidden`."""
    left: Intervals = []
    place = 0
    for start, end in spans:
        while place < len(hidden) and hidden[place][1] <= start:
            place += 1
        at, free = place, start
        while at < len(hidden) and hidden[at][0] < end:
            if hidden[at][0] > free:
                left.append((free, hidden[at][0]))
            free = max(free, hidden[at][1])
            at += 1
        if free < end:
            left.append((free, end))
    return left


def within(spans: Iterable[tuple[int, int]], start: int, end: int) -> Intervals:
    """Returns the parts of `spans` between two moments."""
    return [(max(a, start), min(b, end)) for a, b in spans if a < end and b > start]


def total(spans: Intervals) -> int:
    """Returns the length of all intervals."""
    return sum(end - start for start, end in spans)


def latest_starts(records: Sequence[ProfiledRank]) -> dict[tuple[str, int, int, int], int]:
    """Returns when the last rank began each call, by channel, sending and receiving rank (-1: all take part) and
    number."""
    latest: dict[tuple[str, int, int, int], int] = {}
    for record in records:
        for call in record.calls:
            key = _key(call, record.rank)
            if call.channel and key is not None:
                latest[key] = max(latest.get(key, 0), call.start)
    return latest


def _key(call: Communication, rank: int) -> tuple[str, int, int, int] | None:
    """Returns what tells a call from all others, the same on every rank that takes part."""
    if not (call.sends or call.receives):
        return call.channel, -1, -1, call.sequence
    group, _, peer = call.channel.rpartition(":")
    if not peer.isdigit():
        return None
    sender, receiver = (rank, int(peer)) if call.sends else (int(peer), rank)
    return group, sender, receiver, call.sequence


def shares_of(record: ProfiledRank, latest: Mapping[tuple[str, int, int, int], int]) -> list[Shares]:
    """Returns the shares of each step of a rank. `latest` is that of all ranks (`latest_starts`)."""
    calls = intervals_of_calls(record, latest)
    return [of_step(record, step, calls) for step in record.steps]


def intervals_of_calls(
    record: ProfiledRank, latest: Mapping[tuple[str, int, int, int], int]
) -> dict[str, dict[tuple[str, str], Intervals]]:
    """Returns the intervals of a rank's calls by axis and collective: those in flight, those exposed, and those in
    which the rank waits for one that comes late."""
    spans: dict[str, defaultdict[tuple[str, str], Intervals]] = {
        kind: defaultdict(list) for kind in ("late", "exposed", "in flight")
    }
    for call in record.calls:
        name = call.axis, call.collective
        spans["in flight"][name].append((call.start, call.end))
        spans["exposed"][name].append((call.start, call.launched))
        if call.waited:
            key = _key(call, record.rank)
            came = latest.get(key, 0) if key is not None else 0
            came = min(max(came, call.waited), call.end)
            spans["late"][name].append((call.waited, came))
            spans["exposed"][name].append((came, call.end))
    return {kind: {name: union(each) for name, each in by.items()} for kind, by in spans.items()}


def of_step(
    record: ProfiledRank,
    step: tuple[int, int],
    calls: Mapping[str, Mapping[tuple[str, str], Intervals]],
    noted: list[tuple[str, Intervals]] | None = None,
) -> Shares:
    """Returns the shares of one step of a rank. `noted` gets the intervals of each part."""
    found = Shares(step=(step[1] - step[0]) / 1e9)
    taken: Intervals = []

    def take(name: str, spans: Intervals) -> float:
        """Returns the seconds of `spans` in this step that nothing before them has taken."""
        nonlocal taken
        own = minus(within(spans, *step), taken)
        taken = union([*taken, *own])
        if noted is not None and own:
            noted.append((name, own))
        return total(own) / 1e9

    def take_work(names: Iterable[str]) -> None:
        for name in names:
            setattr(found, name, take(name, record.work.get(name, [])))

    def take_communication() -> None:
        for (axis, collective), spans in calls["in flight"].items():
            name = axis, collective
            visible = take(f"{axis} exposed", calls["exposed"].get(name, []))
            late = take(f"{axis} waiting", calls["late"].get(name, []))
            hidden = total(within(spans, *step)) / 1e9 - visible - late
            if visible:
                found.exposed.setdefault(axis, {})[collective] = visible
            if late:
                found.waiting[axis] = found.waiting.get(axis, 0.0) + late
            if hidden > 1e-9:
                found.overlapped.setdefault(axis, {})[collective] = hidden

    names = ("recompute", "forward", "backward", "optimizer")
    if record.device == "cpu":
        take_communication()
        take_work((*names, "data"))
    else:  # kernels hide communication
        take_work(names)
        take_communication()
        take_work(("data",))
    found.other = max(0.0, found.step - sum(seconds for _, seconds in found.parts()))
    return found


def mean(shares: Sequence[Shares]) -> Shares:
    """Returns the mean of several shares; its parts add up to the mean step."""
    whole, factor = Shares(), 1 / max(1, len(shares))
    for each in shares:
        for name in ("step", "forward", "backward", "recompute", "optimizer", "data", "other"):
            setattr(whole, name, getattr(whole, name) + factor * getattr(each, name))
        for axis, seconds in each.waiting.items():
            whole.waiting[axis] = whole.waiting.get(axis, 0.0) + factor * seconds
        for mine, theirs in ((whole.exposed, each.exposed), (whole.overlapped, each.overlapped)):
            for axis, by in theirs.items():
                of_axis = mine.setdefault(axis, {})
                for collective, seconds in by.items():
                    of_axis[collective] = of_axis.get(collective, 0.0) + factor * seconds
    return whole


def typical(ranks: Sequence[Shares]) -> int:
    """Returns the index of the median rank: the one whose parts are nearest to the medians of all. A rank of its own,
    because medians taken part by part would not add up to a step."""
    from statistics import median

    names = sorted({name for shares in ranks for name, _ in shares.parts()})
    rows = [dict(shares.parts()) for shares in ranks]
    medians = {name: median(row.get(name, 0.0) for row in rows) for name in names}
    return min(range(len(rows)), key=lambda n: sum(abs(rows[n].get(name, 0.0) - medians[name]) for name in names))
