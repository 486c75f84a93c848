"""`phalanx verify --exchange`: every family goes in and out whole, and every planted fault is found by its tensor."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exchange.folders import write_folder
from families.counterparts import COUNTERPARTS, small_model
from generate.written import write_run
from phalanx.checkpoint.manifest import StoredTensor
from phalanx.cli.main import main
from phalanx.config.model import LoRA, ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.exchange import export, import_run
from phalanx.exchange.hugging_face import WEIGHTS
from phalanx.exchange.links import TRANSPOSED, WeightFamily, WeightLink, then
from phalanx.verify.exchange import prove

EVERY = "PHALANX_FAMILIES" in os.environ
FAMILIES = tuple(COUNTERPARTS) if EVERY else ("mixtral-8x7b", "gemma3-27b", "gpt-neox-20b", "deepseek-v3")
FORMS: dict[str, dict[str, Any]] = {
    "own": {},
    "tied": {"tied": True},
    "untied": {"tied": False},
    "padded": {"vocab_size": 300},
    "experts": {},
    "bf16": {},
    "fused": {},
}
"""The forms of every family: with `make test-families` all, otherwise one each in turn."""


def small(name: str, **fields: Any) -> ModelConfig:
    return small_model(PRESETS[name], COUNTERPARTS[name].small | fields)


def document(path: Path, capsys: pytest.CaptureFixture[str], code: int) -> dict[str, Any]:
    found = main(["verify", "--exchange", str(path), "--json"])
    captured = capsys.readouterr()
    assert found == code, captured.err or captured.out
    return json.loads(captured.out)


def cases() -> list[tuple[str, str]]:
    having = {"experts": [name for name in FAMILIES if PRESETS[name].moe.n_experts]}
    having["fused"] = [name for name in FAMILIES if WEIGHTS[COUNTERPARTS[name].model_type].fused]
    forms = list(FORMS)
    if not EVERY:
        return [("deepseek-v3", "fused"), *((name, forms[at % len(forms)]) for at, name in enumerate(FAMILIES[:-1]))]
    return [(name, form) for form in FORMS for name in having.get(form, FAMILIES)]


@pytest.mark.parametrize(("name", "form"), cases())
def test_a_folder_of_transformers_is_proved_in_every_form(name, form, tmp_path, capsys):
    """Sharded always, and padded against a tokenizer of fewer tokens."""
    pytest.importorskip("transformers", minversion="5.0")
    model = small(name, **FORMS[form])
    torch.manual_seed(0)
    theirs: Any = COUNTERPARTS[name].build(model)
    for tensor in theirs.state_dict().values():
        torch.nn.init.normal_(tensor, std=0.2)
    theirs = theirs.bfloat16() if form == "bf16" else theirs
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="60KB", save_original_format=form != "fused")
    found = document(tmp_path / "hf", capsys, 0)
    assert found["ok"]
    assert not found["rounded"]
    assert found["model_type"] == COUNTERPARTS[name].model_type
    assert found["logits_max_rel"] <= 1e-9
    assert found["theirs"] + len(found["left_out"]) == len(
        {key for file in (tmp_path / "hf").glob("*.safetensors") for key in load_file(file)}
    )


@pytest.mark.parametrize("name", COUNTERPARTS if EVERY else ("gpt2", "gpt-oss-20b"))
def test_a_run_is_proved(name, tmp_path, capsys):
    pytest.importorskip("transformers", minversion="5.0")
    write_run(tmp_path / "run", small(name))
    found = document(tmp_path / "run", capsys, 0)
    assert (found["kind"], found["problems"]) == ("run", [])
    assert found["logits_max_rel"] <= 1e-9


def test_a_run_with_adapters_is_proved_with_them_merged(tmp_path):
    write_run(tmp_path / "run", replace(small("llama3.1-8b"), lora=LoRA(rank=2, alpha=4.0, targets="wq,down")))
    assert prove(tmp_path / "run").ok


def test_padding_the_tokenizer_and_small_files_travel_along(tmp_path, capsys, monkeypatch):
    write_folder(tmp_path / "hf", files=3)  # 300 rows for a tokenizer of 280 tokens
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}", "eos_token": "c"}')
    (tmp_path / "hf" / "generation_config.json").write_text('{"temperature": 0.6}')
    (tmp_path / "hf" / "vocab.json").write_text("{}")
    found = document(tmp_path / "hf", capsys, 0)
    assert found["tokenizer"] == "carried over"
    assert found["not_carried"] == ["vocab.json"]
    assert any("20 rows more" in note for note in found["notes"])
    plain = export._Export.side
    monkeypatch.setattr(
        export._Export, "side", lambda self, name, *more: {} if "generation" in name else plain(self, name, *more)
    )
    assert document(tmp_path / "hf", capsys, 1)["problems"] == [
        "generation_config.json: temperature is 0.6, becomes null"
    ]


def test_without_transformers_it_says_so(tmp_path, capsys, monkeypatch):
    write_folder(tmp_path / "hf", tokens=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert document(tmp_path / "hf", capsys, 0)["no_logits"].startswith("transformers is not installed")
    monkeypatch.undo()
    monkeypatch.setattr("phalanx.verify.exchange.free_bytes", lambda device: 1000)
    assert "are free" in document(tmp_path / "hf", capsys, 0)["no_logits"]


# Faults. On one side only, a comparison of bits names the tensor.

Change = Callable[[torch.Tensor], torch.Tensor]
TENSORS = {
    "norm": ("llama3.1-8b", "model.layers.1.input_layernorm.weight"),
    "bias": ("qwen2.5-7b", "model.layers.0.self_attn.k_proj.bias"),
    "expert": ("mixtral-8x7b", "model.layers.0.block_sparse_moe.experts.2.w1.weight"),
    "head": ("llama3.1-8b", "lm_head.weight"),
    "tied": ("gpt2", "transformer.wte.weight"),
    "fused": ("gpt-neox-20b", "gpt_neox.layers.0.attention.query_key_value.weight"),
    "router bias": ("deepseek-v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
}
FAULTS: dict[str, Change] = {
    "perturbed": lambda t: t + 1e-12 * (torch.arange(t.numel()) == 3).view_as(t),
    "zeroed": torch.zeros_like,
    "turned": lambda t: t.flip(0),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A folder of every family that faults are planted into."""
    root = tmp_path_factory.mktemp("faults")
    for name in {name for name, _ in TENSORS.values()}:
        write_folder(root / name, small(name, **({"n_kv_heads": 4} if name == "llama3.1-8b" else {})), tokens=0)
    return {path.name: path for path in root.iterdir()}


