"""Trace events of a simulated step: every span where its time is, and every message goes to the pass that needs it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from phalanx.schedule.schedule import Action
from phalanx.simulate import timeline as trace
from phalanx.simulate.timeline import Span, Timeline
from simulate.timed_timeline import timeline

NAMES = ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe", "terapipe"]


def events(found: Timeline) -> list[dict]:
    return json.loads(trace.text(found))["traceEvents"]


@pytest.mark.parametrize("name", NAMES)
def test_every_span_is_an_event_of_its_row(name):
    found = timeline(name, 4, 8, message=0.001)
    all_events = events(found)
    assert all_events[0]["args"]["name"] == f"pipeline {name}"
    rows = {event["tid"]: event["args"]["name"] for event in all_events if event["name"] == "thread_name"}
    assert list(rows)[:2] == [0, 1]
    for rank in range(4):
        for what, spans in (("device", found.device[rank]), ("network", found.network[rank])):
            tids = [tid for tid, row in rows.items() if row.startswith(f"rank {rank} {what}")]
            shown = [event for event in all_events if event["ph"] == "X" and event["tid"] in tids]
            assert sorted((event["ts"], event["cat"]) for event in shown) == sorted(
                (round(span.start * 1e6, 3), span.kind) for span in spans
            )
    first = next(event for event in all_events if event["ph"] == "X" and event["cat"] == "F")
    assert first["args"] == {"stage": 0, "micro_batch": 0, "slice": 0, "exposed_us": pytest.approx(1000)}
    assert first["name"] == ("F0.0 stage 0" if name == "terapipe" else "F0 stage 0")


def test_no_two_events_of_a_row_overlap():
    one = timeline("1f1b", 1, 1)
    spans = (Span(0, 4, "gather"), Span(1, 2, "send", 0, 0, to=0), Span(3, 2, "reduce"), Span(4, 1, "gather"))
    shown = events(Timeline(one.schedule, one.device, (spans,), 9))
    rows = {event["tid"]: event["args"]["name"] for event in shown if event["name"] == "thread_name"}
    assert list(rows.values()) == ["rank 0 device", "rank 0 network", "rank 0 network (2)"]
    for tid in rows:
        row = sorted((event for event in shown if event["ph"] == "X" and event["tid"] == tid), key=lambda e: e["ts"])
        assert all(event["ts"] + event["dur"] <= after["ts"] for event, after in pairwise(row))


@pytest.mark.parametrize("name", NAMES)
def test_arrows_go_from_each_message_to_the_pass_that_needs_it(name):
    found = timeline(name, 4, 8, message=0.001)
    schedule, all_events = found.schedule, events(found)
    spans = {(event["tid"], event["ts"]): event for event in all_events if event["ph"] == "X"}
    ends: dict[int, list] = {}
    for event in all_events:
        if event["ph"] in ("s", "f"):
            ends.setdefault(event["id"], []).append(spans[event["tid"], event["ts"]])
    assert len(ends) == sum(span.kind == "send" for spans in found.network for span in spans)
    for send, fed in ends.values():
        needs = {
            need
            for group in schedule.needs(
                Action(fed["cat"], *(fed["args"][name] for name in ("stage", "micro_batch", "slice")))
            )
            for need in group
        }
        assert send["cat"] == "send"
        assert any(need[1:] == tuple(send["args"].values()) for need in needs), (send, fed)
