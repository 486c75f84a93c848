"""A package adds an axis: islands of data-parallel ranks that average their parameters every few steps.

The package is that of docs/reference/extending.md, installed as by pip, and used by the commands themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from covering import also_whole
from extend.install import commands, install
from phalanx import extend
from phalanx.axes.catalogue import AXES_TABLE
from phalanx.check.job import problems_of
from phalanx.config import layout_line
from phalanx.config.fields import leaves
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.cost.communication import group
from phalanx.errors import ExtensionError
from phalanx.parallel.mesh import lines, place
from phalanx.partition.derived import solve

SMALL = """
model: {n_layers: 2, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {device: cpu}
data: {corpus: random, random_vocab: 40}
axes: {islands: {size: 2, every: 2}}
optimizer: {name: sgd, clip: 0}
train: {steps: 4, global_batch: 8, eval_samples: 0, precision: fp64}
checkpoint: {every: 2}
run: {name: islands, sample_tokens: 0}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("installed") / "islands", "islands")


@pytest.fixture
def phalanx(package: Path, tmp_path: Path):
    """Returns a function that runs a command with the package installed and returns its standard output."""
    (tmp_path / "small.yaml").write_text(SMALL)
    return commands(tmp_path, package)


def test_it_is_listed_with_its_fields_in_help(phalanx):
    assert json.loads(phalanx("extensions", "list", "--json")) == {"phalanx-islands 1.0": {"axis": ["islands"]}}
    shown = phalanx("train", "small.yaml", "--help", "layout.axes")
    assert "Islands of data-parallel ranks, which average their parameters now and then." in shown
    assert "axes.islands.every" in shown


def test_layouts_with_it_equal_one_process_and_longer_periods_are_refused(phalanx):
    """An average in every step of a linear rule is the step with the average gradient: alone and with other axes."""
    others = ("", ",tp=2", ",dp_replicate=2", ",dp_shard=2,zero=3", ",pp=2,accumulation=2")
    layouts = [f"axes.islands.size=2,axes.islands.every=1{other}" for other in others]
    done = json.loads(phalanx("verify", "small.yaml", "--layouts", *layouts, "--json"))
    assert [case["ok"] for case in done["cases"]] == [True] * 5
    assert [case["world"] for case in done["cases"]] == [2, 4, 4, 4, 4]
    assert max(case["param_max_rel"] for case in done["cases"]) < 1e-9
    said = phalanx("verify", "small.yaml", "--layouts", "axes.islands.size=2", code=2, streams="err")
    assert "islands train alone for 4 steps, which one process does not; nearest legal: every=1" in said
    said = phalanx("verify", "small.yaml", "optimizer=adamw", "clip=1", "--layouts", layouts[0], code=2, streams="err")
    assert "nearest legal: optimizer=sgd with clip=0" in said


def sends_what_is_predicted(phalanx, tmp_path, *words):
    """Compares the bytes that a run sent with the predicted ones."""
    rows = [json.loads(line) for line in (tmp_path / "runs/islands/metrics.jsonl").read_text().splitlines()]
    [counted] = [row["traffic_bytes"] for row in rows if row["event"] == "traffic"]
    machine = ("cluster=dgx-h100", "cluster.device=auto", "--json")
    predicted = json.loads(phalanx("predict", "small.yaml", *words, *machine))
    assert counted == predicted["traffic_bytes"]


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (4, ("dp_shard=2", "zero=2", "axes.islands.every=4")),
        *also_whole((2, ()), (4, ("dp_shard=2", "zero=2")), (4, ("tp=2", "axes.islands.every=4"))),
    ],
)
def test_what_it_sends_is_as_predicted(phalanx, tmp_path, world, more):
    words = (*more, "checkpoint.every=4")
    phalanx("train", "small.yaml", *words)
    sends_what_is_predicted(phalanx, tmp_path, *words, f"cluster.devices_per_node={world}")