def planted(*faults: str) -> Iterable[tuple[str, str]]:
    """Returns every fault of every kind of tensor with `make test-families`, otherwise one of each kind in turn."""
    every = [(kind, fault) for kind in TENSORS for fault in faults]
    return every if EVERY else [(kind, faults[at % len(faults)]) for at, kind in enumerate(TENSORS)]


@pytest.mark.parametrize(("kind", "fault"), planted(*FAULTS))
def test_a_tensor_that_changes_on_the_way_out_is_named(kind, fault, folders, monkeypatch):
    name, tensor = TENSORS[kind]
    plain = export._Weights.read

    def read(self: export._Weights, asked: str) -> torch.Tensor:
        found = plain(self, asked)
        return FAULTS[fault](found) if asked == tensor else found

    monkeypatch.setattr(export._Weights, "read", read)
    monkeypatch.setattr("phalanx.verify.exchange.free_bytes", lambda device: 0)
    problems = prove(folders[name]).problems
    assert {problem.partition(":")[0] for problem in problems if "in the export" in problem} == {tensor}


@pytest.mark.parametrize(("kind", "fault"), planted("omitted", "renamed", "doubled"))
def test_a_tensor_that_is_not_written_under_its_name_is_named(kind, fault, folders, monkeypatch):
    name, tensor = TENSORS[kind]
    other, init, plain = f"{tensor}s", export._Weights.__init__, export._Weights.read
    whole: dict[str, StoredTensor] = {}

    def made(self: export._Weights, *words: Any) -> None:
        init(self, *words)
        whole.update(self.tensors)
        if fault != "omitted":
            self.tensors[other] = self.tensors[tensor]
        if fault != "doubled":
            del self.tensors[tensor]

    def read(self: export._Weights, asked: str) -> torch.Tensor:
        changed, self.tensors = self.tensors, whole
        try:
            return plain(self, tensor if asked == other else asked).clone()
        finally:
            self.tensors = changed

    monkeypatch.setattr(export._Weights, "__init__", made)
    monkeypatch.setattr(export._Weights, "read", read)
    monkeypatch.setattr("phalanx.verify.exchange.free_bytes", lambda device: 0)
    problems = prove(folders[name]).problems
    named = other if fault == "doubled" else tensor
    assert any(re.search(rf"(^|[ /]){re.escape(named)}($|[ :])", problem) for problem in problems), problems


