"""The report: what it shows, that nothing of a run's files runs in it, and that its text can be read in both modes."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from phalanx.cli.main import main
from phalanx.config.layout import Layout
from phalanx.errors import DataError
from phalanx.pictures import curves
from phalanx.pictures import page as page_style
from phalanx.pictures.elements import PAGE
from phalanx.report import page, write
from phalanx.report.figures import document, expected
from phalanx.report.run import history, read_run
from phalanx.report.write import write_report
from pictures.contrast import contrast, rgb
from pictures.test_plan_pictures import Balanced
from report.written import JOB, START, rows, run, step

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
    for state, lines in states.items():
        assert read_run(run(tmp_path / state, lines)).state == state
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
