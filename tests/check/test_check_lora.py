"""Refusals with adapters: targets that no layer has, and techniques that need every weight to be trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.check.job import problems_of
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, LoRA, ModelConfig, MoE
from phalanx.config.overrides import parse
from phalanx.config.yaml_file import parse as parse_yaml

MODEL = ModelConfig(vocab_size=64, positions="rope", lora=LoRA(rank=4))
EXPERTS = replace(MODEL, moe=MoE(n_experts=4, n_dense_layers=1))


def problems(model: ModelConfig = MODEL, **parts) -> list[tuple[str, str]]:
    return problems_of(Job(model=model, train=Train(global_batch=8), **parts))


def test_adapters_alone_are_legal():
    for targets in ("all", "attention", "feed_forward", "wq, wv", "up", "attention,down"):
        assert not problems(replace(MODEL, lora=LoRA(rank=4, targets=targets)))
    for targets in ("all", "feed_forward", "up", "wq", "moe.experts.down,mlp.up"):
        assert not problems(replace(EXPERTS, lora=LoRA(rank=4, targets=targets)))
    latent = replace(MODEL, mla=MLA(q_rank=8, kv_rank=8))
    assert not problems(replace(latent, lora=LoRA(rank=4, targets="wkv_a,wq_b")))


@pytest.mark.parametrize(
    ("model", "targets", "said"),
    [
        (MODEL, "atention", "no matrix 'atention'; did you mean attention?"),
        (MODEL, "wq,wkv_a", "no matrix 'wkv_a'"),
        (MODEL, "", "no matrix ''"),
        (EXPERTS, "router", "no matrix 'router'"),
        (EXPERTS, "experts.up", "leaves blocks of heads, dense without an adapter"),
    ],
)
def test_targets_are_matrices_of_every_kind_of_block(model, targets, said):
    ((path, message),) = problems(replace(model, lora=LoRA(rank=4, targets=targets)))
    assert path == "model.lora.targets"
    assert said in message


@pytest.mark.parametrize(
    ("parts", "path", "said"),
    [
        ({"layout": Layout(dp_replicate=2, sync="local_sgd")}, "layout.sync", "nearest legal: sync=bsp"),
        ({"layout": Layout(pp=2, schedule="pipedream")}, "layout.schedule", "nearest legal: schedule=1f1b"),
        ({"optimizer": Optimizer(name="muon")}, "optimizer.name", "nearest legal: optimizer=adamw, or lora.rank=0"),
    ],
)
def test_what_needs_every_weight_is_refused(parts, path, said):
    assert [(where, said in message) for where, message in problems(**parts)] == [(path, True)]
    assert not problems(replace(MODEL, lora=LoRA()), **parts)


def test_ranges():
    assert {path for path, _ in problems(replace(MODEL, lora=LoRA(rank=-1, alpha=0)))} == {
        "model.lora.rank",
        "model.lora.alpha",
    }


def test_the_section_may_stand_alone():
    """`lora.rank=8` and `lora: {rank: 8}` mean the model's adapters; `rank` alone means nothing."""
    found = parse(["lora.rank=8", "--lora.targets", "wq"])
    assert [(setting.path, setting.text) for setting in found.settings] == [
        ("model.lora.rank", "8"),
        ("model.lora.targets", "wq"),
    ]
    assert parse(["rank=8"]).problems
    assert "did you mean model.lora.rank?" in parse(["lora.rnk=8"]).problems[0]
    settings, wrong = parse_yaml("lora:\n  rank: 8\nmodel:\n  lora: {alpha: 2}\n", "job.yaml")
    assert not wrong
    assert [setting.path for setting in settings] == ["model.lora.rank", "model.lora.alpha"]