def test_islands_differ_between_agreements_and_a_run_resumes_with_another_number(phalanx, tmp_path):
    """Two islands read other samples, so that the first one's loss is not that of two replicas; after an agreement all
    have the same parameters, with which four go on."""
    phalanx("train", "small.yaml", "train.steps=2")
    sends_what_is_predicted(phalanx, tmp_path, "train.steps=2", "cluster.devices_per_node=2")
    phalanx("train", "small.yaml", "axes.islands.size=4", streams="err")
    rows = map(json.loads, (tmp_path / "runs/islands/metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "grad_norm" in row] == [1, 2, 3, 4]
    resolved = (tmp_path / "runs/islands/config.yaml").read_text()
    assert "  axes:\n    islands:\n      size: 4  # command line: axes.islands.size=4\n" in resolved


def test_its_time_falls_with_its_period_and_lies_on_slow_links(phalanx):
    words = ("model=gpt2", "cluster=dgx-h100:2", "dp_replicate=8", "axes.islands.size=2", "train.global_batch=16")
    often, rarely = (
        json.loads(phalanx("predict", *words, f"axes.islands.every={steps}", "--json")) for steps in (1, 100)
    )
    assert often["step_time_s"] > rarely["step_time_s"]
    assert often["traffic_bytes"]["islands"]["all_reduce"] == 100 * rarely["traffic_bytes"]["islands"]["all_reduce"]


def test_what_it_cannot_be_combined_with_is_refused(phalanx):
    words = ("small.yaml", "sync=local_sgd", "dp_replicate=2", "checkpoint.every=3")
    said = phalanx("train", *words, code=2, streams="err")
    assert "local_sgd and axis islands of 2 ranks would both have independent replicas; nearest legal: sync=bsp" in said
    assert "axis islands of 2 ranks agrees every 2 steps, and 3 is no multiple of it; nearest: 4" in said
    words = ("cluster=dgx-h100", "cluster.device=auto", "axes.islands.size=2")
    said = phalanx("plan", "small.yaml", *words, code=2, streams="err")
    assert "the planner does not choose axes of packages" in said
    said = phalanx("train", "small.yaml", "axes.islans.size=2", code=2, streams="err")
    assert "did you mean islands? (axes of packages: islands)" in said


@dataclass(frozen=True)
class Options:
    """Options of an axis for refusals."""

    size: int = 1
    every: int = 1


@dataclass(frozen=True)
class Sizeless:
    """Options without a size."""

    ranks: int = 1


GOOD = extend.AxisEntry(
    "rings", "here", "samples", options=Options, agree="phalanx.train.sync:join", messages=(("all_reduce", 1.0),)
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for name in list(AXES_TABLE._packages):
        AXES_TABLE.remove(name)


def refused(name: str, entry: object) -> list[str]:
    with pytest.raises(ExtensionError) as caught:
        extend.axis(name, entry)
    return [problem.removeprefix(f"axis {name!r}: ") for problem in caught.value.problems]


def test_one_that_states_too_little_or_contradicts_itself_is_refused_with_every_problem():
    with pytest.raises(ExtensionError, match="AxisEntry states too little; missing: title, source, cuts$"):
        extend.AxisEntry()
    assert refused("rings", replace(GOOD, options=None)) == [
        "options are missing: a frozen dataclass of its fields in a job"
    ]
    assert refused("rings", replace(GOOD, options=Sizeless)) == [
        "options must be a frozen dataclass with a whole number size, is Sizeless"
    ]
    wrong = replace(GOOD, cuts="matrices", agree=None, messages=(("broadcast", 1.0),), every=lambda options: 0)
    assert refused("tp", wrong) == [
        "the name is taken by package phalanx",
        "cuts must be samples for an axis of a package, is matrices",
        "agree is missing: its ranks would never have the same parameters",
        "messages name 'broadcast', which is none of all_reduce, all_gather, reduce_scatter, all_to_all",
        "every must return a whole number of at least 1, returns 0",
    ]


def test_the_mesh_the_batch_and_lines_have_it():
    extend.axis("rings", GOOD)
    layout = layout_line.parse("pp=2,dp_replicate=2,tp=2,axes.rings.size=3")
    assert (layout.world, layout.data_ranks, layout.independent_replicas) == (24, 6, 3)
    assert layout.line() == "dp_replicate=2,tp=2,pp=2,axes.rings.size=3"
    assert layout_line.parse(layout.line()) == layout
    sizes, coordinates = place(layout, 4 + 12)
    assert list(sizes) == ["pp", "rings", "dp_replicate", "dp_shard", "cp", "tp"]
    assert (coordinates["pp"], coordinates["rings"], coordinates["dp_replicate"], coordinates["tp"]) == (1, 1, 0, 0)
    assert (lines(layout)["rings"].stride, lines(layout)["pp"].stride) == (4, 12)
    assert (group(layout, "independent").stride, group(layout, "pp").stride) == (4, 12)
    assert solve(12, layout).data_ranks == 6
    job = Job(layout=replace(layout, pp=1, tp=1), train=Train(global_batch=7))
    assert any("data ranks 6 (rings 3 × dp_replicate 2 × dp_shard 1)" in problem for _, problem in problems_of(job))
    assert "layout.axes.rings.size" in leaves()
    assert Layout().axes.ranks == 1
