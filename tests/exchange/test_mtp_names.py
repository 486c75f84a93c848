"""Modules for further tokens (model.mtp) in the files of the families that have them: written, read, and left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exchange.folders import write_folder
from exchange.test_export import export_run, tensors_in, write
from families.counterparts import COUNTERPARTS, small_model
from generate.written import write_run
from phalanx.blocks.parameters import parameter_shapes
from phalanx.check.start import starting_point
from phalanx.checkpoint.consolidated import open_source
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.errors import CheckpointError, JobError
from phalanx.exchange.import_run import import_folder
from phalanx.generate.load import load_run
from phalanx.verify.exchange import InFloat64


def with_module(preset: str) -> ModelConfig:
    model = small_model(PRESETS[preset], COUNTERPARTS[preset].small | {"vocab_size": 300})
    return replace(model, n_layers=model.n_layers + 1, mtp=1)


FILES = {
    "deepseek-v3": (
        "num_nextn_predict_layers",
        "model.layers.{n}.{name}",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens", "self_attn.kv_b_proj"),
    ),
    "glm-4.5": (
        "num_nextn_predict_layers",
        "model.layers.{n}.{name}",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens", "self_attn.q_proj"),
    ),
    "qwen3-next-80b-a3b": (
        "num_nextn_predict_layers",
        "mtp.{name}",
        (
            "fc",
            "pre_fc_norm_embedding",
            "pre_fc_norm_hidden",
            "norm",
            "layers.0.self_attn.q_proj",
            "layers.0.input_layernorm",
            "layers.0.mlp.experts.0.gate_proj",
            "layers.0.mlp.shared_expert_gate",
        ),
    ),
}


@pytest.mark.parametrize("preset", FILES)
def test_modules_are_written_and_read(preset: str, tmp_path: Path):
    model = with_module(preset)
    field, pattern, names = FILES[preset]
    ours = write(tmp_path / "run", model)
    export_run(tmp_path / "run", tmp_path / "hf")
    stored = tensors_in(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config[field], config["num_hidden_layers"]) == (1, model.n_layers - 1)
    assert {pattern.format(n=model.n_layers - 1, name=name) + ".weight" for name in names} <= stored.keys()
    found = import_folder([tmp_path / "hf"], tmp_path / "again")
    assert (found.model.n_layers, found.model.mtp) == (model.n_layers, 1)
    assert not any("further" in note for note in found.notes)
    assert starting_point(str(tmp_path / "hf")).model.mtp == 1
    with open_source(tmp_path / "again") as again:
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(again.read(name).to(parameter.dtype), parameter.detach(), rtol=0, atol=0)


def test_the_joining_matrix_reads_embeddings_first_and_norms_have_their_one(tmp_path: Path):
    model = with_module("qwen3-next-80b-a3b")
    ours = dict(write(tmp_path / "run", model).named_parameters())
    export_run(tmp_path / "run", tmp_path / "hf")
    stored, block = tensors_in(tmp_path / "hf"), f"blocks.{model.n_layers - 1}"
    torch.testing.assert_close(stored["mtp.fc.weight"], ours[f"{block}.join.proj.weight"].detach())
    norm = ours[f"{block}.join.embed_norm.weight"].detach() - 1
    torch.testing.assert_close(stored["mtp.pre_fc_norm_embedding.weight"], norm)


def test_transformers_computes_the_main_model(tmp_path: Path):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    model = with_module("deepseek-v3")
    write_run(tmp_path / "run", model)
    export_run(tmp_path / "run", tmp_path / "hf")
    ours = load_run(tmp_path / "run", device="cpu").decoder.model
    assert not any(name.startswith(f"blocks.{model.n_layers - 1}.") for name, _ in ours.named_parameters())
    tokens = torch.arange(10).view(1, 10)
    with InFloat64(), torch.no_grad():
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", **options).eval()
        expected = theirs(tokens, use_cache=False).logits
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-9)


def changed(folder: Path, drop: str = "", noise: str = "") -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not drop or drop not in name}
    kept = {name: tensor + bool(noise and noise in name) for name, tensor in kept.items()}
    save_file(kept, folder / "model.safetensors")


def test_copies_may_be_left_out_and_must_be_copies(tmp_path: Path):
    model = with_module("glm-4.5")
    write(tmp_path / "run", model)
    export_run(tmp_path / "run", tmp_path / "hf")
    changed(tmp_path / "hf", drop="shared_head.head")
    assert import_folder([tmp_path / "hf"], tmp_path / "first").model.mtp == 1
    changed(tmp_path / "hf", noise=f"layers.{model.n_layers - 1}.embed_tokens")
    with pytest.raises(CheckpointError, match=rf"embed_tokens\.weight: no copy .*--layers {model.n_layers - 1}"):
        import_folder([tmp_path / "hf"], tmp_path / "second")


def test_modules_are_left_out(tmp_path: Path):
    model = with_module("deepseek-v3")
    write_folder(tmp_path / "hf", model)
    found = import_folder([tmp_path / "hf"], tmp_path / "first", layers=model.n_layers - 1)
    assert (found.model.mtp, found.model.n_layers) == (0, model.n_layers - 1)
    with open_source(tmp_path / "first") as source:
        source.require(parameter_shapes(found.model))
    # transformers keeps the number, and no weights of modules, when it writes a model.
    changed(tmp_path / "hf", drop=f"layers.{model.n_layers - 1}.")
    found = import_folder([tmp_path / "hf"], tmp_path / "second")
    assert (found.model.mtp, found.model.n_layers) == (0, model.n_layers - 1)
    assert any("modules for further tokens are left out" in note for note in found.notes)


def test_a_family_without_names_for_them_is_refused(tmp_path: Path):
    write(tmp_path / "run", replace(small_model(PRESETS["llama3.1-8b"], {}), mtp=1))
    with pytest.raises(JobError, match="mtp 1 would be 0"):
        export_run(tmp_path / "run", tmp_path / "hf")
