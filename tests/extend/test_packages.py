"""A package adds a schedule, a cluster with its device, a corpus with its tokenizer: one file each, nothing in src.

The packages are those of docs/extending.md, installed as pip would do it, and used by the commands themselves.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from extend.install import PACKAGES, environment, install

ROOT = Path(__file__).parents[2]
EXAMPLES = ("interleaved_zb", "lab_cluster", "sums")
SMALL = """
model: {n_layers: 4, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {device: cpu, peak_tflops: 1.0}
data: {corpus: sums, tokenizer: sums}
layout: {pp: 2, schedule: interleaved_zb, accumulation: 4}
train: {steps: 2, global_batch: 4, eval_samples: 4, precision: fp32}
checkpoint: {every: 2}
run: {name: sums, sample_tokens: 0}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders in which the examples are installed."""
    folder = tmp_path_factory.mktemp("installed")
    return [install(folder / name, name) for name in EXAMPLES]


@pytest.fixture
def phalanx(folders: list[Path], tmp_path: Path):
    """Returns a function that runs a command with the examples installed and returns its standard output."""

    def run(*words: str, code: int = 0, more: tuple[Path, ...] = (), streams: str = "out") -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "phalanx", *words],
            cwd=tmp_path,
            env={**environment(*folders, *more), "PHALANX_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if streams == "out" else done.stderr

    (tmp_path / "small.yaml").write_text(SMALL)
    return run


def test_every_name_says_where_it_is_from(phalanx):
    assert json.loads(phalanx("extensions", "list", "--json")) == {
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
    shown = json.loads(
        phalanx(
            "schedule", "show", "interleaved-zb", "--stages", "4", "--microbatches", "4", "--svg", "a.svg", "--json"
        )
    )
    assert shown["stages"] == 8
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    job = ("small.yaml", "cluster=lab:1", "cluster.device=auto", "cluster.peak_tflops=0", "--json")
    predicted, simulated = json.loads(phalanx("predict", *job)), json.loads(phalanx("simulate", *job))
    assert predicted["bubble"] > 0
    assert predicted["step_time_s"] == pytest.approx(simulated["step_time_s"], rel=0.2)


def test_a_schedule_is_chosen_by_the_planner_where_it_wins(phalanx):
    """With as many micro-batches as ranks every other schedule has a larger bubble."""
    job = ("model=llama3-8b", "cluster=lab:1", "train.global_batch=4", "train.precision=bf16", "--json")
    plan = json.loads(phalanx("plan", *job, "pp=4", "tp=1", "cp=1"))
    assert plan["best"]["schedule"] == "interleaved_zb"
    without = json.loads(phalanx("plan", *job, "pp=4", "tp=1", "cp=1", "schedule=zb_v"))
    assert plan["candidates"][0]["prediction"]["step_time_s"] < without["candidates"][0]["prediction"]["step_time_s"]


def test_a_schedule_equals_one_process(phalanx):
    """In float64, like every layout of `phalanx verify`; its bytes are those of the ledger."""
    layouts = ("pp=2,schedule=interleaved_zb,pp_chunks=2,accumulation=3",)
    done = json.loads(phalanx("verify", "small.yaml", "--layouts", *layouts, "--steps", "1", "--json"))
    assert [case["ok"] for case in done["cases"]] == [True]
    assert done["cases"][0]["grad_max_rel"] < 1e-9


def test_a_cluster_and_a_device_are_planned_and_recognised(phalanx, tmp_path, folders):
    job = ("model=llama3-8b", "train.global_batch=64", "train.precision=bf16")
    plan = json.loads(phalanx("plan", *job, "cluster=lab:2", "--json"))
    assert plan["candidates"][0]["prediction"]["fits"]
    predicted = json.loads(phalanx("predict", *job, "cluster=lab:2", "dp_shard=8", "--json"))
    assert 0 < predicted["mfu"] < 1
    program = (
        "from phalanx.config.devices import device_reported_as as known\n"
        "print(known('Example X900-64GB', 64.0), known('X900 64GB', 62.5).name, known('X900 64GB', 40.0))"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment(*folders), capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["None", "x900", "None"]
    (tmp_path / "rows.csv").write_text(
        "model,gpu,n_gpus,dp,global_batch_seqs,seq_len,precision\nllama3-8b,X900,8,8,64,8192,bf16\n"
    )
    phalanx("predict", "--table", "rows.csv", "--out", "out.csv")
    assert "lab" in (tmp_path / "out.csv").read_text() or "pred_step_time_s" in (tmp_path / "out.csv").read_text()


def test_a_corpus_and_a_tokenizer_are_prepared_trained_on_resumed_and_generate(phalanx, tmp_path):
    """Two ranks of a pipeline with the schedule of another package, then two replicas."""
    prepared = json.loads(phalanx("data", "prepare", "small.yaml", "--verify", "--json"))
    assert prepared["documents"] == 20
    assert prepared["vocab_size"] == 14
    assert prepared["begins"].startswith("0+0=0\n37+53=90\n")
    assert Path(prepared["path"]).name.startswith("sums-sums-")
    phalanx("train", "small.yaml")
    resumed = ("pp=1", "schedule=1f1b", "dp_replicate=2", "layout.accumulation=0", "train.steps=4")
    said = phalanx("train", "small.yaml", *resumed, streams="err")
    rows = [json.loads(line) for line in (tmp_path / "runs/sums/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "grad_norm" in row] == [1, 2, 3, 4], said
    recorded = json.loads((tmp_path / "runs/sums/env.json").read_text())["extensions"]
    assert recorded["phalanx-sums"].startswith("1.0, source ")
    text = phalanx("generate", "runs/sums", "--prompt", "1+1=", "--max-new-tokens", "8")
    assert set(text.strip()) <= set("0123456789+=\n?")


def test_another_version_of_a_package_makes_tokens_of_its_own(phalanx, tmp_path, folders):
    first = json.loads(phalanx("data", "prepare", "small.yaml", "--json"))
    newer = install(tmp_path / "newer", "sums", version="1.1")
    environment_of_newer = {**environment(newer, folders[0], folders[1])}
    command = [sys.executable, "-P", "-m", "phalanx", "data", "prepare", "small.yaml", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment_of_newer, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["path"] != first["path"]


def test_a_tokenizer_whose_package_is_gone_is_named(phalanx, tmp_path):
    prepared = json.loads(phalanx("data", "prepare", "small.yaml", "--json"))
    command = [sys.executable, "-P", "-m", "phalanx", "data", "prepare"]
    words = ["data.corpus=stdlib", "limit_mb=0.1", f"data.tokenizer={tmp_path / prepared['path']}"]
    done = subprocess.run(
        [*command, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert "expected a char, byte or number tokenizer of version 1, found {'version': 1, 'kind': 'sums'}" in done.stderr


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


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_documentation_shows_the_examples_as_they_are(name: str):
    page = (ROOT / "docs" / "extending.md").read_text()
    assert f"```python\n{(PACKAGES / f'{name}.py').read_text()}```" in page
