"""The live view: what it says, and that no width breaks a figure."""

import json
import time

import pytest
from rich.console import Console

from phalanx.report import ranks
from phalanx.report.live import LiveView, RunFollower, Screen, lines
from phalanx.report.ranks import RankState, read_nodes
from report.written import START, rows, run, step

GIB = 2**30
VIEW = LiveView(
    name="a-run", layout="dp_shard=128,tp=8,pp=16,schedule=zb_v,zero=2", state="running", step=123_456, steps=1_000_000,
    left_s=9000.0, loss=1.2345, losses=tuple(4 - n / 100 for n in range(300)), val_loss=1.3456, val_step=123_000,
    grad_norm=0.51, lr=3e-4, tps=12_345_678.0, tps_total=98_765_432_100.0, tflops=1234.5, mfu=0.456, step_time_s=12.3,
    ranks=tuple(RankState(n, "forward/backward", 123_456, 20.0 * (n == 70), 70 * GIB, 80 * GIB) for n in range(128)),
    checkpoint=123_000, checkpoint_age_s=75.0, checkpoint_s=12.3, warnings=("rank 3 is slow: " + "x" * 200,),
)  # fmt: skip
FIGURES = (
    *("123,456 of 1,000,000", "2h30m left", "1.2345", "1.3456", "12,345,678", "98,765,432,100", "1.23e+03", "45.6%"),
    *("12.3s", "3.0e-04", "step 123,000, 1m15s ago", "70.0GiB of 80.0GiB"),
)


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_width_breaks_a_figure(width, unicode):
    found = [line.plain for line in lines(VIEW, width, unicode=unicode)]
    assert max(map(len, found)) <= width
    for figure in FIGURES[: None if width > 60 else -1]:
        assert any(figure in line for line in found), figure
    assert any("  70  forward/backward" in line and "silent 20s" in line for line in found), "the one that is silent"
    assert any("and 113 more: 113 forward/backward" in line for line in found)
    if not unicode:
        assert "".join(found).isascii()


def test_a_rank_that_is_done_is_not_silent():
    assert not RankState(0, "done", 40, 120.0).is_silent
    assert RankState(0, "optimizer", 40, 120.0).is_silent


def test_a_low_terminal_shows_fewer_ranks():
    assert len(lines(VIEW, 80, height=20)) <= 20


def test_a_run_of_several_nodes(tmp_path):
    folder = run(tmp_path / "main", rows()[:21])
    (folder / ".lock").write_text("{}")
    for attempt, node, first in ((0, "old", 0), (1, "a", 0), (1, "b/../x", 2)):
        logs = folder / "logs" / f"attempt_{attempt}"
        logs.mkdir(parents=True, exist_ok=True)
        states = [RankState(first + n, "data", 20, 0.5, GIB, 2 * GIB) for n in range(2)]
        ranks.write(logs, node, states, [(time.time(), f"{node} speaks")])
    view = RunFollower(folder).view()
    assert [(rank.rank, rank.host) for rank in view.ranks] == [(0, "a"), (1, "a"), (2, "b/../x"), (3, "b/../x")]
    assert view.warnings == ("a speaks", "b/../x speaks")
    assert (view.state, view.step, view.steps, view.mfu) == ("running", 20, 40, 0.25)
    assert json.loads(json.dumps(view.document()))["tps_total"] == 2469134.0


@pytest.mark.parametrize("text", ["", "[]", '{"time": 1}', '{"time": 1, "host": "a", "ranks": [{"rank": -1}]}', "\xff"])
def test_files_that_no_watchdog_has_written(tmp_path, text):
    (tmp_path / "attempt_0").mkdir()
    (tmp_path / "attempt_0" / "ranks-a.json").write_text(text)
    assert read_nodes(tmp_path).ranks == ()


def test_the_view_follows_the_run(tmp_path):
    folder = run(tmp_path / "main", rows()[:6])
    (folder / ".lock").write_text("{}")
    follower = RunFollower(folder)
    assert follower.view().step == 5
    lately = time.time() - 60
    with (folder / "metrics.jsonl").open("a") as file:
        for row in ({**START, "step": 5}, step(6, time=lately), step(7, time=lately + 10), step(8, time=lately + 60)):
            file.write(json.dumps(row) + "\n")
    view = follower.view()
    assert (view.step, view.ranks[0].step) == (8, 8)
    assert view.left_s == pytest.approx(32 * 30, abs=5), "the pace of this attempt: 60 s in two steps"


def test_colours_are_left_out_on_request(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for no_color, has_colour in (("1", False), ("", True)):
        monkeypatch.setenv("NO_COLOR", no_color)
        console = Console(force_terminal=True, width=80, file=(tmp_path / "out").open("w"))
        Screen(console).print(VIEW)
        console.file.close()
        assert ("\x1b[36m" in (tmp_path / "out").read_text()) == has_colour