def test_two_tensors_that_are_exchanged_on_the_way_in_are_named(folders, monkeypatch):
    q, k = "blocks.1.attn.wq.weight", "blocks.1.attn.wk.weight"
    plain = import_run.LinkedTensors.read

    def read(self: import_run.LinkedTensors, name: str, *box: Any) -> torch.Tensor:
        return plain(self, {q: k, k: q}.get(name, name), *box)

    monkeypatch.setattr(import_run.LinkedTensors, "read", read)
    problems = prove(folders["llama3.1-8b"]).problems
    named = {problem.partition(":")[0] for problem in problems}
    assert {"model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"} <= named


@pytest.mark.parametrize(("kind", "fault"), planted("missing", "renamed", "of another shape"))
def test_a_folder_in_which_a_tensor_is_wrong_is_refused_by_its_name(kind, fault, folders, tmp_path, capsys):
    name, tensor = TENSORS[kind]
    stored = load_file(folders[name] / "model.safetensors")
    value = stored.pop(tensor)
    if fault == "renamed":
        stored[f"{tensor}s"] = value
    elif fault == "of another shape":
        stored[tensor] = value[:-1].clone()
    (tmp_path / "config.json").write_bytes((folders[name] / "config.json").read_bytes())
    save_file(stored, tmp_path / "model.safetensors")
    assert main(["verify", "--exchange", str(tmp_path)]) == 4
    assert tensor in capsys.readouterr().err


# In both directions alike, only transformers' logits show it, and a repair names the tensor.


def mutated(family: WeightFamily, change: Callable[[WeightLink], WeightLink]) -> WeightFamily:
    return replace(family, matches=tuple(map(change, family.matches)))


def exchanged(a: str, b: str) -> Callable[[WeightLink], WeightLink]:
    other = {a: b, b: a}
    return lambda link: replace(link, ours=tuple(other.get(name, name) for name in link.ours))


def transposed(name: str) -> Callable[[WeightLink], WeightLink]:
    return lambda link: replace(link, conversion=then(link.conversion, TRANSPOSED)) if name in link.ours else link


SYMMETRIC: dict[str, tuple[str, Callable[[WeightLink], WeightLink], str]] = {
    "queries and keys": (
        "llama3.1-8b",
        exchanged("blocks.{}.attn.wq.weight", "blocks.{}.attn.wk.weight"),
        "blocks.0.attn.wq.weight and blocks.0.attn.wk.weight are exchanged",
    ),
    "gate and up of experts": (
        "mixtral-8x7b",
        exchanged("blocks.{}.moe.experts.gate.weight", "blocks.{}.moe.experts.up.weight"),
        "blocks.0.moe.experts.up.weight and blocks.0.moe.experts.gate.weight are exchanged",
    ),
    "two norms": (
        "llama3.1-8b",
        exchanged("blocks.{}.attn_norm.weight", "blocks.{}.mlp_norm.weight"),
        "blocks.0.attn_norm.weight and blocks.0.mlp_norm.weight are exchanged",
    ),
    "a transposed matrix": (
        "llama3.1-8b",
        transposed("blocks.{}.attn.wo.weight"),
        "blocks.0.attn.wo.weight is transposed",
    ),
}


@pytest.mark.parametrize("fault", SYMMETRIC)
def test_what_is_wrong_both_ways_differs_from_transformers_and_is_named(fault, tmp_path, monkeypatch):
    pytest.importorskip("transformers", minversion="5.0")
    name, change, message = SYMMETRIC[fault]
    model = small(name, n_kv_heads=4, head_dim=0, vocab_size=60)
    write_folder(tmp_path / "hf", model, tokens=0)
    kind = COUNTERPARTS[name].model_type
    monkeypatch.setitem(WEIGHTS, kind, mutated(WEIGHTS[kind], change))
    (problem,) = prove(tmp_path / "hf").problems
    assert problem.startswith("logits differ from transformers' by ")
    assert problem.endswith(message)


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("absent", 2, "no run in absent: there is no such folder"),
        ("empty", 2, "neither a run's directory (it has no config.yaml) nor a Hugging Face folder"),
        ("m.gguf", 2, "a GGUF file is quantised"),
        ("hf tp=2", 2, "tp=2: --exchange takes one path, and no job"),
        ("hf --steps 3", 2, "--steps is for layouts of a job"),
    ],
)
def test_what_cannot_be_proved_is_said_in_one_message(path, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "hf").mkdir()
    assert main(["verify", "--exchange", *path.split()]) == code
    assert message in capsys.readouterr().err
