"""Loads of experts: the same numbers on any layout, none for a dense model."""

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import MoE
from phalanx.errors import StoppedError
from phalanx.launch.ranks import SINGLE
from phalanx.model.moe import Routing
from phalanx.parallel import mesh as meshes
from phalanx.pictures.experts import svg
from phalanx.train.callbacks import Done
from phalanx.train.metrics import ExpertLoads, balance_line
from phalanx.train.step import Step
from train.runs import change, rows, train

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


def stepper(job: Job, mesh: Any, routing: Routing) -> Any:
    return SimpleNamespace(job=job, mesh=mesh, routing=routing, device=torch.device("cpu"))


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
    loads = ExpertLoads(stepper(job, nobody, Routing()), nobody, nobody)
    loads.begin(0)
    loads.after_step(Done(1, Step(1.0, 1.0), last=True, stops=False))
    loads.conclude(1, {})


def test_a_row_is_what_the_routers_noted_and_is_then_forgotten(moe_job):
    routing = Routing()
    nobody: Any = None
    loads = ExpertLoads(stepper(moe_job, meshes.build(Layout(), "cpu"), routing), nobody, nobody)
    loads.begin(3)
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
    assert balance_line(row) == "experts: max_violation 2.00 (layer 1)  idle: 1  aux_loss: 0.2500  z_loss: 0.1250"


def test_a_run_leaves_its_picture_in_its_directory(moe_job):
    train(SINGLE, change(moe_job, "train", steps=2))
    folder = Path(moe_job.run.dir) / "run"
    drawn = svg("run", folder / "metrics.jsonl", "3 layers, 16 wide, on 1 rank")
    assert (folder / "experts.svg").read_text() == drawn
