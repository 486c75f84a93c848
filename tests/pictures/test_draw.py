"""Schedules in pictures, in a terminal and as trace events: every action is there, where its time is."""

from __future__ import annotations

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from phalanx.pictures import schedule as schedule_picture
from phalanx.schedule import catalogue, trace
from phalanx.schedule.check import in_flight
from phalanx.schedule.timing import Timing, time

SVG = "{http://www.w3.org/2000/svg}"
NAMES = list(catalogue.SCHEDULES)


def timed(name: str, ranks: int = 4, micro_batches: int = 8) -> Timing:
    return time(catalogue.build(name, ranks, micro_batches))


def rows(timing: Timing) -> list[ElementTree.Element]:
    return ElementTree.fromstring(schedule_picture.svg(timing)).findall(f"{SVG}g[@class='rank']")


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_has_a_cell_for_each_action_in_its_row_where_its_time_is(name):
    timing = timed(name)
    for row, program, starts in zip(rows(timing), timing.schedule.programs, timing.starts, strict=True):
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
    for row, program, most in zip(rows(timing), timing.schedule.programs, in_flight(timing.schedule), strict=True):
        texts = [text.text for text in row.iter(f"{SVG}text")]
        assert texts[1:-1] == [str(action.micro) for action in program]
        assert texts[-1] == str(most)


def test_kinds_stages_of_a_rank_and_directions_have_colours_of_their_own():
    for name, colours in (("gpipe", 2), ("interleaved_1f1b", 4), ("zb_h1", 3), ("zb_v", 6), ("dualpipe", 8)):
        found = {cell.get("fill") for row in rows(timed(name)) for cell in row.iter(f"{SVG}rect")}
        assert len(found) == colours, name


def test_optimizer_steps_are_marked_where_there_are_several():
    assert all(not row.findall(f".//{SVG}path") for row in rows(timed("1f1b")))
    assert all(len(row.findall(f".//{SVG}path")) == 2 for row in rows(timed("pipedream")))


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
    assert texts[1] == "bubble 37.5% of the work, 27.3% of the whole; duration 33"


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


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
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
