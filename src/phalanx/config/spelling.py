"""Values that another word names unambiguously: `train.precision=bfloat16` is bf16, `norm=RMSNorm` is rmsnorm. Each is
taken, and answered with the field's own value."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from phalanx.config import presets
from phalanx.config.corpora import CORPORA

VALUES: Mapping[str, Mapping[str, str]] = {
    "train.precision": {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float64": "fp64"},
    "layout.zero": {"fsdp": "3"},
    "model.preset": {"shakespeare": "baby"},  # wordplay's conf/model/shakespeare.yaml
}
"""Other words for values, by field, as `plain` gives them."""

_SIZES = (
    "is one of ezpz's sizes, whose shapes differ from the presets here; nearest: model=gpt2 (124M parameters), "
    "gpt2-medium (355M), gpt2-xl (1.6B), llama2-7b, llama2-13b, or the fields themselves (model.d_model, n_layers, ...)"
)
_IMAGES = "are images, and the models here are language models; nearest: random, or shakespeare_char"
_REFUSED: Mapping[str, Mapping[str, str]] = {
    "model.preset": dict.fromkeys(("debug", "s", "m", "l", "xl", "xxl", "xxxl", "agpt2b", "agpt20b"), _SIZES),
    "data.corpus": dict.fromkeys(("mnist", "cifar10", "cifar100"), _IMAGES),
}
"""Values that other programs have, with the reason why there are none here."""
_HUB = (
    "is a name on the Hugging Face hub, from which nothing is downloaded; nearest: data.corpus=text with data.path of "
    "text or JSONL files, or random"
)


def plain(text: str) -> str:
    """Returns the lower-case letters and digits of a word."""
    return "".join(letter for letter in text.lower() if letter.isalnum())


def value(path: str, text: str, kind: Any) -> str:
    """Returns the value of the field `path` with type `kind` that a text names, or the text itself. Upper case and
    separators do not matter, if the field takes one of several words."""
    choices = [str(choice) for choice in typing.get_args(kind)] if typing.get_origin(kind) is typing.Literal else []
    if path == "model.preset":
        text = presets.named(text)
    table = CORPORA if path == "data.corpus" else choices
    if text in table:
        return text
    known = {plain(choice): choice for choice in table} | dict(VALUES.get(path, {}))
    if path == "data.corpus":
        known |= {other: name for name, entry in CORPORA.items() for other in entry.also_called}
    return known.get(plain(text), text)


def refusal(path: str, text: str) -> str:
    """Returns why another program's value has no counterpart here, or nothing."""
    if reason := _REFUSED.get(path, {}).get(plain(text)):
        return f"{text} {reason}"
    return f"{text} {_HUB}" if path == "data.corpus" and text.count("/") == 1 else ""
