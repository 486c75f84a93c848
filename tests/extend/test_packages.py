"""A package adds a schedule, an optimizer, a cluster with its device, a corpus with its tokenizer: one file each.

The packages are those of docs/reference/extending.md, installed as by pip, and used by the commands themselves.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from extend.install import PACKAGES, commands, environment, install
from phalanx.blocks.kinds import AttentionKind, FeedForwardKind
from phalanx.extend import (
    AxisEntry,
    CorpusEntry,
    DeviceEntry,
    DispatcherEntry,
    Effect,
    MachineEntry,
    ScheduleEntry,
    Technique,
    TokenizerEntry,
    TrackerEntry,
    UpdateCosts,
)

ROOT = Path(__file__).parents[2]
KINDS = (AttentionKind, FeedForwardKind)
EXAMPLES = ("interleaved_zb", "ademamix", "lab_cluster", "sums")
SMALL = """
model: {n_layers: 4, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {device: cpu, peak_tflops: 1.0}
data: {corpus: sums, tokenizer: sums}
layout: {pp: 2, schedule: interleaved_zb, accumulation: 4}
train: {steps: 2, global_batch: 4, eval_samples: 4, precision: fp32}
checkpoint: {every: 2}
run: {name: sums, sample_tokens: 0}
"""


def _rows(folder: Path) -> list[dict[str, object]]:
    """The rows of the run's metrics."""
    return [json.loads(line) for line in (folder / "runs/sums/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders in which the examples are installed."""
    folder = tmp_path_factory.mktemp("installed")
    return [install(folder / name, name) for name in EXAMPLES]


@pytest.fixture
def phalanx(folders: list[Path], tmp_path: Path):
    """Returns a function that runs a command with the examples installed and returns its standard output."""
    (tmp_path / "small.yaml").write_text(SMALL)
    return commands(tmp_path, *folders)


def test_every_name_says_where_it_is_from(phalanx):
    assert json.loads(phalanx("extensions", "list", "--json")) == {
        "phalanx-ademamix 1.0": {"optimizer": ["ademamix"]},
        "phalanx-interleaved-zb 1.0": {"schedule": ["interleaved_zb"]},
        "phalanx-lab-cluster 1.0": {"device": ["x900"], "cluster": ["lab"]},
        "phalanx-sums 1.0": {"corpus": ["sums"], "tokenizer": ["sums"]},
    }
    listed = {entry["name"]: entry["package"] for entry in json.loads(phalanx("schedule", "list", "--json"))}
    assert listed["interleaved_zb"] == "phalanx-interleaved-zb 1.0"
    assert listed["1f1b"] == "phalanx"
    assert re.search(r"interleaved_zb .*\(phalanx-interleaved-zb 1\.0\)", phalanx("schedule", "list"))
    assert "did you mean lab:2?" in phalanx("plan", "cluster=lap:2", code=2, streams="err")


def test_a_schedule_is_drawn_predicted_and_simulated(phalanx, tmp_path):
    sizes = ("--stages", "4", "--microbatches", "4")
    shown = json.loads(phalanx("schedule", "show", "interleaved_zb", *sizes, "--svg", "a.svg", "--json"))
    assert shown["stages"] == 8
    assert "<svg" in (tmp_path / "a.svg").read_text()
    job = (
        "small.yaml",
        "cluster=lab:1",
        "cluster.device=auto",
        "cluster.peak_tflops=0",
        "cluster.devices_per_node=2",
        "--json",
    )
    predicted, simulated = json.loads(phalanx("predict", *job)), json.loads(phalanx("simulate", *job))
    assert predicted["bubble"] > 0
    assert predicted["step_time_s"] == pytest.approx(simulated["step_time_s"], rel=0.2)


def test_a_schedule_is_chosen_by_the_planner_where_it_wins(phalanx):
    """With as many micro-batches as ranks every other schedule has a larger bubble. Sequences are short enough that
    nothing is recomputed: split backward passes keep what they computed again."""
    job = ("model=llama3-8b", "seq_len=2048", "cluster=lab:1", "train.global_batch=4", "train.precision=bf16", "--json")
    plan = json.loads(phalanx("plan", *job, "pp=4", "tp=1", "cp=1"))
    assert plan["best"]["schedule"] == "interleaved_zb"
    without = json.loads(phalanx("plan", *job, "pp=4", "tp=1", "cp=1", "schedule=zb_v"))
    assert plan["candidates"][0]["prediction"]["step_time_s"] < without["candidates"][0]["prediction"]["step_time_s"]


def test_a_schedule_equals_one_process(phalanx):
    """In float64, like every layout of `phalanx verify`."""
    layouts = ("pp=2,schedule=interleaved_zb,pp_chunks=2,accumulation=3",)
    done = json.loads(phalanx("verify", "small.yaml", "--layouts", *layouts, "--steps", "1", "--json"))
    assert [case["ok"] for case in done["cases"]] == [True]
    assert done["cases"][0]["grad_max_rel"] < 1e-9


def test_a_dispatcher_equals_one_process(phalanx, tmp_path):
    added = install(tmp_path / "counted", "counted_rows")
    layout = "dp_shard=2,ep=2,dispatch=counted"
    done = json.loads(phalanx("verify", "model=tiny-moe", "--layouts", layout, "--steps", "1", "--json", more=(added,)))
    assert [(case["layout"], case["ok"]) for case in done["cases"]] == [(layout, True)]
    words = ("predict", "model=tiny-moe", "vocab_size=65", *layout.split(","), "redundant_experts=1")
    said = phalanx(*words, more=(added,), code=2, streams="err")
    assert "dispatch counted is a package's own" in " ".join(said.split())
    assert "nearest legal: dispatch=tokens, or redundant_experts=0" in " ".join(said.split())


ADEMAMIX = ("small.yaml", "optimizer=ademamix", "optimizer.options=alpha=2,beta3=0.99", "pp=1", "schedule=1f1b")


def test_an_optimizer_equals_one_process(phalanx):
    layouts = ("dp_shard=2,zero=2", "tp=2")
    done = json.loads(phalanx("verify", *ADEMAMIX, "--layouts", *layouts, "--json"))
    assert [case["ok"] for case in done["cases"]] == [True, True]
    assert max(case["param_max_rel"] for case in done["cases"]) < 1e-9


def test_an_optimizer_trains_resumes_in_another_layout_and_is_predicted(phalanx, tmp_path):
    job = (*ADEMAMIX, "train.precision=fp64", "train.steps=4", "layout.accumulation=0")
    # The run loses its last checkpoint, and goes on from the second step.
    phalanx("train", *job, "run.name=moved", "dp_shard=2", "zero=2")
    shutil.rmtree(tmp_path / "runs/moved/checkpoints/step-000004")
    phalanx("train", *job, "run.name=moved", "tp=2")
    lines = (tmp_path / "runs/moved/metrics.jsonl").read_text().splitlines()
    steps = [(row["step"], row["loss"]) for row in map(json.loads, lines) if "grad_norm" in row]
    assert [step for step, _ in steps] == [1, 2, 3, 4, 3, 4]
    assert [loss for _, loss in steps[4:]] == pytest.approx([loss for _, loss in steps[2:4]], rel=1e-9)
    kinds = json.loads(phalanx("checkpoint", "show", "runs/moved", "--json"))["kinds"]
    assert set(kinds) >= {"exp_avg", "exp_avg_slow", "exp_avg_sq"}
    alone = ("pp=1", "schedule=1f1b", "dp_replicate=4", "cluster=lab:1", "cluster.device=auto", "cluster.peak_tflops=0")
    own, adamw = (
        json.loads(phalanx("predict", "small.yaml", *alone, "layout.accumulation=0", f"optimizer={name}", "--json"))
        for name in ("ademamix", "adamw")
    )
    assert own["memory"]["optimizer"] == pytest.approx(1.5 * adamw["memory"]["optimizer"], rel=1e-3)
    assert own["step_time_s"] > adamw["step_time_s"]


def test_wrong_options_of_an_optimizer_are_refused_together(phalanx):
    words = ("small.yaml", "optimizer=ademamix", "optimizer.options=alpa=2,beta3=1", "optimizer.momentum=0.5")
    said = phalanx("train", *words, code=2, streams="err")
    assert (
        "ademamix has no option alpa; did you mean alpha? (known: alpha, beta3); beta3 must lie in [0, 1), is 1.0"
        in said
    )
    assert "optimizer.momentum=0.5: ademamix does not read it" in said


def test_a_cluster_and_a_device_are_planned_and_recognised(phalanx, tmp_path, folders):
    job = ("model=llama3-8b", "train.global_batch=64", "train.precision=bf16")
    plan = json.loads(phalanx("plan", *job, "cluster=lab:2", "--json"))
    assert plan["candidates"][0]["prediction"]["fits"]
    saving = ("dp_shard=8", "recompute=full", "loss_chunk=1024")
    predicted = json.loads(phalanx("predict", *job, "cluster=lab:2", *saving, "--json"))
    assert 0 < predicted["mfu"] < 1
    program = (
        "from phalanx.config.clusters import device_reported_as as known\n"
        "print(known('Example X900-64GB', 64.0), known('X900 64GB', 62.5).name, known('X900 64GB', 40.0))"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment(*folders), capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["None", "x900", "None"]


def test_a_corpus_and_a_tokenizer_are_prepared_trained_on_resumed_and_generate(phalanx, tmp_path):
    """Two ranks of a pipeline with the schedule of another package, then two replicas. Bytes are as predicted."""
    prepared = json.loads(phalanx("data", "prepare", "small.yaml", "--verify", "--json"))
    assert prepared["documents"] == 20
    assert prepared["vocab_size"] == 14
    assert prepared["begins"].startswith("0+0=0\n37+53=90\n")
    assert Path(prepared["path"]).name.startswith("sums-sums-")
    phalanx("train", "small.yaml")
    [counted] = [row["traffic_bytes"] for row in _rows(tmp_path) if row["event"] == "traffic"]
    machine = ("cluster=lab:1", "cluster.devices_per_node=2")
    assert counted == json.loads(phalanx("predict", "small.yaml", *machine, "--json"))["traffic_bytes"]
    resumed = ("pp=1", "schedule=1f1b", "dp_replicate=2", "layout.accumulation=0", "train.steps=4")
    newer = install(tmp_path / "newer", "sums", version="1.1")
    said = phalanx("train", "small.yaml", *resumed, more=(newer,), streams="err")
    assert "resuming with a change: extensions" in said
    assert [row["step"] for row in _rows(tmp_path) if row["event"] == "step"] == [1, 2, 3, 4]
    # Another version of a package makes shards of its own; these have the same tokens.
    assert len(list((tmp_path / "data").glob("sums-sums-*"))) == 2
    recorded = json.loads((tmp_path / "runs/sums/env.json").read_text())["extensions"]
    assert recorded["phalanx-sums"].startswith("1.1, source ")
    text = phalanx("generate", "runs/sums", "--prompt", "1+1=", "--max-new-tokens", "8")
    assert set(text.strip()) <= set("0123456789+=\n?")


def test_a_tokenizer_whose_package_is_gone_is_named(phalanx, tmp_path):
    prepared = json.loads(phalanx("data", "prepare", "small.yaml", "--json"))
    command = [sys.executable, "-P", "-m", "phalanx", "data", "prepare"]
    words = ["data.corpus=stdlib", "limit_mb=0.1", f"data.tokenizer={tmp_path / prepared['path']}"]
    command += words
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "expected a char, byte or number tokenizer of version 1, found {'version': 1, 'kind': 'sums'}" in done.stderr
    assert "is the package that adds it installed?" in done.stderr


def test_a_package_that_fails_stops_what_lists_the_tables_and_nothing_else(phalanx, tmp_path):
    bad = install(tmp_path / "bad", "zzz", text="def register():\n    raise RuntimeError('no licence')\n")
    for words in (("schedule", "list"), ("plan", "model=gpt2", "cluster=dgx-h100", "train.global_batch=8")):
        said = phalanx(*words, code=2, more=(bad,), streams="err")
        assert "phalanx: package phalanx-zzz 1.0: its entry point zzz = zzz:register failed: RuntimeError" in said
        assert "Traceback" not in said
    phalanx("predict", "model=gpt2", "cluster=dgx-h100", "dp_replicate=8", "train.global_batch=8", more=(bad,))


def test_a_bug_in_the_code_of_a_package_names_it(phalanx, tmp_path):
    text = (PACKAGES / "sums.py").read_text().replace("for document in range(DOCUMENTS):", "for document in [1 / 0]:")
    broken = install(tmp_path / "broken", "broken", text=text.replace('"sums"', '"broken"'))
    said = phalanx("data", "prepare", "data=broken", code=1, more=(broken,), streams="err")
    assert "ZeroDivisionError" in said
    assert "phalanx: raised in code of package phalanx-broken 1.0, which extends Phalanx" in said


def test_a_tokenizer_that_gives_other_ids_than_it_says_is_refused(phalanx, tmp_path):
    text = (PACKAGES / "sums.py").read_text().replace("vocab_size = len(SYMBOLS)", "vocab_size = 5")
    wrong = install(tmp_path / "wrong", "wrong", text=text.replace('"sums"', '"wrong"'))
    said = phalanx("data", "prepare", "data=wrong", "tokenizer=wrong", code=2, more=(wrong,), streams="err")
    assert "tokenizer 'wrong' of package phalanx-wrong 1.0: separator must be a tuple of ids below 5, is (12,)" in said


@pytest.mark.parametrize(
    "entry",
    [
        *(*KINDS, ScheduleEntry, DeviceEntry, MachineEntry, CorpusEntry, TokenizerEntry, TrackerEntry),
        *(Technique, Effect, UpdateCosts, AxisEntry, DispatcherEntry),
    ],
)
def test_the_documentation_names_every_fact(entry: type):
    page = (ROOT / "docs" / "reference" / "extending.md").read_text()
    assert not [field.name for field in fields(entry) if f"`{field.name}`" not in page]


@pytest.mark.parametrize("name", [*EXAMPLES, "gated", "csv_tracker", "rounding", "islands", "counted_rows"])
def test_the_documentation_shows_the_examples_as_they_are(name: str):
    page = (ROOT / "docs" / "reference" / "extending.md").read_text()
    assert f"```python\n{(PACKAGES / f'{name}.py').read_text()}```" in page
