"""Families under layouts that their parts meet: each equals one process in float64.

`make verify-families` compares every family with every kind of layout; here stand a few that cover them, and with
`make whole` a few more."""

from __future__ import annotations

from pathlib import Path

import pytest

from covering import also_whole
from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.job import Job
from phalanx.verify.measure import TOLERANCE, compare, record
from phalanx.verify.select import select

CASES = {
    "gemma3-27b": ("cp=2,cp_ulysses=2,pp=2", *also_whole("cp=2,tp=2,sp=true")),
    "gemma4-31b wide.n_kv_heads=1": (
        *("cp=2,tp=2,sp=true", "tp=4,recompute=products"),
        *also_whole("cp=2,cp_ulysses=2,pp=2", "dp_shard=2,tp=4,zero=3,recompute=products"),
    ),
    "gemma4-26b-a4b": ("dp_shard=2,tp=2,sp=true,ep=2,zero=3", *also_whole("cp=2,pp=2,recompute=full")),
    "gemma2-27b": ("dp_shard=2,tp=2,sp=true,recompute=full",),
    "olmo2-32b": ("tp=2,sp=true,pp=2", *also_whole("dp_shard=2,cp=2")),
    "olmo3-32b": ("dp_shard=2,cp=2", *also_whole("tp=2,sp=true,pp=2")),
    "gpt-neox-20b": ("dp_shard=2,tp=2,sp=true,zero=2", *also_whole("cp=2,pp=2")),
    "gpt-oss-20b": (
        "cp=2,tp=2,sp=true,ep=2,recompute=full",
        *also_whole("dp_shard=2,tp=2,sp=true,ep=2", "cp=2,pp=2,recompute=full"),
    ),
    "glm-4.5": ("dp_shard=2,tp=2,sp=true,ep=2",),
    "smollm3-3b": ("cp=2,pp=2", *also_whole("cp=2,tp=2,sp=true,pp=2")),
    "qwen3-next-80b-a3b": (
        *("dp_shard=2,tp=2,sp=true,ep=2,zero=3", "cp=4,cp_ulysses=2"),
        *also_whole("cp=2,pp=2", "cp=4,cp_ulysses=2,tp=2"),
    ),
    "granite3-8b": ("pp=2,cp=2,recompute=full", *also_whole("dp_shard=2,tp=2,sp=true")),
    "kimi-k2": ("cp=2,tp=2,sp=true",),
    "llama4-maverick-17b-128e window=2048 moe.aux_loss=0": (
        *("dp_shard=2,tp=2,sp=true,ep=2,zero=3", "pp=2,pp_slices=2,schedule=terapipe"),
        *also_whole("cp=2,cp_ulysses=2", "cp=2,pp=2,recompute=products"),
    ),
    "llama4-scout-17b-16e window=2048": ("tp=2,ep=2,dp_shard=2,recompute=full",),
    "ministral-8b window=2048": ("cp=2,tp=2,sp=true",),
    "ministral3-8b": ("cp=2,pp=2",),
    "deepseek-v3.2 moe.aux_loss=0": (
        *("cp=2,pp=2,pp_slices=2,schedule=terapipe", "dp_shard=2,tp=2,sp=true,ep=4,etp=1"),
        *also_whole("dp_shard=2,tp=2,sp=true,ep=2,zero=3", "pp=2,schedule=zb_h1"),
        *also_whole("cp=2,tp=2,sp=true", "dp_shard=2,zero=2,recompute=products"),
    ),
    "gemma4-e2b window=2048": (
        *("cp=2,cp_ulysses=2,zero=2", "pp=2,tp=2,schedule=zb_h1"),
        "pp=2,pp_slices=2,schedule=terapipe,recompute=full",
        *also_whole("dp_shard=2,tp=2,sp=true,recompute=full", "cp=2,pp=2,recompute=products", "tp=4,dp_shard=2"),
    ),
    "glm-5 sparse.dense_warmup=true": (
        "cp=2,tp=2,sp=true,ep=4,etp=1",
        *also_whole("pp=2,tp=2,recompute=full"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layouts_equal_one_process(ranks, tmp_path: Path, name: str):
    preset, *words = name.split()
    words = [f"model={preset}", *(f"model.{word}" for word in words)]
    selection = select(load_words(overrides.parse(words)).job, lines=CASES[name])
    assert not selection.refused
    vocabulary = selection.compared.vocab_size
    records = dict[Job, Path]()
    for layout in selection.layouts:
        alone = selection.alone(layout)
        if alone not in records:
            records[alone] = tmp_path / f"{layout.line()}.safetensors"
            ranks(record, 1, alone, vocabulary, 1, records[alone])
        path = records[alone]
        found = ranks(compare, layout.processes, selection.case(layout), vocabulary, 1, path)[0]
        assert found.losses
        differences = {**found.gradients[0], **found.parameters, "loss": found.losses[0]}
        assert {name: value for name, value in differences.items() if not value <= TOLERANCE} == {}, layout.line()
