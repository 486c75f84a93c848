"""The timeline of one step: the activity of every pipeline rank on its device and on its links."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.notebook import ShownInNotebooks
from phalanx.schedule import trace
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.trace import Arrow, Event, TraceRow


class Span(NamedTuple):
    """An interval of time with its kind."""

    start: float
    """Seconds from the beginning of the step."""
    seconds: float
    """Seconds that it takes."""
    kind: str
    """On the device: "F", "B", "I", "W" (passes) or "optimizer". On the network: "send", "gather", "reduce". On the
    host: "update", and the copies "down" from the device and "up" to it."""
    stage: int = -1
    """The pipeline stage; -1 for none."""
    micro: int = -1
    """The micro-batch; -1 for none."""
    part: int = 0
    """Index of the slice of the sequence."""
    exposed: float = 0.0
    """Seconds of exposed communication inside a pass."""
    to: int = -1
    """The pipeline rank that receives a send."""

    @property
    def end(self) -> float:
        return self.start + self.seconds


class TimeShares(NamedTuple):
    """How a pipeline rank spends a step, in seconds."""

    busy: float
    """Its device computes."""
    communication: float
    """Exposed: inside passes, and in the rank's network spans while its device is idle."""
    idle: float
    """Nothing of it works; it waits, for example for another rank's message."""
    host: float
    """Its device and network wait while its host updates parameters or copies them."""


@dataclass(frozen=True)
class Timeline(ShownInNotebooks):
    """A simulated step. A rank is always busy, communicating, waiting for its host, or idle."""

    page, height = "phalanx.pictures.timeline:page", 480

    schedule: Schedule
    """The order of passes on each pipeline rank."""
    device: tuple[tuple[Span, ...], ...]
    """Spans by pipeline rank, in order of time and without overlap."""
    network: tuple[tuple[Span, ...], ...]
    """Messages that each pipeline rank sends, in order of time; they may overlap the device's spans and each other."""
    seconds: float
    """Seconds of the whole step."""
    host: tuple[tuple[Span, ...], ...] = ()
    """Copies and updates of each pipeline rank's host, in order of time; empty if nothing is offloaded."""

    def shares(self, rank: int) -> TimeShares:
        """Returns how a pipeline rank spends the step. Sums over all of its spans, so keep the result."""
        exposed = sum(span.exposed for span in self.device[rank])
        busy = sum(span.seconds for span in self.device[rank]) - exposed
        communication = exposed + _outside(self.network[rank], self.device[rank])
        host = 0.0
        if self.host:
            every = sorted((*self.host[rank], *self.network[rank]))
            host = exposed + _outside(every, self.device[rank]) - communication
        idle = self.seconds - busy - communication - host
        # Rounding may leave a rest, also a negative one.
        return TimeShares(busy, communication, idle if idle > 1e-12 * self.seconds else 0.0, host)


def _outside(spans: Sequence[Span], hiding: Sequence[Span]) -> float:
    """Returns the seconds that lie in any of `spans` and in none of `hiding`; both are in order of their starts, and
    `hiding` does not overlap itself."""
    if not spans:
        return 0.0
    starts, seconds = _columns(spans)
    ends = np.maximum.accumulate(starts + seconds)
    # Each span starts where those before it end, so that overlaps count once.
    starts[1:] = np.maximum(starts[1:], ends[:-1])
    hides, during = _columns(hiding)
    # Seconds of `hiding` before a moment: a line that rises within each span, and is level in between.
    edges = np.column_stack([hides, hides + during]).ravel()
    hidden = np.cumsum(np.column_stack([np.zeros(len(hides)), during]).ravel())
    inside = np.interp(ends, edges, hidden) - np.interp(starts, edges, hidden) if len(hiding) else 0.0
    return max(0.0, float(np.sum(ends - starts - inside)))


def _columns(spans: Sequence[Span]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the starts and the durations of spans."""
    return np.array([span[0] for span in spans]), np.array([span[1] for span in spans])


_MICROSECONDS_PER_SECOND = 1e6
HOST_ROWS = {"down": "copies to the host", "update": "host", "up": "copies to the device"}
"""The rows of a rank's host and copy engines, by the kind of their spans."""


def text(timeline: Timeline) -> str:
    """Returns the events of every span as one JSON document."""
    rows: list[TraceRow] = []
    device_rows: list[int] = []
    network_rows: list[list[int]] = []
    for rank, (device, network) in enumerate(zip(timeline.device, timeline.network, strict=True)):
        device_rows.append(len(rows))
        rows.append(TraceRow(f"rank {rank} device", [_event(timeline, span) for span in device]))
        lanes = _lanes(network)
        network_rows.append([len(rows) + lane for lane in lanes])
        for lane in range(max(lanes, default=0) + 1):
            name = f"rank {rank} network" + (f" ({lane + 1})" if lane else "")
            events = [_event(timeline, span) for span, at in zip(network, lanes, strict=True) if at == lane]
            rows.append(TraceRow(name, events))
        for kind, name in HOST_ROWS.items() if timeline.host else ():
            events = [_event(timeline, span) for span in timeline.host[rank] if span.kind == kind]
            rows.append(TraceRow(f"rank {rank} {name}", events))
    arrows = _arrows(timeline, device_rows, network_rows)
    return trace.document(f"pipeline {timeline.schedule.name}", rows, arrows)


def span_name(timeline: Timeline, span: Span) -> str:
    """Returns the name of a span: "F3 stage 1", "send to rank 2", "optimizer"."""
    if span.kind == "send":
        return f"send to rank {span.to}"
    return span.kind if span.micro < 0 else trace.pass_name(timeline.schedule, *span[2:6])


def _event(timeline: Timeline, span: Span) -> Event:
    args = trace.pass_args(span.stage, span.micro, span.part) if span.micro >= 0 else {}
    if span.exposed:
        args["exposed_us"] = span.exposed * _MICROSECONDS_PER_SECOND
    start, end = span.start * _MICROSECONDS_PER_SECOND, span.end * _MICROSECONDS_PER_SECOND
    return Event(span_name(timeline, span), span.kind, start, end, args)


def _lanes(spans: Sequence[Span]) -> list[int]:
    """Returns the first free lane for each span: the viewers cannot show two at once in one row."""
    free: list[float] = []
    lanes = []
    for span in spans:
        lane = next((number for number, at in enumerate(free) if at <= span.start), len(free))
        free[lane:] = [span.end, *free[lane + 1 :]]
        lanes.append(lane)
    return lanes


def _arrows(timeline: Timeline, device_rows: Sequence[int], network_rows: Sequence[Sequence[int]]) -> Iterator[Arrow]:
    """Yields an arrow from each send to the pass that it feeds. A micro-batch's passes other than W run through all
    stages one after the other, so it is the first pass on the receiver that begins after the message."""
    passes: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    for rank, spans in enumerate(timeline.device):
        for span in spans:
            if span.kind in ("F", "B", "I"):
                passes[rank, span.micro, span.part].append(span.start)
    for spans, rows in zip(timeline.network, network_rows, strict=True):
        for span, row in zip(spans, rows, strict=True):
            if span.kind == "send":
                starts = passes[span.to, span.micro, span.part]
                following = bisect_left(starts, span.start)
                if following < len(starts):
                    start, fed = span.start * _MICROSECONDS_PER_SECOND, starts[following] * _MICROSECONDS_PER_SECOND
                    yield Arrow("message", row, start, device_rows[span.to], fed)
