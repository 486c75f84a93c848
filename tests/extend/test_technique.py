"""A package adds a technique with fields of its own: stochastic rounding of the parameters at the update.

The package is that of docs/reference/extending.md, installed as by pip, and used by the commands themselves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors import safe_open

from extend.install import commands, install
from phalanx import extend
from phalanx.check.job import problems_of
from phalanx.config.fields import leaves
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import predict
from phalanx.errors import ExtensionError
from phalanx.techniques.catalogue import OWN, TECHNIQUES

SMALL = """
model: {n_layers: 2, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {device: cpu}
data: {corpus: random, random_vocab: 40}
train: {steps: 4, global_batch: 4, eval_samples: 0, precision: fp64}
techniques: {rounding: {format: bf16}}
checkpoint: {every: 2}
run: {name: rounded, sample_tokens: 0}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("installed") / "rounding", "rounding")


@pytest.fixture
def phalanx(package: Path, tmp_path: Path):
    """Returns a function that runs a command with the package installed and returns its standard output."""
    (tmp_path / "small.yaml").write_text(SMALL)
    return commands(tmp_path, package)


def test_it_is_listed_with_its_fields_in_help_and_schema(phalanx):
    assert json.loads(phalanx("extensions", "list", "--json")) == {"phalanx-rounding 1.0": {"technique": ["rounding"]}}
    shown = phalanx("train", "small.yaml", "--help", "techniques")
    assert "Stochastic rounding of the parameters at every update." in shown
    assert "--techniques.rounding.format" in shown
    assert "small.yaml:6" in shown
    schema = json.loads(phalanx("schema"))["properties"]["techniques"]["properties"]["rounding"]["properties"]
    assert schema["format"]["enum"] == ["none", "bf16", "e8m10"]


def test_every_layout_rounds_like_one_process(phalanx):
    """Alone, and in the layouts that the package states: shards, tensor slices and copies of stages round alike."""
    layouts = ("dp_shard=2,zero=2", "tp=2", "dp_shard=2,zero=3,tp=2", "pp=2,dp_shard=2,zero=1,accumulation=2")
    done = json.loads(
        phalanx("verify", "small.yaml", "model.tied=true", "--layouts", *layouts, "--steps", "3", "--json")
    )
    assert [case["ok"] for case in done["cases"]] == [True] * 4
    assert max(case["param_max_rel"] for case in done["cases"]) < 1e-9


def test_it_trains_on_its_grid_and_resumes_in_another_layout(phalanx, tmp_path):
    """The run loses its last checkpoint, and goes on from the second step: losses are as before."""
    phalanx("train", "small.yaml", "dp_shard=2", "zero=2")
    step = tmp_path / "runs/rounded/checkpoints/step-000004"
    for file in step.rglob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            values = [tensors.get_tensor(name) for name in tensors.keys() if "/" not in name]  # noqa: SIM118
            assert all((value == value.bfloat16().double()).all() for value in values)
    shutil.rmtree(step)
    said = phalanx("train", "small.yaml", "tp=2", streams="err")
    assert "rounding: parameters rounded stochastically at every update" in said
    rows = map(json.loads, (tmp_path / "runs/rounded/metrics.jsonl").read_text().splitlines())
    steps = [(row["step"], row["loss"]) for row in rows if "grad_norm" in row]
    assert [number for number, _ in steps] == [1, 2, 3, 4, 3, 4]
    assert [loss for _, loss in steps[4:]] == pytest.approx([loss for _, loss in steps[2:4]], rel=1e-9)
    resolved = (tmp_path / "runs/rounded/config.yaml").read_text()
    assert "techniques:\n  rounding:\n    format: bf16  # small.yaml:6\n" in resolved


def test_it_is_predicted_and_planned(phalanx):
    job = ("small.yaml", "model=gpt2", "cluster=dgx-h100:1", "cluster.device=auto", "train.precision=fp32", "--json")
    rounded, plain = (
        json.loads(
            phalanx("predict", *job, "dp_replicate=8", "train.global_batch=8", f"techniques.rounding.format={each}")
        )
        for each in ("bf16", "none")
    )
    parameters = rounded["memory"]["parameters"] / 4
    more = rounded["step_time_s"] - plain["step_time_s"]
    assert more == pytest.approx(16 * parameters / 3.35e12, rel=0.5)
    best = [
        json.loads(phalanx("plan", *job, "train.global_batch=8", f"techniques.rounding.format={each}"))["candidates"][0]
        for each in ("bf16", "none")
    ]
    assert best[0]["prediction"]["step_time_s"] > best[1]["prediction"]["step_time_s"]


