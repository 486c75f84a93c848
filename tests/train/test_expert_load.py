"""Loads of experts: the same numbers on any layout, none for a dense model, and a picture that shows them."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.layout import Layout
from phalanx.config.model import MoE
from phalanx.errors import CheckpointError, DataError, StoppedError
from phalanx.launch.ranks import SINGLE
from phalanx.model.moe import Routing
from phalanx.parallel import mesh as meshes
from phalanx.train.expert_load import ExpertLoads, line
from phalanx.train.expert_load_picture import _colour, _spread, _tone, main, svg
from phalanx.train.run_directory import RunDirectory
from train.runs import change, rows, train

SVG = "{http://www.w3.org/2000/svg}"
EXPERTS = MoE(n_experts=4, top_k=2, d_ff=8, n_dense_layers=1, aux_loss=0.01, z_loss=0.001)
LAYOUTS = [
    Layout(accumulation=3, recompute="full"),
    Layout(dp_shard=2, ep=2),
    Layout(dp_replicate=2, dp_shard=2, zero=1, ep=2),
    Layout(dp_replicate=2, data_parallel="threads"),
    Layout(tp=2, sp=True),
    Layout(pp=2, dp_shard=2, ep=2, zero=2, schedule="zb_h1", accumulation=3),
    Layout(pp=2, tp=2, schedule="dualpipe", accumulation=2),
]


@pytest.fixture
def moe_job(job):
    """A dense layer and two with four experts each; lines after steps 1, 2, 4 and 5."""
    return change(change(job, "model", n_layers=3, moe=EXPERTS), "train", log_every=2, steps=5)


def test_the_loads_do_not_depend_on_the_layout(ranks, moe_job):
    ranks(train, 1, moe_job)
    expected = rows(moe_job, "experts")
    assert [(row["step"], row["steps"]) for row in expected] == [(1, 1), (2, 1), (4, 2), (5, 1)]
    for row in expected:
        assert list(row["loads"]) == ["1", "2"]
        assert all(sum(load) == row["steps"] * 12 * 16 * EXPERTS.top_k for load in row["loads"].values())
        # Even shares would make the balancing loss its coefficient in each of the two layers.
        assert 0.02 <= row["aux_loss"] < 0.04
        assert row["z_loss"] > 0
    for number, layout in enumerate(LAYOUTS):
        other = change(dataclasses.replace(moe_job, layout=layout), "run", name=f"layout{number}")
        ranks(train, layout.processes, other)
        assert same(rows(other, "experts"), expected), layout.line()
        assert rows(other, "traffic")[-1]["traffic_bytes"].get("world", {}) == traffic_of_steps(layout), layout.line()


def same(found, expected) -> bool:
    """Whether counts are equal, and sums in fp64 but for rounding."""
    keys = ("step", "steps", "loads", "max_violation", "worst_layer", "idle")
    sums = [[row[name] for name in ("aux_loss", "z_loss")] for row in found]
    return [[row[key] for key in keys] for row in found] == [[row[key] for key in keys] for row in expected] and all(
        values == pytest.approx([row[name] for name in ("aux_loss", "z_loss")], rel=1e-9)
        for values, row in zip(sums, expected, strict=True)
    )


def traffic_of_steps(layout: Layout) -> dict[str, float]:
    """Over all ranks, a step sends three numbers to everyone; loads are no part of it."""
    return {"all_reduce": 2 * 24 * (layout.processes - 1) / layout.processes} if layout.processes > 1 else {}


def test_a_resumed_run_goes_on_where_it_stopped(ranks, moe_job):
    ranks(train, 1, moe_job)
    broken = change(moe_job, "run", name="broken")
    with pytest.raises(StoppedError):
        ranks(train, 1, broken, 3)
    ranks(train, 1, broken)
    straight, found = rows(moe_job, "experts"), rows(broken, "experts")
    assert [(row["step"], row["steps"]) for row in found] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]
    both = [a + b for a, b in zip(found[2]["loads"]["1"], found[3]["loads"]["1"], strict=True)]
    assert both == straight[2]["loads"]["1"]


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        (Layout(dp_replicate=2, sync="local_sgd", sync_every=2), [(2, 2), (4, 2), (5, 1)]),
        (Layout(dp_replicate=2, sync="asp"), [(3, 3), (5, 2)]),
    ],
    ids=lambda value: value.sync if isinstance(value, Layout) else "",
)
def test_replicas_that_are_apart_are_counted_when_they_meet(ranks, moe_job, layout, steps):
    job = dataclasses.replace(change(moe_job, "train", eval_every=3), layout=layout)
    ranks(train, 2, job)
    found = rows(job, "experts")
    assert [(row["step"], row["steps"]) for row in found] == steps
    assert all(sum(row["loads"]["1"]) == row["steps"] * 12 * 16 * EXPERTS.top_k for row in found)


def test_a_pipeline_that_is_not_flushed_counts_each_step_once(ranks, moe_job):
    job = change(dataclasses.replace(moe_job, layout=Layout(pp=2, schedule="pipedream", accumulation=3)), "model")
    ranks(train, 2, job)
    found = rows(job, "experts")
    assert [(row["step"], row["steps"]) for row in found] == [(1, 1), (2, 1), (4, 2), (5, 1)]
    assert all(sum(load) == row["steps"] * 12 * 16 * 2 for row in found for load in row["loads"].values())


def test_a_dense_model_has_no_rows_no_picture_and_no_collective(job, caplog):
    with caplog.at_level(logging.INFO):
        train(SINGLE, change(job, "train", steps=2))
    assert not rows(job, "experts")
    assert not (Path(job.run.dir) / "run" / "experts.svg").exists()
    assert "experts" not in caplog.text

    class Nobody:
        def __getattr__(self, name):
            raise AssertionError(f"a dense model asks for {name}")

    nobody: Any = Nobody()
    loads = ExpertLoads(job, nobody, Routing(), torch.device("cpu"), 0)
    loads.after(1, nobody, shown=True, ends=True)
    loads.draw(nobody)


def test_a_row_is_what_the_routers_noted_and_is_then_forgotten(moe_job):
    routing = Routing()
    loads = ExpertLoads(moe_job, meshes.build(Layout(), "cpu"), routing, torch.device("cpu"), 3)
    for _ in range(2):
        routing.note(1, torch.tensor([6, 1, 1, 0]), {"aux_loss": torch.tensor(0.5), "z_loss": torch.tensor(0.25)})
        routing.note(2, torch.tensor([2, 2, 2, 2]), {"aux_loss": torch.tensor(0.5), "z_loss": torch.tensor(0.25)})
    row = loads.collect(5)
    assert row == {
        "step": 5,
        "steps": 2,
        "loads": {1: [12, 2, 2, 0], 2: [4, 4, 4, 4]},
        "max_violation": 2.0,
        "worst_layer": 1,
        "idle": 1,
        "aux_loss": 0.25,
        "z_loss": 0.125,
    }
    assert not routing.loads
    assert not routing.penalties
    assert line(row) == "experts: max_violation 2.00 (layer 1)  idle: 1  aux_loss: 0.2500  z_loss: 0.1250"


def write(folder: Path, *loads: dict[int, list[int]], torn: str = "") -> RunDirectory:
    """A run of that name with rows at steps 10, 20 and so on."""
    folder.mkdir()
    (folder / "config.yaml").touch()
    lines = [json.dumps({"event": "step", "step": 1, "loss": 1.0})]
    for number, of_layers in enumerate(loads, start=1):
        worst = max(max(row) * len(row) / sum(row) - 1 for row in of_layers.values())
        row = {"step": 10 * number, "steps": 10, "loads": of_layers, "max_violation": worst, "worst_layer": 0}
        lines.append(json.dumps({"event": "experts", **row, "idle": 0}))
    (folder / "metrics.jsonl").write_text("\n".join([*lines, torn]))
    return RunDirectory(folder)


def test_the_picture_shows_every_expert_and_every_row(tmp_path):
    run = write(tmp_path / "a<b & c", {0: [5, 5, 5, 5]}, {0: [1, 2, 3, 2], 1: [8, 0, 0, 0]})
    root = ElementTree.fromstring(svg(run))
    drawn = root.find(f"{SVG}g[@class='map']")
    assert drawn is not None
    boxes = [box for path in drawn.iter(f"{SVG}path") for box in (path.get("d") or "").split("z") if box]
    assert len(boxes) == len(set(boxes)) == 8
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "Experts of a<b & c: max_violation 3.00 in layer 0, 0 idle, at step 20"
    assert {"Steps 11 to 20", "0.50", "1.00", "1.50", "4.00", "0.00", "Over the run"} <= set(texts)
    (curve,) = root.iter(f"{SVG}polyline")
    assert len((curve.get("points") or "").split()) == 2
    assert "polyline" not in svg(write(tmp_path / "short", {0: [1, 1]}))
    assert "href" not in svg(run)
    assert "url(" not in svg(run)


def test_steps_taken_again_and_a_line_cut_short_do_not_spoil_the_picture(tmp_path):
    again = {"event": "experts", "step": 20, "steps": 10, "loads": {0: [3, 1]}, "max_violation": 0.5, "worst_layer": 0}
    torn = '{"event": "experts", "step": 3' + "\n" + json.dumps({**again, "idle": 0})
    run = write(tmp_path / "run", {0: [1, 1]}, {0: [2, 0]}, {0: [0, 2]}, torn=torn)
    (curve,) = ElementTree.fromstring(svg(run)).iter(f"{SVG}polyline")
    assert len((curve.get("points") or "").split()) == 2
    assert "at step 20" in svg(run)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=300).filter(any))
def test_a_share_has_a_colour_of_the_scale_and_an_even_one_the_middle(loads):
    shares = [load * len(loads) / sum(loads) for load in loads]
    spread = _spread(shares)
    tones = [_tone(share, spread) for share in shares]
    assert all(-20 <= tone <= 20 for tone in tones)
    assert [tone for _, tone in sorted(zip(shares, tones, strict=True))] == sorted(tones)
    assert _tone(1.0, spread) == 0
    assert len({_colour(tone) for tone in range(-20, 21)}) == 41


def test_a_run_without_experts_is_refused_with_the_reason(tmp_path, capsys):
    run = write(tmp_path / "dense")
    with pytest.raises(DataError, match="has no row about experts"):
        svg(run)
    with pytest.raises(CheckpointError, match="no run in"):
        svg(RunDirectory(tmp_path / "nowhere"))
    assert main([str(run.path)]) == DataError.exit_code
    assert "phalanx: " in capsys.readouterr().err
    assert main([]) == 2


def test_the_command_prints_what_the_run_left_in_its_directory(moe_job, capsys):
    train(SINGLE, change(moe_job, "train", steps=2))
    folder = Path(moe_job.run.dir) / "run"
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == (folder / "experts.svg").read_text()
