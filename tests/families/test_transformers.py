"""Every family computes what transformers' own implementation of it computes, in float64: logits and all gradients.

The weights are random and taken over from transformers' model; both attend eagerly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from families.counterparts import COUNTERPARTS, Counterpart, small_model
from phalanx.blocks.kinds import untrained
from phalanx.blocks.parameters import count
from phalanx.config.hugging_face import config_json
from phalanx.config.model import ModelConfig
from phalanx.config.presets import CATALOGUE, PRESETS
from phalanx.exchange.hugging_face import WEIGHTS
from phalanx.exchange.import_run import import_folder
from phalanx.generate.load import empty_model, fill
from phalanx.model.transformer import Transformer
from phalanx.train.run_directory import RunDirectory
from phalanx.verify.exchange import InFloat64

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5 (pip install transformers)")

TOLERANCE = 1e-9
FUSED = ("qwen3.5-35b-a3b", "glm-4.5")
"""Those whose experts lie in files as one tensor per layer, as in those of Qwen 3.5."""


def weights(theirs: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Draws random weights for transformers' model, and returns all of them with the balancing biases."""
    generator = torch.Generator().manual_seed(0)
    found = dict(theirs.named_parameters())
    found |= {
        name: buffer for name, buffer in theirs.named_buffers() if name.endswith(("correction_bias", "layer_scalar"))
    }
    for name, tensor in found.items():
        centre = 1.0 if ("norm" in name and name.endswith("weight")) or "scal" in name else 0.0
        with torch.no_grad():
            tensor.copy_(centre + 0.2 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    return found


def close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    scale = theirs.abs().max().item()
    assert scale > 0, what
    assert (ours - theirs).abs().max().item() <= TOLERANCE * scale, what


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_logits_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path):
    """The model that transformers saves is imported as a run, and loaded from it."""
    counterpart = COUNTERPARTS[name]
    model = small_model(PRESETS[name], counterpart.small)
    theirs = counterpart.in_float64(model)
    taken = weights(theirs)
    stored = counterpart.stored(theirs, taken)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="200KB", save_original_format=name not in FUSED)
    ours = imported(tmp_path)
    assert not config_json.differences(ours.config, model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.vocab_size, (2, model.seq_len), generator=generator)
    with InFloat64():
        expected = theirs(input_ids=tokens).logits
    logits = ours(tokens)
    close(logits, expected, "logits")
    factor = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * factor).sum().backward()
    (logits * factor).sum().backward()
    gradients = {key: torch.zeros_like(each) if each.grad is None else each.grad for key, each in taken.items()}
    zeros = {key: torch.zeros_like(each) for key, each in stored.items()}
    expected_of = counterpart.take(counterpart.stored(theirs, gradients), model)
    constants = counterpart.take(zeros, model)
    for key, parameter in ours.named_parameters():
        if key.endswith("moe.router.bias"):
            continue  # its gradient is the load of the experts
        if ".attn.index." in key:
            continue  # an indexer learns from a loss of its own (tests/model/test_sparse.py)
        if model.positions == "learned" and key.endswith("attn.wk.bias"):
            continue  # it adds the same to all scores of a query, so its gradient is rounding
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, key
        close(parameter.grad, expected_of[key] - constants[key], key)


def imported(folder: Path) -> Transformer:
    """Returns our model of the weights in `folder`/theirs, by way of a run in `folder`/ours."""
    done = import_folder([folder / "theirs"], folder / "ours")
    assert done.precision == "fp64"
    assert done.notes[-1].startswith("no tokenizer.json")
    manifest = RunDirectory(folder / "ours").checkpoint()
    model = empty_model(manifest)
    fill(model, manifest, torch.device("cpu"))
    return model


LIKE = {name: name for name in COUNTERPARTS} | {
    **dict.fromkeys(("llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b"), "llama3.1-8b"),
    **dict.fromkeys(("gpt2-medium", "gpt2-large", "gpt2-xl"), "gpt2"),
    **dict.fromkeys(("llama3.1-70b", "llama3.1-405b", "llama3.2-3b", "llama3.3-70b"), "llama3.1-8b"),
    **dict.fromkeys(("mistral-7b-v0.3", "mistral-small-24b"), "mistral-7b"),
    **{name: "qwen2.5-7b" for name in PRESETS if name.startswith("qwen2")},
    **{name: "qwen3-8b" for name in PRESETS if name.startswith("qwen3-") and not PRESETS[name].moe.n_experts},
    "qwen3-235b-a22b": "qwen3-30b-a3b",
    "gemma4-e4b": "gemma4-e2b",
    **{name: "gemma2-27b" for name in PRESETS if name.startswith("gemma2")},
    **{name: "gemma3-27b" for name in PRESETS if name.startswith("gemma3")},
    **{name: "olmo2-32b" for name in PRESETS if name.startswith("olmo2")},
    **{name: "olmo3-32b" for name in PRESETS if name.startswith("olmo3")},
    "marin-8b": "llama3.1-8b",
    "marin-32b": "qwen3-8b",
    **{name: "gpt-neox-20b" for name in PRESETS if name.startswith("pythia")},
    "gpt-oss-120b": "gpt-oss-20b",
    "glm-4.5-air": "glm-4.5",
    "granite3-2b": "granite3-8b",
    **dict.fromkeys(("ministral3-3b", "ministral3-14b"), "ministral3-8b"),
}
"""The counterpart of each preset."""


@pytest.mark.parametrize("name", LIKE)
def test_transformers_model_has_as_many_parameters(name: str):
    """Built on the meta device with one layer of each last kind, and with two: the rest are alike."""
    counterpart, model = COUNTERPARTS[LIKE[name]], PRESETS[name]
    dense = model.moe.n_dense_layers
    turns_of = (model.attention.split(","), model.feed_forward.split(","), range(model.full_every))
    kinds = max(map(len, turns_of[: 3 if model.wide.head_dim else 2]))
    if model.shared_keys:  # the layers before are not all alike
        assert _size(counterpart, model) + model.n_layers == count(model)
        return
    one, two = (_size(counterpart, replace(model, n_layers=dense + kinds * turns)) for turns in (1, 2))
    # Buffers there: balancing biases and the blocks' scales.
    more = (model.moe.n_experts * model.moe.bias_balanced) * (
        model.n_layers - dense
    ) + model.n_layers * model.layer_scale
    assert one + (two - one) * ((model.n_layers - dense) // kinds - 1) + more == count(model)


def _size(counterpart: Counterpart, model: ModelConfig) -> int:
    built = counterpart.build(model, "meta")
    family = WEIGHTS[counterpart.model_type]
    return sum(each.numel() for name, each in built.named_parameters() if family.needs(name, model))


def test_every_preset_on_the_hub_has_a_counterpart():
    trained = {name for name, preset in CATALOGUE.items() if preset.hub and not untrained(preset.model)}
    assert trained <= set(LIKE)
