"""The document of a profile (traces/profile.json), and its text. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from phalanx import bounded
from phalanx.cost.breakdown import ComparedPart
from phalanx.errors import DataError, NotFoundError
from phalanx.launch.watchdog.heartbeat import TimedCall
from phalanx.train.profile.trace_file import TraceClock
from phalanx.units import counted, gib, listed

Intervals = list[tuple[int, int]]
"""Sorted intervals that do not overlap."""


@dataclass
class ProfiledRank:
    """The activity of one rank in the profiled steps."""

    rank: int
    steps: list[tuple[int, int]]
    """Start and end of each."""
    work: dict[str, Intervals]
    """Intervals by part, the innermost first: recompute, forward, backward, optimizer, data."""
    calls: list[TimedCall]
    device: str = "cpu"
    coordinates: dict[str, int] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Returns the record as plain values, for other ranks."""
        return {**asdict(self), "calls": [astuple(call) for call in self.calls]}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> ProfiledRank:
        """Returns the record of `document`."""
        values = dict(document)
        values["calls"] = [TimedCall(*call) for call in values["calls"]]
        values["steps"] = [(start, end) for start, end in values["steps"]]
        values["work"] = {name: [(a, b) for a, b in spans] for name, spans in values["work"].items()}
        return cls(**values)

    def shifted(self, by: int) -> ProfiledRank:
        """Returns the record by a clock that is `by` ns ahead."""
        steps = [(a + by, b + by) for a, b in self.steps]
        work = {name: [(a + by, b + by) for a, b in spans] for name, spans in self.work.items()}
        return replace(self, steps=steps, work=work, calls=[call.shifted(by) for call in self.calls])


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


def _key(call: TimedCall, rank: int) -> tuple[str, int, int, int] | None:
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

    def of(values: list[Any]) -> Any:
        if not isinstance(values[0], dict):
            return sum(values) / len(shares)
        names = dict.fromkeys(name for each in values for name in each)
        return {name: of([each[name] for each in values if name in each]) for name in names}

    return Shares(**of([asdict(each) for each in shares])) if shares else Shares()


def typical(ranks: Sequence[Shares]) -> int:
    """Returns the index of the median rank: the one whose parts are nearest to the medians of all. A rank of its own,
    because medians taken part by part would not add up to a step."""
    from statistics import median

    names = sorted({name for shares in ranks for name, _ in shares.parts()})
    rows = [dict(shares.parts()) for shares in ranks]
    medians = {name: median(row.get(name, 0.0) for row in rows) for name in names}
    return min(range(len(rows)), key=lambda n: sum(abs(rows[n].get(name, 0.0) - medians[name]) for name in names))


NAME = "profile.json"
MOST_RANKS = 16
"""Most ranks in the table of a terminal; the document has all."""
_SHOWN = 5e-4
"""Smallest share of a step that the table shows."""


def shares_document(shares: Shares) -> dict[str, Any]:
    """Returns the shares as plain values, their sum and its parts in order."""
    return {**asdict(shares), "parts": dict(shares.parts())}


def compared_document(parts: Sequence[ComparedPart], unit: Literal["s", "bytes"]) -> list[dict[str, Any]]:
    """Returns predicted and measured parts as plain values: "predicted_s" and so on."""
    return [
        {"name": part.name, f"predicted_{unit}": part.predicted, f"measured_{unit}": part.measured, "ratio": part.ratio}
        for part in parts
    ]


