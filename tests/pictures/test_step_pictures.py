"""Schedules and simulated steps in pictures: every action is there, where its time is."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.pictures import schedule as schedule_picture
from phalanx.pictures.timeline import Window, cells, svg
from phalanx.schedule import catalogue, trace
from phalanx.schedule.check import in_flight
from phalanx.schedule.timing import Timing, time
from phalanx.simulate.timeline import Span, Timeline
from simulate.timed_timeline import timeline

# The picture of a simulated step: every span where its time is, figures of every rank, and never too large.


SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe", "terapipe", "pipedream"]


def rows(root: ElementTree.Element) -> list[ElementTree.Element]:
    return root.findall(f"{SVG}g[@class='rank']")


def titles(row: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in row.iter(f"{SVG}title")]


def texts(element: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", NAMES)
def test_every_span_has_its_box_where_its_time_is(name):
    found = timeline(name, 4, 8, message=0.002)
    root = ElementTree.fromstring(svg(found))
    assert len(rows(root)) == 4
    for row, device, network in zip(rows(root), found.device, found.network, strict=True):
        boxes = [path for group in row.findall(f"{SVG}g[@fill]") for path in group.findall(f"{SVG}path")]
        assert len(boxes) == len(titles(row)) == len(device) + len(network)
        width = float(re.findall("h([0-9.]+)", row.findall(f"{SVG}path")[0].get("d") or "")[0])
        starts = [float((path.get("d") or "M")[1:].split(" ")[0]) for path in boxes]
        expected = [span.start / found.seconds * width for span in (*device, *network)]
        assert sorted(starts) == pytest.approx(sorted(expected), abs=0.61)


def test_titles_say_what_and_when():
    row = rows(ElementTree.fromstring(svg(timeline("1f1b", 4, 8, message=0.002))))[1]
    assert "F0 stage 1: 30.00 to 40.00 ms, 1.00 exposed" in titles(row)
    assert "send to rank 2: 38.00 to 40.00 ms" in titles(row)
    assert {"gather: 0.00 to 20.00 ms", "reduce: 350.00 to 370.00 ms", "optimizer: 370.00 to 390.00 ms"} <= set(
        titles(row)
    )


def test_a_row_has_its_micro_batches_and_figures():
    found = timeline("1f1b", 4, 8)
    root = ElementTree.fromstring(svg(found))
    for rank, row in enumerate(rows(root)):
        words = texts(row)
        assert words[0] == f"rank {rank}"
        assert sorted(words[1:-4]) == sorted(2 * [str(micro) for micro in range(8)])
        assert words[-4:-1] == [f"{seconds / found.seconds:.1%}" for seconds in found.shares(rank)[:3]]
        assert words[-1] == str(4 - rank)
    assert "1 step in 390 ms; rank 0 is idle longest, 23.1% of it" in texts(root)


def test_the_legend_is_of_what_is_there():
    found = timeline("zb_v", 4, 8)
    with_state = " ".join(texts(ElementTree.fromstring(svg(found))))
    assert all(word in with_state for word in ("W: gradients of weights", "optimizer", "gather", "reduce", "darker"))
    assert "message" not in with_state
    bare = Timeline(
        found.schedule,
        tuple(tuple(span._replace(exposed=0) for span in spans[:-1]) for spans in found.device),
        ((),) * 4,
        found.seconds,
    )
    without = " ".join(texts(ElementTree.fromstring(svg(bare))))
    assert not any(word in without for word in ("optimizer", "gather", "reduce", "darker"))


def test_kinds_have_the_colours_of_schedules():
    found = timeline("zb_v", 4, 8)
    fills = {group.get("fill") for row in rows(ElementTree.fromstring(svg(found))) for group in row.iter(f"{SVG}g")}
    assert {schedule_picture.shade(kind, variant, 2)[0] for kind in "FIW" for variant in (0, 1)} <= fills


def test_a_window_shows_what_is_in_it():
    found = timeline("1f1b", 4, 8)
    root = ElementTree.fromstring(svg(found, 0.125, 0.195))
    row = rows(root)[0]
    assert sorted(titles(row)) == [
        "B0 stage 0: 125.000 to 140.000 ms, 2.000 exposed",
        "B1 stage 0: 150.000 to 170.000 ms, 2.000 exposed",
        "B2 stage 0: 180.000 to 195.000 ms",
        "F4 stage 0: 140.000 to 150.000 ms, 1.000 exposed",
        "F5 stage 0: 170.000 to 180.000 ms, 1.000 exposed",
    ]
    assert any("shown: 125.000 to 195.000 ms" in text for text in texts(root))
    assert svg(found, 0.0, 99.0) == svg(found)


@pytest.mark.parametrize(("begin", "end"), [(0.2, 0.2), (0.3, 0.1), (9.0, None), (-1.0, None)])
def test_an_empty_window_is_refused(begin, end):
    with pytest.raises(JobError, match="the step takes 0.39 s"):
        svg(timeline("1f1b", 4, 8), begin, end)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "shown"),
    [("1f1b", 32, 64, 32), ("1f1b", 32, 160, 17), ("interleaved_1f1b", 64, 128, 17), ("gpipe", 2, 3000, 2)],
)
def test_large_steps_stay_below_a_megabyte(name, ranks, micro_batches, shown):
    document = svg(timeline(name, ranks, micro_batches, message=0.0008))
    assert len(document.encode()) < 1.05e6
    root = ElementTree.fromstring(document)
    assert len(rows(root)) == shown
    assert texts(rows(root)[-1])[0] == f"rank {ranks - 1}"
    words = " ".join(texts(root))
    assert (f"of {ranks} ranks every {ranks // 16}" in words) == (shown < ranks)
    width = float(root.get("width", 0))
    for path in root.iter(f"{SVG}path"):
        for x, wide in re.findall(r"M([0-9.]+) [0-9.]+h([0-9.]+)", path.get("d") or ""):
            assert float(x) + float(wide) <= width


def test_narrow_passes_share_columns_as_high_as_their_share_of_time():
    spans = [Span(number * 0.1, 0.05, "FB"[number % 2], 0, 0, exposed=0.01) for number in range(200)]
    found = list(cells(spans, Window(0, 20, 5.0), 0.7, lambda span: span.kind))
    assert all(cell.height == pytest.approx(0.25, abs=0.02) for cell in found if len(cell.spans) > 1)
    assert sum(len(cell.spans) for cell in found) == 200
    for cell in found:
        assert cell.width <= 10.5
        assert cell.exposed == pytest.approx(0.2 * cell.width, rel=0.01)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.floats(0.001, 2)), max_size=40),
    st.floats(0, 30),
    st.floats(1, 30),
    st.floats(0.5, 30),
)
def test_cells_show_all_the_time_of_the_window(gaps, begin, length, narrow):
    spans, clock = [], 0.0
    for gap, seconds in gaps:
        spans.append(Span(clock + gap, seconds, "F", 0, 0))
        clock += gap + seconds
    window = Window(begin, begin + length, 12.0)
    shown = sum(max(0.0, min(s.end, window.end) - max(s.start, begin)) for s in spans)
    found = list(cells(spans, window, narrow, lambda span: span.kind))
    assert sum(span.seconds for cell in found for span in cell.spans) == pytest.approx(shown)
    for cell in found:
        assert cell.x >= 0
        assert 0 <= cell.top <= cell.top + cell.height <= 1 + 1e-9
        assert cell.width * cell.height + 1e-6 >= sum(s.seconds for s in cell.spans) * window.unit


def test_slow_ranks_are_marked_and_the_picture_names_model_and_machine():
    found = timeline("1f1b", 4, 8, message=0.002)
    root = ElementTree.fromstring(svg(found, None, None, "tiny on a machine", {2: "1.2 ×"}))
    assert texts(root)[0] == "tiny on a machine: 1f1b, 4 ranks, 8 micro-batches"
    (mark,) = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "mark"]
    assert "1.2 ×" in texts(root)
    assert float(mark.get("y") or 0) > 76 + 2 * 38  # below the name of rank 2


def test_a_slow_rank_is_shown_among_many_and_its_label_has_room():
    words = "1.3 ×, ↔ 38: 20 ×"
    root = ElementTree.fromstring(
        svg(timeline("interleaved_1f1b", 64, 128), marks={37: words}, slowed="rank 37 takes 1.3 ×")
    )
    assert "rank 37" in [texts(row)[0] for row in rows(root)]
    assert texts(root)[1].endswith("; rank 37 takes 1.3 ×")
    (mark,) = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "mark"]
    plot = float((rows(root)[0].get("transform") or "").removeprefix("translate(").split()[0])
    assert float(mark.get("x") or 0) + float(mark.get("width") or 0) <= plot


# Schedules in pictures, in a terminal and as trace events: every action is there, where its time is.

SCHEDULES = list(catalogue.SCHEDULES)


def timed(name: str, ranks: int = 4, micro_batches: int = 8) -> Timing:
    return time(catalogue.build(name, ranks, micro_batches))


def text_rows(timing: Timing) -> list[ElementTree.Element]:
    return ElementTree.fromstring(schedule_picture.svg(timing)).findall(f"{SVG}g[@class='rank']")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_has_a_cell_for_each_action_in_its_row_where_its_time_is(name):
    timing = timed(name)
    for row, program, starts in zip(text_rows(timing), timing.schedule.programs, timing.starts, strict=True):
        cells = list(row.iter(f"{SVG}rect"))
        assert len(cells) == len(program)
        unit = float(cells[0].get("width", 0)) / timing.costs[program[0].kind]
        for cell, action, start in zip(cells, program, starts, strict=True):
            title = cell.find(f"{SVG}title")
            assert title is not None
            assert title.text == f"{action}: {start:g} to {start + timing.costs[action.kind]:g}"
            assert float(cell.get("x", 0)) == pytest.approx(72.5 + start * (unit + 1), abs=0.02 * (start + 1))


def test_cells_have_their_micro_batch_and_rows_their_peak():
    timing = timed("1f1b")
    for row, program, most in zip(text_rows(timing), timing.schedule.programs, in_flight(timing.schedule), strict=True):
        texts = [text.text for text in row.iter(f"{SVG}text")]
        assert texts[1:-1] == [str(action.micro) for action in program]
        assert texts[-1] == str(most)


def test_kinds_stages_of_a_rank_and_directions_have_colours_of_their_own():
    for name, colours in (("gpipe", 2), ("interleaved_1f1b", 4), ("zb_h1", 3), ("zb_v", 6), ("dualpipe", 8)):
        found = {cell.get("fill") for row in text_rows(timed(name)) for cell in row.iter(f"{SVG}rect")}
        assert len(found) == colours, name


def test_optimizer_steps_are_marked_where_there_are_several():
    assert all(not row.findall(f".//{SVG}path") for row in text_rows(timed("1f1b")))
    assert all(len(row.findall(f".//{SVG}path")) == 2 for row in text_rows(timed("pipedream")))


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), [("naive", 1, 1), ("1f1b", 8, 16), ("gpipe", 2, 1500)])
def test_everything_is_inside_the_picture_and_narrow_cells_have_no_numbers(name, ranks, micro_batches):
    root = ElementTree.fromstring(schedule_picture.svg(timed(name, ranks, micro_batches)))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for cell in root.iter(f"{SVG}rect"):
        assert 0 <= float(cell.get("x", -1)) <= width - float(cell.get("width", 0))
        assert 0 <= float(cell.get("y", -1)) < height
    assert (len(list(root.iter(f"{SVG}text"))) < 100) == (micro_batches != 16)


def test_the_title_says_what_is_drawn():
    texts = [text.text for text in ElementTree.fromstring(schedule_picture.svg(timed("1f1b"))).findall(f"{SVG}text")]
    assert texts[0] == "1f1b: 4 ranks, 8 micro-batches"
    assert texts[1] == "bubble 27.3% of the step (37.5% of the busy time); length 33 units"


def test_in_a_terminal_every_action_is_as_wide_as_its_time():
    assert schedule_picture.grid(timed("1f1b", 2, 3)) == (
        "        0              5              10\n"
        "rank 0  F0 F1 ..... B0--- F2 B1--- .. B2---\n"
        "rank 1  .. F0 B0--- F1 B1--- F2 B2--- ....."
    )


def test_what_is_wider_than_the_terminal_goes_on_below():
    assert schedule_picture.grid(timed("1f1b", 2, 3), width=32) == (
        "        0              5\n"
        "rank 0  F0 F1 ..... B0--- F2 B1\n"
        "rank 1  .. F0 B0--- F1 B1--- F2\n"
        "\n"
        "              10\n"
        "rank 0  -- .. B2---\n"
        "rank 1  B2--- ....."
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [60, 100, 400])
def test_every_action_is_in_the_terminal_once_and_no_line_is_too_long(name, width):
    timing = timed(name, 8, 16)
    lines = schedule_picture.grid(timing, width).splitlines()
    assert all(len(line) <= width for line in lines)
    shown = [word.rstrip("-") for line in lines if line.startswith("rank") for word in line.split()[2:]]
    labels = sorted(word for word in shown if word.strip("."))
    assert len(labels) == sum(map(len, timing.schedule.programs))


def test_a_schedule_too_large_for_a_terminal_says_so():
    assert "--svg FILE draws it" in schedule_picture.grid(timed("1f1b", 32, 256))


@pytest.mark.parametrize("name", SCHEDULES)
def test_trace_events_are_the_actions(name):
    timing = timed(name)
    events = json.loads(trace.text(timing))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {rank: f"rank {rank}" for rank in range(timing.schedule.ranks)}
    for rank, program in enumerate(timing.schedule.programs):
        spans = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert [(span["cat"], span["args"]["stage"], span["args"]["micro_batch"]) for span in spans] == [
            (action.kind, action.stage, action.micro) for action in program
        ]
        assert all(span["ts"] + span["dur"] <= after["ts"] for span, after in pairwise(spans))
    assert "F0 stage 0" in {event["name"] for event in events} or timing.schedule.slices > 1
