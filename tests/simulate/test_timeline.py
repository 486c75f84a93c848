"""The time of a rank: busy, communication and idle add up to the step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.schedule.schedule import Action, Schedule
from phalanx.simulate.timeline import Span, Timeline

ONE = Schedule("hand", ((0,),), 1, ((Action("F", 0, 0), Action("B", 0, 0)),))


def timeline(device: list[Span], network: list[Span], seconds: float) -> Timeline:
    return Timeline(ONE, (tuple(device),), (tuple(network),), seconds)


def test_exposed_communication_is_not_busy():
    found = timeline([Span(1, 3, "F", 0, 0, exposed=1), Span(5, 2, "optimizer")], [], 10)
    assert found.shares(0) == (4, 1, 5, 0)


def test_what_the_device_hides_is_not_communication():
    found = timeline([Span(1, 3, "F"), Span(5, 2, "B")], [Span(0, 2, "gather"), Span(3, 5, "reduce")], 10)
    assert found.shares(0) == (5, 3, 2, 0)


def test_network_spans_that_overlap_count_once():
    found = timeline([Span(2, 1, "F")], [Span(0, 9, "gather"), Span(1, 2, "send"), Span(3, 1, "send")], 10)
    assert found.shares(0) == (1, 8, 1, 0)


lengths = st.integers(0, 5)


@given(st.lists(st.tuples(lengths, lengths), max_size=8), st.lists(st.tuples(st.integers(0, 40), lengths), max_size=8))
def test_the_times_add_up_as_counting_second_by_second(device, network):
    spans, clock = [], 0
    for gap, seconds in device:
        spans.append(Span(clock + gap, seconds, "F"))
        clock += gap + seconds
    sends = [Span(start, seconds, "send") for start, seconds in sorted(network)]
    found = timeline(spans, sends, 100)
    computing = {second for span in spans for second in range(int(span.start), int(span.end))}
    sending = {second for span in sends for second in range(int(span.start), int(span.end))}
    assert found.shares(0) == (len(computing), len(sending - computing), 100 - len(computing | sending), 0)