def read(run: Path) -> dict[str, Any]:
    """Returns the document of a run's profile. Raises DataError if there is none, or if it is not one."""
    path = run / "traces" / NAME if run.is_dir() else run
    try:
        document = bounded.read_json(path)
        if isinstance(document, dict) and "traceEvents" in document:
            raise ValueError(f"it is a trace, for ui.perfetto.dev; a run has its figures in traces/{NAME}")
        for name, kind in (("steps", list), ("ranks", list), ("median_rank", int), ("files", list), ("notes", list)):
            bounded.field(document, name, kind)
        list(lines(document))
    except FileNotFoundError:
        hint = "profile steps of it with train.profile.steps=[10, 12]"
        raise NotFoundError(f"no profile in {run}: there is no {path}; {hint}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{path} is no profile of this version: {error}") from None
    return document


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the profile as lines of text: the table by rank, predicted beside measured, memory, and the files."""
    first, last = document["steps"]
    ranks = document["ranks"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    yield f"profile of {steps}, {counted(len(ranks), 'rank')} on {document['device']}: milliseconds per step"
    yield from _table(document)
    yield from _overlapped(document)
    yield from _compared(document)
    yield from _memory(document.get("memory", []))
    if files := document["files"]:
        yield ""
        yield f"written to {document['traces']}: {listed(files, 12)}"
    yield from (f"note: {note}" for note in document["notes"])


def _table(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields one column per rank, and that of the median rank first."""
    ranks, middle = document["ranks"], _middle(document)
    shown = [middle, *ranks[:MOST_RANKS]]
    titles = [f"median ({middle['rank']})", *(f"rank {row['rank']}" for row in ranks[:MOST_RANKS])]
    columns = [dict(_detailed(row["shares"])) for row in shown]
    least = _SHOWN * middle["shares"]["step"]
    names = list(dict.fromkeys(name for column in columns for name, value in column.items() if value >= least))
    order = {name: place for place, name in enumerate(_ORDER)}
    names.sort(key=lambda name: order.get(name.split(" ")[-1] if " " in name else name, len(_ORDER) // 2))
    wide = max(24, *(len(name) + 2 for name in names))
    step = middle["shares"]["step"]
    yield f"  {'':<{wide}}{''.join(f'{title:>12}' for title in titles)}   share"
    for name in names:
        row = "".join(f"{_ms(column.get(name, 0.0)):>12}" for column in columns)
        yield f"  {name:<{wide}}{row}  {columns[0].get(name, 0.0) / step:>5.1%}"
    rest = "".join(f"{_ms(row['shares']['step']):>12}" for row in shown)
    yield f"  {'step':<{wide}}{rest}"
    if len(ranks) > MOST_RANKS:
        yield f"  and {len(ranks) - MOST_RANKS} more ranks in {NAME}"


def _middle(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the median rank's entry. Raises ValueError if there is none."""
    for row in document["ranks"]:
        if row["rank"] == document["median_rank"]:
            return row
    raise ValueError(f"it has no rank {document['median_rank']}")


_ORDER = ("forward", "backward", "recompute", "exposed", "waiting", "optimizer", "data", "other")


def _detailed(shares: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the parts of a step, communication by axis and collective."""
    for name in ("forward", "backward", "recompute"):
        yield name, shares[name]
    for axis, by in sorted(shares["exposed"].items()):
        for collective, seconds in sorted(by.items()):
            yield f"{axis} {collective.replace('_', '-')} exposed", seconds
    for axis, seconds in sorted(shares["waiting"].items()):
        yield f"{axis} {'bubble, ' if axis == 'pp' else ''}waiting", seconds
    for name in ("optimizer", "data", "other"):
        yield name, shares[name]


def _overlapped(document: Mapping[str, Any]) -> Iterator[str]:
    middle = _middle(document)
    hidden = [
        f"{axis} {collective.replace('_', '-')} {_ms(seconds)}"
        for axis, by in sorted(middle["shares"]["overlapped"].items())
        for collective, seconds in sorted(by.items())
    ]
    if hidden:
        bound = "at most, " if document["device"] == "cpu" else ""
        yield f"  in flight beside other work ({bound}not part of the step): {', '.join(hidden)}"


def _compared(document: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    beside = document.get("compared")
    if not beside:
        yield f"not compared with a prediction: {document.get('not_compared', 'unknown')}"
        return
    yield f"predicted beside measured: rank {beside['rank']}, cluster {beside['cluster']}; milliseconds per step"
    yield from _beside(beside["parts"], "s", _ms)


def _beside(parts: Sequence[Mapping[str, Any]], unit: str, shown: Callable[[Any], str]) -> Iterator[str]:
    """Yields predicted and measured parts, the last of which is the whole, without those too small to matter."""
    yield f"  {'':<26}{'predicted':>12}{'measured':>12}{'ratio':>8}"
    for part in parts:
        predicted, measured = part[f"predicted_{unit}"], part[f"measured_{unit}"]
        if max(predicted, measured) < _SHOWN * parts[-1][f"measured_{unit}"]:
            continue
        ratio = "" if part["ratio"] is None else f"{part['ratio']:.2f}"
        yield f"  {part['name']:<26}{shown(predicted):>12}{shown(measured):>12}{ratio:>8}".rstrip()


def _memory(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the largest tensors of the rank that has most."""
    if not ranks:
        return
    fullest = max(ranks, key=lambda rank: rank["peak_bytes"])
    parts = ", ".join(f"{part} {gib(size)}" for part, size in fullest["parts"].items() if gib(size) != "0B")
    others = f" ({counted(len(ranks) - 1, 'more rank')} in {NAME})" if len(ranks) > 1 else ""
    yield ""
    yield f"tensors at the peak of rank {fullest['rank']}{others}: {gib(fullest['peak_bytes'])}: {parts}"
    for tensor in fullest["tensors"][:12]:
        count = f" × {tensor['count']}" if tensor["count"] > 1 else ""
        yield f"  {gib(tensor['bytes']):>10}  {tensor['part']:<14} {tensor['name']}{count}"
    if rows := fullest.get("compared"):
        yield ""
        yield f"predicted beside measured: rank {fullest['rank']}, tensors at the peak"
        yield from _beside(rows, "bytes", gib)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 10 else f"{seconds * 1e3:,.0f}"


MOST_SPANS = 600
"""Spans that are kept per rank; of more, the longest."""


def spans_of_last_step(
    record: ProfiledRank, latest: Mapping[tuple[str, int, int, int], int]
) -> list[tuple[str, float, float]]:
    """Returns part, start and duration of each span in seconds, in order; starts count from the beginning of the rank's
    step. `latest` is that of all ranks (`latest_starts`)."""
    if not record.steps:
        return []
    step = record.steps[-1]
    noted: list[tuple[str, Intervals]] = []
    of_step(record, step, intervals_of_calls(record, latest), noted)
    spans = [(name, (a - step[0]) / 1e9, (b - a) / 1e9) for name, intervals in noted for a, b in intervals]
    longest = sorted(spans, key=lambda span: -span[2])[:MOST_SPANS]
    return sorted(longest, key=lambda span: span[1])


_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_PARTS = ("recompute", "forward", "backward", "optimizer")


def by_kernels(record: ProfiledRank, events: Iterable[Mapping[str, Any]], clock: TraceClock) -> ProfiledRank:
    """Returns the record with kernels in the place of the host's passes and calls; the data's waits stay the host's."""
    launched: dict[int, int] = {}
    kernels: list[tuple[int, int, str, int]] = []
    for event in events:
        correlation = (event.get("args") or {}).get("correlation")
        if correlation is None or "dur" not in event:
            continue
        start = clock.ns(float(event["ts"]))
        if event.get("cat") in _LAUNCHES:
            launched[correlation] = start
        elif event.get("cat") in _ON_DEVICE:
            kernels.append((start, start + round(float(event["dur"]) * 1000), str(event["name"]), correlation))
    work: defaultdict[str, Intervals] = defaultdict(list)
    calls: list[TimedCall] = []
    ordered = sorted(record.calls, key=lambda call: call.start)
    starts = [call.start for call in ordered]
    for start, end, name, correlation in sorted(kernels):
        at = launched.get(correlation, start)
        if name.lower().startswith("nccl"):
            call = _call_at(ordered, starts, at)
            if call is not None:
                calls.append(replace(call, start=start, done=end, waited=start, launched=start))
                continue
        part = next((part for part in _PARTS if _contains(record.work.get(part, []), at)), "")
        if part:
            work[part].append((start, end))
    data = {"data": record.work.get("data", [])}
    parts = {part: union(spans) for part, spans in work.items()}
    return replace(record, work={**parts, **data}, calls=calls, device="cuda")


def _call_at(calls: list[TimedCall], starts: list[int], at: int) -> TimedCall | None:
    """Returns the call that the host was starting at a moment."""
    place = bisect_right(starts, at) - 1
    return calls[place] if place >= 0 and at <= calls[place].launched else None


def _contains(spans: Intervals, at: int) -> bool:
    place = bisect_right(spans, (at, 2**63)) - 1
    return place >= 0 and at <= spans[place][1]
