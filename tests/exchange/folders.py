"""Hugging Face folders as transformers writes them, without transformers: by the inverse conversions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.kinds import build
from phalanx.config.hugging_face import config_json
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.data.tokenizer import train_bpe
from phalanx.exchange.hugging_face import WEIGHTS
from phalanx.exchange.links import links
from phalanx.model.transformer import Transformer

VOCABULARY = 300
LLAMA = replace(
    PRESETS["llama2-7b"],
    preset="",
    n_layers=2,
    d_model=32,
    n_heads=4,
    n_kv_heads=2,
    d_ff=48,
    vocab_size=VOCABULARY,
    seq_len=32,
)


def write_folder(folder: Path, model: ModelConfig = LLAMA, files: int = 1, tokens: int = 280) -> Transformer:
    """Writes the folder of a random model in float64, with a tokenizer of at most `tokens`. Returns the model."""
    folder.mkdir()
    transformer = build(model)
    family, values = config_json.write(model)
    (folder / "config.json").write_text(json.dumps(values))
    ours = dict(transformer.named_parameters())
    theirs = {
        name: tensor.detach().contiguous()
        for link in links(model, WEIGHTS[family.model_type])
        for name, tensor in zip(
            link.theirs, link.conversion.theirs([ours[name] for name in link.ours], model), strict=True
        )
    }
    write_tensors(folder, theirs, files)
    if tokens:
        train_bpe(["hello world, the quick brown fox " * 9], tokens).save(folder)
    return transformer


def begin_texts(folder: Path, ids: Sequence[int] = (0,)) -> None:
    """Makes a folder's tokenizer begin texts with tokens of these `ids`, as that of Llama begins them with <s>."""
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    names = {number: token for token, number in stored["model"]["vocab"].items()}
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    stored["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*({"SpecialToken": {"id": names[each], "type_id": 0}} for each in ids), *text],
        "pair": [*text, *text],
        "special_tokens": {names[each]: {"id": names[each], "ids": [each], "tokens": [names[each]]} for each in ids},
    }
    path.write_text(json.dumps(stored))


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], files: int = 1) -> None:
    """Writes model.safetensors, or several files with their index."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    places = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = dict(list(tensors.items())[number::files])
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
