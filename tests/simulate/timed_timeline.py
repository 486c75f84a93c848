"""Timelines without a cost model: a schedule in the times of schedule/timing.py, with messages and the state's
collectives beside it that take a given share of a forward pass."""

from __future__ import annotations

from phalanx.schedule import catalogue
from phalanx.schedule.timing import UNIT, time
from phalanx.simulate.timeline import Span, Timeline


def timeline(name: str, ranks: int, micro_batches: int, unit: float = 0.01, message: float = 0.0) -> Timeline:
    """A schedule whose forward pass of a stage takes `unit` seconds, a tenth of every pass exposed; each message
    `message` seconds, hidden; before the step a gather, after it a reduce and the optimizer, of two units each."""
    schedule = catalogue.build(name, ranks, micro_batches)
    timing = time(schedule, {kind: seconds * unit for kind, seconds in UNIT.items()})
    end = timing.duration + 2 * unit
    device, network = [], []
    for rank, (program, starts) in enumerate(zip(schedule.programs, timing.starts, strict=True)):
        spans = []
        sends = []
        for (kind, stage, micro, part), start in zip(program, starts, strict=True):
            seconds = timing.costs[kind]
            spans.append(Span(start + 2 * unit, seconds, kind, stage, micro, part, exposed=seconds / 10))
            to = stage + 1 if kind == "F" else stage - 1
            if message and kind != "W" and 0 <= to < schedule.stages:
                other = schedule.rank_of(to, micro)
                if other != rank:
                    sends.append(Span(spans[-1].end - message, message, "send", stage, micro, part, to=other))
        device.append((*spans, Span(end + 2 * unit, 2 * unit, "optimizer")))
        network.append((Span(0.0, 2 * unit, "gather"), *sends, Span(end, 2 * unit, "reduce")))
    return Timeline(schedule, tuple(device), tuple(network), end + 4 * unit)
