"""A simulated step as trace events for Perfetto (ui.perfetto.dev) and chrome://tracing: per pipeline rank one row for
its device and one for its network, if something is offloaded also for its host and for copies in each direction, and an
arrow from each message to the pass that needs it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from phalanx.schedule import trace
from phalanx.schedule.trace import Arrow, Event, TraceRow
from phalanx.simulate.timeline import Span, Timeline

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
