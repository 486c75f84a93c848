"""Metrics read back: what a later row takes back, old rows, and lines that no trainer has written."""

import json

import pytest

from phalanx.report.run import Metrics, middle, traffic_of
from report.written import START, rows, step


def read(path, lines) -> Metrics:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    metrics = Metrics()
    metrics.read(path)
    return metrics


def test_a_resumed_run_has_each_step_once(tmp_path):
    guard = {"event": "guard", "step": 7, "time": 1.0, "text": "spike"}
    lines = [
        START,
        *(step(n, loss=9.0) for n in range(1, 9)),
        {"event": "validation", "step": 8, "val_loss": 1.0},
        guard,
    ]
    metrics = read(tmp_path / "m", [*lines, {**START, "step": 5}, step(6, loss=1.0), step(7, loss=2.0)])
    assert [*metrics.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert metrics.values("loss", 3) == [9.0, 1.0, 2.0]
    assert metrics.last("validation") is None, "it was of a step that was taken back"
    assert metrics.last("guard"), "it tells of the run"


def test_reading_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "m"
    metrics = read(path, [START, step(1)])
    assert not metrics.read(path)
    with path.open("a") as file:
        file.write(json.dumps(step(2)) + "\n" + '{"event": "st')
    assert metrics.read(path)
    assert metrics.last_step == 2
    path.write_text(json.dumps(step(1)) + "\n")  # another file in its place
    metrics.read(path)
    assert [*metrics.steps] == [1]


def test_rows_of_older_versions(tmp_path):
    metrics = read(tmp_path / "m", [step(1, tps=8.0, tps_per_device=4.0)])
    assert (metrics.values("tps"), metrics.values("tps_total")) == ([4.0], [8.0])


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "[]", "null", '{"event": "step"}', '{"event": "step", "step": -1}', '{"event": "step", "step": true}',
        '{"event": "step", "step": 1e99}', '{"event": 5}', "\x00" * 50, "[" * 5000, '{"event": "step", "step": "2"}',
    ],
)  # fmt: skip
def test_lines_that_are_no_rows(tmp_path, line):
    metrics = read(tmp_path / "m", [START, step(1), line, step(2)])
    assert [*metrics.steps] == [1, 2]


def test_values_that_are_no_numbers(tmp_path):
    hostile = {"loss": "<b>", "lr": None, "tps": [1], "mfu": True, "memory": 10**400, "grad_norm": {"a": 1}}
    lines = [json.dumps(step(1, **{**hostile, "memory": 1e305})), '{"event": "step", "step": 2, "loss": 1e999}']
    metrics = read(tmp_path / "m", lines)
    assert all(metrics.values(name) == [] for name in (*hostile, "loss"))
    assert metrics.points("loss") == []


def test_traffic_and_medians():
    assert traffic_of({"traffic_bytes": {"tp": {"send": 3, "x": "y"}, "pp": 4, "dp": {"a": -1}}}) == {"tp": {"send": 3}}
    assert traffic_of(None) == {}
    assert (middle([]), middle([3, 1, 2]), middle([1, 2, 3, 4])) == (None, 2, 2.5)


def test_many_other_rows_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.report.run.MOST_EVENTS", 10)
    lines = [{"event": "slow_rank", "step": n, "time": n} for n in range(100)]
    assert len(read(tmp_path / "m", [*rows(3), *lines]).events) <= 10
