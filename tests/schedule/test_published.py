"""The published table of bubbles and activations, line by line, against what the schedules do with unit costs."""

import csv
import os
from pathlib import Path

import pytest

from phalanx.schedule.catalogue import build
from phalanx.schedule.check import in_flight
from phalanx.schedule.timing import UNIT, time

F, B, W = UNIT["F"], UNIT["B"], UNIT["W"]
BUBBLES = {
    ("1F1B", "(PP-1)(F+B)"): ("1f1b", lambda p, _: (p - 1) * (F + B)),
    ("ZB1P", "(PP-1)(F+B-2W)"): ("zb_h1", lambda p, _: (p - 1) * (F + B - 2 * W)),
    ("interleaved 1F1B", "(p-1)(F+B)/v"): ("interleaved_1f1b", lambda p, v: (p - 1) * (v * F + v * B) / v),
    ("ZB2P", "0"): ("zb_h2", lambda *_: 0),
    ("ZBV", "0"): ("zb_v", lambda *_: 0),
}
"""By method and formula as the table has them: our name, and the idle time. The table's F and B are a rank's, those of
all its stages. DualPipe's lines take an F and a B in one block (test_closed_forms), V-Half's and
V-Min's are about."""
P, M = 4, 12


@pytest.fixture(scope="module")
def table() -> list[dict[str, str]]:
    folder = os.environ.get("PHALANX_SHARED")
    path = Path(folder or "") / "truth" / "aux_pipeline_bubble_formulas.csv"
    if not folder or not path.is_file():
        pytest.skip("PHALANX_SHARED names no folder with truth/aux_pipeline_bubble_formulas.csv")
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("line", BUBBLES, ids=lambda line: line[0])
def test_bubbles_are_those_of_the_table(table, line):
    assert line in {(row["method"], row["bubble"]) for row in table}
    name, formula = BUBBLES[line]
    schedule = build(name, P, M)
    timing = time(schedule)
    assert max(timing.idle_inside(rank) for rank in range(P)) == formula(P, schedule.stages // P)


@pytest.mark.parametrize(
    ("method", "text", "name", "activations"),
    [
        ("1F1B", "PP", "1f1b", P),
        ("ZB1P", "PP", "zb_h1", P),
        ("DualPipe", "PP+1", "dualpipe", P + 1),
        ("DualPipeV", "PP+1", "dualpipe_v", P + 1),
        ("ZB2P", "2x 1F1B", "zb_h2", 2 * P),
        ("ZBV", "1x 1F1B", "zb_v", P),
    ],
)
def test_activations_are_no_more_than_those_of_the_table(table, method, text, name, activations):
    assert (method, text) in {(row["method"], row["activation_per_device"]) for row in table}
    schedule = build(name, P, M)
    stages = 1 if name == "dualpipe" else schedule.stages // P
    assert activations - 1 <= max(in_flight(schedule)) / stages <= activations
