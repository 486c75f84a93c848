"""Every preset is predicted and simulated on a known cluster, with sane figures; some are planned."""

from __future__ import annotations

import json

import pytest

from phalanx.blocks.parameters import count, count_active, train_flops_per_step
from phalanx.check.load import load_words
from phalanx.cli.main import main
from phalanx.config import overrides
from phalanx.config.presets import CATALOGUE, PRESETS
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.simulate.step import step_seconds

SEQUENCES = 16
WORDS = (
    "cluster=dgx-h100:2",
    "dp_shard=16",
    "recompute=full",
    "train.precision=bf16",
    f"train.global_batch={SEQUENCES}",
)
VOCABULARY = 256
"""Of presets that leave it to the tokenizer."""


def spec(name: str) -> StepSpec:
    job = load_words(overrides.parse([f"model={name}", *WORDS])).job
    return step_spec(job, job.model.vocab_size or VOCABULARY)


@pytest.mark.parametrize("name", CATALOGUE)
def test_predictions_are_sane(name: str):
    step = spec(name)
    model, prediction = step.model, predict(step)
    assert prediction.model_flops == train_flops_per_step(model, SEQUENCES)
    # A token multiplies by every weight that it visits, but by no table of embeddings and no norm or bias.
    matrices = count_active(model) - (0 if model.tied else model.vocab_size * model.d_model)
    matrices -= model.seq_len * model.d_model if model.positions == "learned" else 0
    matrices -= model.n_layers * model.vocab_size * model.layer_embedding
    without_attention = 6 * matrices * SEQUENCES * model.seq_len
    assert 0.98 * without_attention <= prediction.model_flops <= 2.7 * without_attention
    # Parameters and gradients in bf16, and AdamW's two moments and master copy, of a sixteenth of the model.
    assert count(model) <= prediction.fullest.peak
    assert prediction.fullest.parts()
    assert 0 < prediction.mfu < 0.7
    assert prediction.step_time_s >= prediction.model_flops / (16 * prediction.peak_flops)


@pytest.mark.parametrize("name", CATALOGUE)
def test_simulations_agree_with_predictions(name: str):
    step = spec(name)
    assert step_seconds(step) == pytest.approx(predict(step).step_time_s, rel=0.02)


@pytest.mark.parametrize("name", ["gemma2-9b", "gpt-oss-20b"])
def test_presets_are_planned(capsys, name: str):
    words = [f"model={name}", "cluster=dgx-h100:1", "train.global_batch=32", "train.precision=bf16", "--json"]
    assert main(["plan", *words]) == 0
    best = json.loads(capsys.readouterr().out)["candidates"][0]
    assert best["prediction"]["fits"]


@pytest.mark.parametrize("name", ["llama3.1-8b", "gpt-oss-20b"])
def test_the_document_of_a_prediction_has_the_parameters(capsys, name: str):
    words = [f"model={name}", "cluster=dgx-h100:1", "dp_shard=8", "train.global_batch=8", "train.precision=bf16"]
    assert main(["predict", *words, "--json"]) in (0, 3)
    document = json.loads(capsys.readouterr().out)
    assert document["parameters"] == count(PRESETS[name])
    assert document["active_parameters"] == count_active(PRESETS[name])
