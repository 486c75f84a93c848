"""The report, the live view, and metrics read back."""

from __future__ import annotations

import dataclasses
import json
import re
import time

import pytest
from rich.console import Console

from phalanx.cli.main import main
from phalanx.config.layout import Layout
from phalanx.errors import DataError
from phalanx.pictures import curves
from phalanx.pictures import page as page_style
from phalanx.pictures.elements import PAGE
from phalanx.report import page, ranks, write
from phalanx.report.figures import document, expected
from phalanx.report.live import LiveView, RunFollower, Screen, lines
from phalanx.report.ranks import RankState, read_nodes
from phalanx.report.run import Metrics, history, middle, read_run, traffic_of
from phalanx.report.write import write_report
from pictures.contrast import contrast, rgb
from pictures.test_plan_pictures import Balanced
from report.written import JOB, START, rows, run, step

# The report: what it shows, that nothing of a run's files runs in it, and that its text can be read in both modes.


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>'\"\x1b[2J"


def made(path) -> tuple[str, Balanced]:
    html = write_report(path).read_text()
    return html, Balanced(html)


def test_a_whole_run(tmp_path):
    html, parsed = made(run(tmp_path / "main"))
    sections = ["curves", "step", "memory", "traffic", "layout", "history", "environment"]
    assert [each for each in parsed.values("id") if each in sections] == sections
    for words in ("40 of 40", "3.2500", "1,234,567", "2,469,134", "25.0%", "1 TFLOP/s per device", "pp=2"):
        assert words in html
    assert "equal" in html, "bytes sent, predicted and counted"
    assert "loads" not in html
    assert not re.search(r"(?:src|href)='?https?:", html)
    assert parsed.seen["script"] == 1, "only that of sorting tables"
    assert (tmp_path / "main" / "loss.svg").read_text().startswith("<svg")


def test_nothing_of_a_run_is_markup(tmp_path):
    lines = [{**START, "layout": EVIL, "peak_source": EVIL, "peak_flops": EVIL}, step(1), step(2, loss=EVIL)]
    lines += [{"event": event, "step": 2, "text": EVIL, "reason": EVIL, "name": EVIL} for event in ("guard", "restart")]
    lines += [{"event": "end", "step": 2, "status": EVIL}, {"event": "traffic", "traffic_bytes": {EVIL: {EVIL: 3}}}]
    lines += [{"event": "experts", "step": 2, "loads": {EVIL: [1, 2]}, "max_violation": EVIL}]
    folder = run(tmp_path / "a <script>", lines)
    (folder / "env.json").write_text(json.dumps({EVIL: EVIL, "deep": {"x": [EVIL]}}))
    (folder / "command.txt").write_text(EVIL)
    (folder / "traces").mkdir()
    parts = [{"name": EVIL, "predicted_s": 1.0, "measured_s": 3.0}, {"name": "step", "predicted_s": 1, "measured_s": 3}]
    ranks = [{"rank": EVIL, "coordinates": {"pp": EVIL}, "spans": [[EVIL, 0.0, 1.0], ["forward", -1, "x"], 5]}, EVIL]
    profile = {"steps": [EVIL], "compared": {"parts": [*parts, EVIL, {"name": 1}]}, "ranks": ranks}
    (folder / "traces" / "profile.json").write_text(json.dumps(profile))
    html, parsed = made(folder)
    assert parsed.seen["script"] == 1
    assert parsed.seen["img"] == 0
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert "<script>alert" not in html
    records = [read_run(folder), read_run(folder)]
    for compare in (False, True):
        several = Balanced(write.pages(records, [expected(each) for each in records], compare=compare))
        assert several.seen["script"] == 1


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl", "env.json"])
def test_damaged_and_missing_files(tmp_path, missing):
    folder = run(tmp_path / "main")
    (folder / missing).write_bytes(b"\xff\x00{[")
    made(folder)
    (folder / missing).unlink()
    made(folder)


def test_lines_that_are_no_rows_are_said_by_number_and_left_out(tmp_path, capsys):
    folder = run(tmp_path / "main")
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([lines[0], "not json", "", *lines[1:]]) + "\n")
    [note] = read_run(folder).notes
    assert note == "metrics.jsonl: line 2 is no row of metrics and is left out"
    metrics.write_text("\n".join([*lines, "[1]", '{"event": "step", "step": "x"}']) + "\n")
    assert main(["report", str(folder)]) == 0
    first = len(lines) + 1
    assert f"2 lines are no rows of metrics, the first is line {first}; they are left out" in capsys.readouterr().err


def test_what_is_no_run(tmp_path):
    run(tmp_path / "main")
    with pytest.raises(DataError, match="did you mean"):
        read_run(tmp_path / "mian")


