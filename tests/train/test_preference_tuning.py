"""Preference tuning: any layout makes the curve of one process, tied to the model before the first step."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from phalanx.check.job import problems_of
from phalanx.config.clusters import cluster_of
from phalanx.config.job import Data
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig
from phalanx.cost.job_spec import stages
from phalanx.cost.traffic import step_traffic
from phalanx.errors import StoppedError
from phalanx.partition import derived as batch
from phalanx.plan.space import MeshDegrees, _batches, plan_request
from phalanx.train.run_directory import REFERENCE
from train.runs import change, losses, rows, train, weights

SMALL = ModelConfig(n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, seq_len=64, positions="rope")
LAYOUTS = [
    "dp_replicate=2",
    "dp_shard=2,zero=3",
    "pp=2,micro_batch=2",
    "dp_shard=2,cp=2",
    "cp=2,tp=2,loss_chunk=9",
    "pp=2,micro_batch=4,schedule=terapipe,pp_slices=4,cp=2",
]


@pytest.fixture
def preferences(job, tmp_path):
    draw = random.Random(2)
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for _ in range(50):
            a, b = draw.randrange(30), draw.randrange(30)
            row = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": draw.choice(["?", "no idea", str(a)])}
            file.write(json.dumps(row) + "\n")
    data = Data(
        corpus="preferences",
        path=str(tmp_path / "pairs.jsonl"),
        template="alpaca",
        val_fraction=0.2,
        dir=str(tmp_path / "data"),
    )
    job = change(dataclasses.replace(job, model=SMALL, data=data), "train", global_batch=8, steps=4)
    return change(job, "guard", on_spike="off")


def test_any_layout_makes_the_curve_of_one_process(ranks, preferences):
    [alone] = ranks(train, 1, preferences)
    assert alone["loss"] < losses(preferences)[0] == pytest.approx(0.6931471805599453, rel=1e-12)
    assert rows(preferences, "step")[0]["reward_margin"] == pytest.approx(0, abs=1e-12)
    assert rows(preferences, "validation")[-1]["val_reward_accuracy"] > 0.5
    expected, references = curve(preferences), reference(preferences)
    for line in LAYOUTS:
        layout = parse(line)
        other = change(dataclasses.replace(preferences, layout=layout), "run", name=f"run-{line}")
        assert not problems_of(other)
        summary = ranks(train, layout.processes, other)[0]
        assert curve(other) == pytest.approx(expected, rel=1e-9, abs=1e-12), line
        assert summary["traffic_bytes"] == predicted(other), line
        for split, values in reference(other).items():
            assert values == pytest.approx(references[split], rel=1e-12), line


def curve(job) -> list[float]:
    names = ("loss", "grad_norm", "reward_chosen", "reward_margin")
    steps = [row[name] for row in rows(job, "step") for name in names]
    # In the first step the model is the reference: the order of a pair is that of rounding.
    right = [row["reward_accuracy"] for row in rows(job, "step")[1:]]
    return [*steps, *right, *(row["val_loss"] for row in rows(job, "validation"))]


def reference(job) -> dict:
    return load_file(Path(job.run.dir) / job.run.name / REFERENCE)


def predicted(job) -> dict:
    model = dataclasses.replace(job.model, vocab_size=len(weights(job)["embed.weight"]))
    equation = batch.solve(job.train.global_batch, job.layout)
    return step_traffic(
        model, job.layout, equation, precision=job.train.precision, stages=stages(model, job.layout) or None, pairs=True
    )


def test_a_run_goes_on_with_the_same_reference(ranks, preferences):
    ranks(train, 1, preferences)
    resumed = change(preferences, "run", name="resumed")
    with pytest.raises(StoppedError):
        ranks(train, 1, resumed, 2)
    before = reference(resumed)
    (Path(resumed.run.dir) / "resumed" / REFERENCE).unlink()
    ranks(train, 1, resumed)
    assert {split: values.tolist() for split, values in reference(resumed).items()} == {
        split: values.tolist() for split, values in before.items()
    }
    assert curve(resumed) == curve(preferences)


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ("micro_batch=3", "layout.micro_batch", "is 3 sequences, which cuts a pair of 2; nearest legal: 4 or 2"),
        ("dp_replicate=2,sync=local_sgd", "layout.sync", "needs sync=bsp"),
        ("dp_replicate=2,data_parallel=threads", "layout.data_parallel", "threads would cut pairs"),
    ],
)
def test_what_would_cut_pairs_is_refused(preferences, line, field, words):
    wrong = change(dataclasses.replace(preferences, layout=parse(line)), "train", global_batch=0)
    assert any(path == field and words in message for path, message in problems_of(wrong))


def test_options_of_pairs_are_refused_for_other_data(job):
    [(path, message)] = problems_of(change(job, "train", dpo=dataclasses.replace(job.train.dpo, beta=0.2)))
    assert path == "train.dpo.beta"
    assert "nearest legal: corpus=preferences" in message


def test_the_planner_keeps_pairs_together(preferences):
    job = dataclasses.replace(preferences, cluster=cluster_of("dgx-h100"))
    request = plan_request(change(job, "train", precision="bf16"), 64)
    degrees = MeshDegrees(tp=1, sp=False, cp=1, cp_ulysses=1, pp=1, dp_shard=1, dp_replicate=1, ep=1)
    assert [micro for micro, _ in _batches(request, degrees)] == [2, 4, 8]
