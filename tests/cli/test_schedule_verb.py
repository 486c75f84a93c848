"""`phalanx schedule`: lists, shows and checks; mistakes are one message; files are what they say they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phalanx.cli.main import main
from phalanx.schedule import catalogue, file

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys
from phalanx.cli.main import main
code = main(sys.argv[1:])
sys.exit("imported torch" if {"torch", "numpy"} & set(sys.modules) else code)
"""


def output(capsys, *argv: str) -> str:
    assert main(["schedule", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_it_answers_without_torch():
    command = [sys.executable, "-c", WITHOUT_TORCH, "schedule", "show", "zb_v", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["name"] == "zb_v"


def test_the_list_has_every_schedule(capsys):
    assert [line.split()[0] for line in output(capsys, "list").splitlines()] == list(catalogue.SCHEDULES)
    listed = json.loads(output(capsys, "list", "--json"))
    assert [entry["name"] for entry in listed] == list(catalogue.SCHEDULES)
    assert listed[0]["chunks"] == {"least": 1, "most": 1}


def test_a_schedule_is_shown_with_its_figures(capsys):
    shown = output(capsys, "show", "1f1b").splitlines()
    assert shown[:5] == [
        "1f1b: 4 ranks, 8 micro-batches",
        "bubble 37.5% of the work, 27.3% of the whole; duration 33",
        "idle time per rank: 9, 9, 9, 9",
        "peak live activations per rank: 4, 3, 2, 1",
        "sends: may block",
    ]
    assert "rank 3" in shown[-1]


def test_json_is_one_document_with_the_figures_and_the_programs(capsys):
    found = json.loads(output(capsys, "show", "1f1b", "--stages", "2", "--microbatches", "2", "--json"))
    assert found == {
        "name": "1f1b",
        "ranks": 2,
        "stages": 2,
        "micro_batches": 2,
        "chunks": 1,
        "slices": 1,
        "steps": 1,
        "bubble": 0.5,
        "bubble_without_flush": 0.5,
        "duration": 9.0,
        "idle": [3.0, 3.0],
        "in_flight": [2, 1],
        "sends_may_block": True,
        "programs": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
        "written": {},
    }


@pytest.mark.parametrize("ranks", ["--stages", "--ranks", "--pp"])
@pytest.mark.parametrize("micro_batches", ["--microbatches", "--micro-batches", "--micro_batches"])
def test_sizes_have_several_names(capsys, ranks, micro_batches):
    found = json.loads(output(capsys, "show", "interleaved_1f1b", ranks, "2", f"{micro_batches}=6", "--json"))
    assert (found["ranks"], found["stages"], found["micro_batches"], found["chunks"]) == (2, 4, 6, 2)


def test_a_schedule_s_own_sizes_may_be_chosen(capsys):
    found = json.loads(output(capsys, "show", "looped_bfs", "--chunks", "3", "--json"))
    assert (found["stages"], found["chunks"]) == (12, 3)
    assert json.loads(output(capsys, "show", "terapipe", "--slices=3", "--json"))["slices"] == 3
    assert json.loads(output(capsys, "show", "pipedream", "--steps=3", "--json"))["micro_batches"] == 24


def test_files_are_written_and_read_again(capsys, tmp_path):
    svg, trace, csv = (str(tmp_path / name) for name in ("a.svg", "a.json", "zb_v.csv"))
    found = json.loads(output(capsys, "show", "zb_v", "--svg", svg, "--trace", trace, "--csv", csv, "--json"))
    assert found["written"] == {"svg": svg, "trace": trace, "csv": csv}
    assert ElementTree.parse(svg).getroot().get("role") == "img"
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert file.read(csv) == catalogue.build("zb_v", 4, 8)
    again = json.loads(output(capsys, "show", csv, "--json"))
    assert {**again, "written": found["written"]} == found
    assert output(capsys, "check", csv).startswith(f"{csv}: valid\nzb_v: 4 ranks")
    assert json.loads(output(capsys, "check", csv, "--json"))["ok"] is True


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["shw", "1f1b"], "no command 'shw'; did you mean `phalanx schedule show`?"),
        (["1f1b"], "put the command first: `phalanx schedule show 1f1b`"),
        (["xyz"], "no command 'xyz'; there are: list, show, check"),
        (["show"], "takes NAME|FILE, found nothing"),
        (["show", "1f1b", "zb_v"], "takes NAME|FILE, found 1f1b zb_v"),
        (["show", "1f1"], "did you mean 1f1b?"),
        (["show", "none.csv"], "none.csv: cannot be read: No such file or directory"),
        (["show", "none.csv", "--pp", "2"], "--stages: a file states the size of its schedule"),
        (["show", "1f1b", "--stags", "2"], "unknown option --stags; did you mean --stages?"),
        (["show", "1f1b", "--micro-batch", "2"], "unknown option --micro-batch; did you mean --micro-batches?"),
        (["show", "1f1b", "--stages"], "--stages: needs a value"),
        (["show", "1f1b", "--stages="], "--stages: needs a value"),
        (["show", "1f1b", "--stages", "0"], "--stages: must be at least 1, is 0"),
        (["show", "1f1b", "--pp", "two"], "--pp: expected a whole number"),
        (["show", "1f1b", "--chunks", "2"], "1f1b: chunks 2"),
        (["show", "1f1b", "--stages", "100000", "--microbatches", "100000"], "40,000,000,000 actions"),
        (["show", "terapipe", "--slices", "1000000000"], "nearest legal: 156250 slices"),
        (["show", "1f1b", "--svg", "/no/where.svg"], "--svg /no/where.svg: folder /no does not exist"),
        (["check"], "takes FILE, found nothing"),
        (["check", "mine.csv", "--svg", "a"], "unknown option --svg"),
        (["list", "1f1b"], "takes options only, found 1f1b"),
    ],
)
def test_mistakes_are_one_message_and_code_2(argv, message, capsys):
    assert main(["schedule", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_file_that_deadlocks_is_refused_with_its_circle(capsys, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert main(["schedule", "check", str(path)]) == 2
    assert "the ranks wait in a cycle, rank 0 -> rank 1 -> rank 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(catalogue.SCHEDULES))
def test_every_schedule_is_on_the_page_with_its_picture(name):
    page = (ROOT / "docs" / "techniques" / "schedules.md").read_text()
    assert f"| `{name}` |" in page
    assert f"(../pictures/schedule-{name}.svg)" in page