def test_what_it_cannot_be_combined_with_is_refused(phalanx):
    words = ("small.yaml", "train.precision=bf16", "layout.offload=optimizer", "techniques.rounding.embeding=false")
    said = phalanx("predict", *words, code=2, streams="err")
    assert "did you mean techniques.rounding.embedding?" in said
    assert "rounds parameters that have no copy in fp32, and precision=bf16 keeps one; nearest legal: train" in said
    assert "technique rounding changes parameters on the device after each update" in said
    off = ("techniques.rounding.format=none", "techniques.rounding.embedding=false")
    assert "it is for techniques.rounding.format other than none" in phalanx(
        "predict", "small.yaml", *off, code=2, streams="err"
    )
    said = phalanx("predict", "small.yaml", code=2, streams="err", alone=True)
    assert "unknown section techniques (techniques of packages: none; is the package that adds it installed?)" in said


@dataclass(frozen=True)
class Options:
    """Options of a technique for refusals."""

    times: int = 1


@dataclass
class Mutable:
    """No options: it can change, and has fields that no job file holds."""

    of: list[int]


GOOD = extend.Technique(
    "twice", "here", is_on=lambda job: job.techniques.twice.times > 1, options=Options, apply="phalanx.parallel:nothing"
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for name in list(TECHNIQUES._packages):
        TECHNIQUES.remove(name)


def refused(name: str, entry: object) -> list[str]:
    with pytest.raises(ExtensionError) as caught:
        extend.technique(name, entry)
    assert name not in TECHNIQUES or name in OWN
    return [problem.removeprefix(f"technique {name!r}: ") for problem in caught.value.problems]


def test_one_that_states_too_little_or_contradicts_itself_is_refused_with_every_problem():
    with pytest.raises(ExtensionError, match="Technique states too little; missing: title, source, is_on$"):
        extend.Technique()
    assert refused("twice", replace(GOOD, options=None)) == [
        "options are missing: a frozen dataclass of its fields in a job"
    ]
    assert refused("offload", GOOD)[0] == "the name is taken by package phalanx"
    assert refused("twice", replace(GOOD, options=Mutable)) == ["options must be a frozen dataclass, is Mutable"]
    wrong = replace(
        GOOD,
        is_on=lambda job: True,
        apply=None,
        problems=lambda job: [("layout", "always wrong")],
        effect=lambda job: 3,
        conditions={"layout.tp": (lambda job: True, "is for nothing")},
    )
    assert refused("twice", wrong) == [
        "it does nothing: state apply, update or both",
        "with the defaults of its options it must be off",
        "effect must return an Effect, returns int",
        "conditions name layout.tp, which is no field of its options",
        "with the defaults of its options it has the problem 'always wrong' in the default job",
    ]
    assert refused("twice", replace(GOOD, is_on=lambda job: job.techniques.thrice.times > 1)) == [
        "its facts cannot be computed: AttributeError: no technique 'thrice'"
    ]


def test_its_fields_come_and_go_with_it():
    assert "techniques.twice.times" not in leaves()
    extend.technique("twice", GOOD)
    assert leaves()["techniques.twice.times"] is int
    job = replace(Job(), techniques=Job().techniques.having("twice", Options(3)))
    assert GOOD.is_on(job)
    assert not problems_of(job)
    assert job.techniques.having("twice", Options()) == Job().techniques
    TECHNIQUES.remove("twice")
    assert "techniques.twice.times" not in leaves()


def test_an_effect_changes_figures_of_the_framework():
    extend.technique("twice", replace(GOOD, effect=lambda job: extend.Effect(passes=job.techniques.twice.times)))
    job = Job(model=PRESETS["gpt2"], layout=Layout(dp_replicate=8))
    job = replace(job, cluster=replace(extend.TABLES["cluster"]["dgx-h100"].cluster, nodes=1))
    slower = replace(job, techniques=job.techniques.having("twice", Options(2)))
    seconds = [predict(step_spec(each, 1024)).step_time_s for each in (job, slower)]
    assert seconds[1] > 1.02 * seconds[0]
