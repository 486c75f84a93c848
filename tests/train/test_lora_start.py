"""Runs with adapters that start from other weights, and runs that start from those of adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from exchange.folders import LLAMA, write_folder
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import LoRA, ModelConfig
from phalanx.train import start
from train.runs import change, train, weights

SHARDED = Layout(dp_shard=2, zero=1)
ADAPTERS = LoRA(rank=2, alpha=3, targets="attention")


def test_adapters_begin_beside_weights_from_outside_and_are_merged_or_taken_over(ranks, job, tmp_path):
    base = write_folder(tmp_path / "theirs").state_dict()
    job = change(change(job, "train", steps=3, eval_samples=0, precision="bf16"), "checkpoint", every=0)
    adapted = change(job, "run", name="adapted")
    source = Path(job.run.dir) / "adapted"
    model = replace(LLAMA, from_=str(tmp_path / "theirs"), lora=ADAPTERS)
    ranks(train, 2, replace(adapted, model=model, layout=SHARDED))
    (source / "config.yaml").write_text("{}\n")  # which the command writes, not the ranks
    tuned = weights(adapted)
    for name, tensor in tuned.items():
        if "/" not in name and ".lora_" not in name:
            assert torch.equal(tensor, base[name].bfloat16()), name
    assert {name for name in tuned if name.startswith("master/")} == {
        f"master/{name}" for name in tuned if ".lora_" in name and "/" not in name
    }
    still = change(job, "optimizer", lr=0.0)
    again = change(change(still, "train", steps=1), "run", name="again")
    ranks(train, 1, replace(again, model=replace(model, from_=str(source))))
    taken = weights(again)
    assert all(torch.equal(taken[name], tensor) for name, tensor in tuned.items() if "/" not in name)
    merged = change(change(still, "train", steps=1), "run", name="merged")
    ranks(train, 1, replace(merged, model=replace(LLAMA, from_=str(source))))
    found = weights(merged)
    for name in (name for name in found if "/" not in name):
        expected, layer = tuned[name], name.removesuffix(".weight")
        if (a := tuned.get(f"{layer}.lora_a.weight")) is not None:
            product = tuned[f"{layer}.lora_b.weight"].float() @ a.float()
            expected = (expected.float() + 1.5 * product).bfloat16()
            assert product.any()
        assert torch.equal(found[name], expected), name


def test_adapters_beside_random_weights_are_told(caplog):
    start.begin(Job(model=ModelConfig(lora=ADAPTERS)), cast(Any, None), cast(Any, None), reports=True)
    assert "random weights, which stay as they are: model.from names trained ones" in caplog.text
