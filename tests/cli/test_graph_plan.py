"""`phalanx plan --graph`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main

pytest.importorskip("scipy")
GRAPHS = Path(__file__).parents[1] / "graph"
SMALL = ("cluster=dgx-h100:1", "cluster.devices_per_node=2")


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(GRAPHS))
    import graph_models

    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph_models.gpt(2, b=2, s=512, h=1024)))
    return str(path)


def test_a_file_is_planned_without_torch(written):
    program = f"""
import sys
from phalanx.cli.main import main
code = main(["plan", "--graph", {written!r}, *{SMALL!r}, "--micro-batches", "4", "--json"])
sys.exit(code or 7 * ("torch" in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["best"]["step_time_s"] <= found["compared"]["data parallel"]["step_time_s"]
    assert sum(len(stage["split"]) for stage in found["pipeline"]["stages"]) >= found["operators"]


def test_a_module_is_planned_run_and_compared(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(GRAPHS)
    out = tmp_path / "written.json"
    assert main(["plan", "--graph", "graph_modules:gpt", *SMALL, "--check", "--graph-out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 gloo processes in float64, equal to one process" in said
    assert main(["plan", "--graph", str(out), *SMALL]) == 0


def test_a_plan_by_hand_is_compared_and_drawn(written, capsys, tmp_path):
    hand, picture = tmp_path / "hand.json", tmp_path / "plans.svg"
    hand.write_text(json.dumps({"layers.*.up": ["f"], "layers.*.down": ["f"]}))
    assert main(["plan", "--graph", written, *SMALL, "--splits", str(hand), "--svg", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compared"]["by hand"]["step_time_s"] >= found["best"]["step_time_s"]
    for row in ("this plan", "data parallel", "ZeRO-2", "by hand"):
        assert f"<title>{row}</title>" in picture.read_text()
    hand.write_text(json.dumps(found))  # what --json printed
    assert main(["plan", "--graph", written, *SMALL, "--splits", str(hand), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["compared"]["by hand"]["step_time_s"] == pytest.approx(found["best"]["step_time_s"])


@pytest.mark.parametrize("said", ["[]", "{}", '{"x": "f"}', '{"x": [1]}', "{", "nothing"])
def test_a_file_of_splits_that_is_none_is_refused(written, capsys, tmp_path, said):
    hand = tmp_path / "hand.json"
    if said != "nothing":
        hand.write_text(said)
    assert main(["plan", "--graph", written, *SMALL, "--splits", str(hand)]) in (2, 4)
    assert f"--splits {hand}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--mesh", "3x2"], 2, "3 × 2 = 6, the cluster has 2 devices"),
        (["--mesh", "two"], 2, "expected one or two numbers of devices"),
        (["--check"], 2, "--check runs a module: give --graph MODULE:FUNCTION"),
        (["cluster.accelerator.memory_gib=0.01"], 3, "per device at least, more than"),
        (["--html", "x.html"], 2, "--html says nothing about a graph"),
    ],
)
def test_what_is_wrong_is_said(written, capsys, words, code, said):
    assert main(["plan", "--graph", written, *SMALL, *words]) == code
    assert said in capsys.readouterr().err


def test_options_of_a_graph_need_one(capsys):
    assert main(["plan", "--micro-batches", "4", *SMALL]) == 2
    assert "--micro-batches has no effect without --graph" in capsys.readouterr().err


@pytest.mark.parametrize(("place", "said"), [("nothing_here:f", "No module named"), ("json:decoder", "is no function")])
def test_a_module_that_cannot_be_used_is_named(capsys, place, said):
    assert main(["plan", "--graph", place, *SMALL]) == 2
    assert said in capsys.readouterr().err