def test_the_state_of_a_run(tmp_path):
    whole = rows()
    stopped = [*whole[:21], {"event": "end", "step": 20, "time": 1.0, "status": "stopped", "reason": "by a signal"}]
    states = {"finished": whole, "stopped": stopped, "interrupted": whole[:21], "empty": [""]}
    for state, written in states.items():
        assert read_run(run(tmp_path / state, written)).state == state
    (tmp_path / "interrupted" / ".lock").write_text("{}")
    assert read_run(tmp_path / "interrupted").state == "running"


def test_the_history_of_a_run_that_was_killed(tmp_path):
    whole = rows()
    restart = {"event": "restart", "step": 20, "time": 1e9 + 30, "attempt": 1, "reason": "Rank 1 was killed"}
    lines = [*whole[:25], {**START, "step": 20, "time": 1e9 + 29}, *whole[21:23], restart, *whole[23:]]
    record = read_run(run(tmp_path / "main", lines))
    kinds = [kind for _, _, kind, _ in history(record)]
    assert kinds == ["start", "interrupted", "start", "restart", "checkpoint", "end"]
    assert "Rank 1 was killed" in page.html(record, expected(record))


def test_runs_compared(tmp_path):
    other = dataclasses.replace(JOB, layout=Layout(dp_replicate=2))
    records = [read_run(run(tmp_path / "a")), read_run(run(tmp_path / "b", job=other))]
    assert write.differences(records) == {
        "layout.dp_replicate": ["1", "2"], "layout.pp": ["2", "1"], "layout.accumulation": ["2", "0"]
    }  # fmt: skip
    html = write.pages(records, [], compare=True)
    Balanced(html)
    assert html.count("<svg") == 6


def test_runs_of_one_name_are_told_apart_by_what_differs(tmp_path):
    jobs = [dataclasses.replace(JOB, layout=Layout(dp_replicate=count)) for count in (1, 2, 4)]
    folders = [tmp_path / str(at) for at in range(5)]
    for folder in folders:
        folder.mkdir()
    records = [read_run(run(folder / "main", job=job)) for folder, job in zip(folders, jobs, strict=False)]
    html = write.pages(records, [], compare=True)
    assert [record.name for record in records] == [f"main (dp_replicate={count})" for count in (1, 2, 4)]
    assert all(f"main (dp_replicate={count}) " in html for count in (1, 2, 4))
    alike = [read_run(run(folder / "main")) for folder in folders[3:]]
    write.name_apart(alike)
    assert [record.name for record in alike] == [f"main ({folder})" for folder in folders[3:]]


def colours(css: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6});", css))


def test_text_has_enough_contrast_in_both_modes():
    light, dark = page_style.CSS.split("@media (prefers-color-scheme: dark)", 1)
    for mode in (colours(light), colours(light) | colours(dark.split("}", 2)[0] + "}")):
        for text in ("text", "soft", "bad"):
            for ground in ("page", "card"):
                assert contrast(rgb(mode[text]), rgb(mode[ground])) >= 4.5, (text, ground, mode)
    alone = dict(re.findall(r"var\(--(\w+), (#\w+)\)", curves.STYLE))
    assert contrast(rgb(alone["text"]), rgb(PAGE)) >= 4.5
    assert contrast(rgb(alone["soft"]), rgb(PAGE)) >= 4.5


def test_sources_of_a_mixture_have_their_own_table(tmp_path):
    known = [{"path": "<a>", "weight": 0.75, "tokens": 1000.0}, {"path": "b", "weight": 0.25, "tokens": 4000.0}]
    lines = [
        {**START, "sources": known},
        step(1, source_tokens={"<a>": 1500, "b": 500}),
        step(2, source_tokens={"<a>": 3000, "b": 1000, "c": "no number"}),
        {"event": "validation", "step": 2, "val_loss": 3.0, "source_losses": {"<a>": 2.5, "b": 4.5}},
    ]
    record = read_run(run(tmp_path / "run", lines))
    first, second = document(record, expected(record))["sources"]
    assert first == {"path": "<a>", "weight": 0.75, "tokens": 3000, "share": 0.75, "epochs": 3.0, "val_loss": 2.5}
    assert (second["epochs"], second["val_loss"]) == (0.25, 4.5)
    text = page.html(record, expected(record))
    assert "<h2>Sources</h2>" in text
    assert "&lt;a&gt;" in text
    assert "<a>" not in text
    damaged = read_run(run(tmp_path / "other", [{**START, "sources": [7, {}]}, step(1, source_tokens=[3])]))
    assert "<h2>Sources</h2>" not in page.html(damaged, expected(damaged))


# The live view: what it says, and that no width breaks a figure.

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


# Metrics read back: what a later row takes back, old rows, and lines that no trainer has written.


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
