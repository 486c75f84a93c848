"""Checkpoints with adapters: resumed in other layouts, and merged into a model without adapters."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.contents import contents
from checkpoint.trained import small_job
from phalanx.blocks.parameters import parameter_shapes, trained_shapes
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.convert import convert, merged
from phalanx.checkpoint.inventory import newest_valid
from phalanx.checkpoint.manifest import Box
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.layout import Layout
from phalanx.config.model import LoRA, MoE
from phalanx.errors import CheckpointError, JobError
from phalanx.generate.load import load_run
from train.runs import change, moves_between, train

ADAPTERS = LoRA(rank=2, alpha=3, targets="attention,experts.down,mlp.up")
EXPERTS = MoE(n_experts=4, top_k=2, d_ff=8, n_dense_layers=1)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = small_job(tmp_path_factory.mktemp("adapters"), Layout(), "fp64")
    return change(job, "model", lora=ADAPTERS, moe=EXPERTS)


@pytest.fixture(scope="module")
def run(job, ranks):
    """A run that changed its layout on the way, beside the one of one process."""
    moves_between(
        ranks, job, [Layout(dp_shard=2, tp=2, zero=1), Layout(pp=2, dp_shard=2, ep=2), Layout(dp_replicate=2)]
    )
    folder = Path(job.run.dir) / "moved"
    (folder / "config.yaml").touch()  # which the launcher writes
    return folder


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    manifest = newest_valid(run / "checkpoints")
    assert manifest is not None
    return contents(manifest.path)


def by_formula(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + alpha / rank · B A of every matrix with an adapter."""
    plain = {name: tensor for name, tensor in tensors.items() if "/" not in name and ".lora_" not in name}
    for name, tensor in plain.items():
        layer = name.removesuffix(".weight")
        if (a := tensors.get(f"{layer}.lora_a.weight")) is not None:
            plain[name] = tensor + 3 / 2 * (tensors[f"{layer}.lora_b.weight"] @ a)
    return plain


def test_the_optimizer_has_state_of_adapters_alone(job, run):
    kept = {name.partition("/")[2] for name in tensors_of(run) if "/" in name}
    assert kept == set(trained_shapes(job.model, 13))


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """The run with merged weights."""
    target = tmp_path_factory.mktemp("merged") / "whole"
    with open_source(run) as source:
        done = convert(source, target, "phalanx", merge_lora=True)
    assert any("begins with new moments" in note for note in done.notes)
    return target


def test_a_merged_run_computes_the_same_without_adapters(job, run, whole):
    found, expected = tensors_of(whole), by_formula(tensors_of(run))
    assert found.keys() == expected.keys() == parameter_shapes(replace(job.model, lora=LoRA()), 13).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    tokens = torch.arange(20).view(2, 10) % 13
    with torch.no_grad():
        plain, adapted = (load_run(path, device="cpu").decoder.model for path in (whole, run))
        assert not any(".lora_" in name for name, _ in plain.named_parameters())
        torch.testing.assert_close(plain(tokens), adapted(tokens), rtol=1e-10, atol=1e-12)


def test_it_resumes_with_every_weight_trained(job, whole, ranks, tmp_path):
    shutil.copytree(whole, tmp_path / "whole")
    longer = change(change(job, "run", dir=str(tmp_path), name="whole"), "train", steps=7)
    ranks(train, 1, change(longer, "model", lora=LoRA()))
    before, after = tensors_of(whole), tensors_of(tmp_path / "whole")
    assert not any(torch.equal(before[name], after[name]) for name in before if "router.bias" not in name)


def test_weights_may_be_merged_in_a_narrower_type(run, tmp_path):
    with open_source(run) as source:
        convert(source, tmp_path / "model.safetensors", "safetensors", merge_lora=True, dtype="bf16")
    expected = by_formula(tensors_of(run))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor, expected.pop(name).bfloat16())
    assert not expected


def test_boxes_are_merged_alone(run):
    expected = by_formula(tensors_of(run))
    with open_source(run) as source, merged(source) as reader:
        for name, shape in (("blocks.0.attn.wk.weight", (16, 16)), ("blocks.1.moe.experts.down.weight", (4, 16, 8))):
            offsets, sizes = tuple(n // 4 for n in shape), tuple(n // 2 for n in shape)
            part = expected[name][tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
            torch.testing.assert_close(reader.read(name, Box(offsets, sizes)), part, rtol=1e-13, atol=1e-15)
        with pytest.raises(CheckpointError, match="no parameter exp_avg/embed.weight"):
            reader.read("exp_avg/embed.weight")


def test_without_adapters_there_is_nothing_to_merge(run, whole, tmp_path):
    with open_source(whole) as source:
        assert merged(source) is source
        with pytest.raises(JobError, match="--merge-lora: .* has no adapters"):
            convert(source, tmp_path / "again", "phalanx", merge_lora=True)
    manifest = newest_valid(run / "checkpoints")
    assert manifest is not None
    with pytest.raises(CheckpointError, match="has adapters and no job"):
        merged(Reader(replace(manifest, meta={})))
