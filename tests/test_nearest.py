"""A hint about a mistyped name names what was meant, or nothing: never an unrelated thing."""

from __future__ import annotations

import pickle

import pytest

from phalanx.check.schema import known_names
from phalanx.cli.main import VERBS
from phalanx.config.fields import suggestion
from phalanx.config.foreign_names import refusal, value
from phalanx.config.presets import named, unknown
from phalanx.errors import JobError
from phalanx.nearest import Misfit, nearest


@pytest.mark.parametrize(
    ("field", "typed", "meant"),
    [
        ("model.preset", "lamma3-8b", "llama3-8b"),
        ("model.preset", "gpt2-larg", "gpt2-large"),
        ("model.preset", "qwen3-30b", "qwen3-30b-a3b"),
        ("model.preset", "mixtral", "mixtral-8x7b"),
        ("cluster.preset", "h100", "dgx-h100"),
        ("cluster.preset", "fronteir", "frontier"),
        ("layout.schedule", "interleaved", "interleaved_1f1b"),
        ("data.corpus", "shakespear", "shakespeare_char"),
        ("data.tokenizer", "bytes", "byte"),
        ("optimizer.name", "adam", "adamw"),
        ("cluster.accelerator.name", "mi300", "mi300x"),
        ("run.trackers", "tensorbaord", "tensorboard"),
    ],
)
def test_what_was_meant_is_named(field: str, typed: str, meant: str) -> None:
    assert nearest(typed, known_names()[field]) == meant


@pytest.mark.parametrize(
    ("field", "typed"),
    [
        *(
            ("model.preset", name)
            for name in ["llama4", "llama3-7b", "mamba2-2.7b", "gpt4", "gpt-j", "glm4-9b", "tinyllama", "gemma4"]
        ),
        *(("cluster.preset", name) for name in ["h800x", "h20", "laptop", "p5"]),
        *(("data.corpus", name) for name in ["wikitext", "ultrachat"]),
        *(("data.template", name) for name in ["llama2", "qwen"]),
        *(("run.trackers", name) for name in ["swanlab", "comet"]),
        ("cluster.accelerator.name", "h20"),
        ("optimizer.name", "lamb"),
    ],
)
def test_an_unrelated_thing_is_not(field: str, typed: str) -> None:
    assert nearest(typed, known_names()[field]) is None


@pytest.mark.parametrize("verb", ["prepare", "validate", "sample", "estimate", "chat", "merge", "version", "upload"])
def test_a_verb_is_no_other_verb(verb: str) -> None:
    assert nearest(verb, VERBS) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("label_smoothing", "label smoothing of the cross-entropy is not implemented"),
        ("train.label_smoothing", "label smoothing of the cross-entropy is not implemented"),
        ("flash_attn", "there is nothing to set"),
        ("lr_scheduler", "did you mean optimizer.schedule?"),
        ("tensor_parallel", "did you mean layout.tp?"),
        ("tie_weights", "did you mean model.tied?"),
        ("run.wandb", "did you mean run.trackers?"),
        ("temperature", "an option of `phalanx generate`"),
        ("mtp_num_layers", "prediction of several tokens is priced and not trained: model.mtp"),
    ],
)
def test_fields_of_other_programs_are_known(name: str, said: str) -> None:
    assert said in suggestion(name)


@pytest.mark.parametrize(
    "name", ["padding", "pad_token", "drop_tokens", "save_total", "mlp_ratio", "qk_clip", "sp_size"]
)
def test_no_field_is_far_fetched(name: str) -> None:
    assert suggestion(name) == ""


def test_models_and_corpora_of_other_programs_are_known() -> None:
    assert [value("model.preset", f"gpt2-{size}", str) for size in ("124m", "355M", "774m", "1.5b")] == [
        "gpt2",
        "gpt2-medium",
        "gpt2-large",
        "gpt2-xl",
    ]
    assert named("mamba") == "mamba"
    for name in ("mamba", "mamba2-2.7b", "llama4", "llama4-scout"):
        assert "layers that are not implemented" in unknown(name)
    for name in ("qwen3-vl-8b", "llava-7b"):
        assert "with an encoder of images" in unknown(name)
    assert "there are llama3-8b, llama3-70b, llama3-405b" in unknown("llama3-7b")
    assert "nothing is downloaded" in refusal("data.corpus", "openwebtext")
    assert "data.corpus=chat" in refusal("data.corpus", "ShareGPT")
    assert "data.path of the file" in refusal("data.corpus", "jsonl")


def test_a_misfit_travels_between_processes_as_its_text() -> None:
    error = JobError([Misfit("n_heads 4 / tp 3 is not an integer", 3, {"layout.tp": [1, 2, 4]})])
    assert (
        str(pickle.loads(pickle.dumps(error)))
        == str(error)
        == "n_heads 4 / tp 3 is not an integer; nearest tp: 1, 2, 4"
    )
