"""Values that another word names unambiguously: `train.precision=bfloat16` is bf16, `norm=RMSNorm` is rmsnorm. Each is
taken, and answered with the field's own value."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from phalanx.config import presets
from phalanx.config.corpora import CORPORA

VALUES: Mapping[str, Mapping[str, str]] = {
    "train.precision": {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "float64": "fp64",
        "float8": "fp8",
    },
    "layout.zero": {"fsdp": "3"},
    "model.preset": {
        "shakespeare": "baby",  # wordplay's conf/model/shakespeare.yaml
        **dict.fromkeys(("gpt2124m", "gpt2117m", "gpt2small"), "gpt2"),  # by their parameters, as in many papers
        **dict.fromkeys(("gpt2355m", "gpt2345m", "gpt2350m"), "gpt2-medium"),
        **dict.fromkeys(("gpt2774m", "gpt2762m"), "gpt2-large"),
        **dict.fromkeys(("gpt21558m", "gpt21542m", "gpt215b", "gpt216b"), "gpt2-xl"),
    },
}
"""Other words for values, by field, as `plain` gives them."""

_SIZES = (
    "is one of ezpz's sizes, whose shapes differ from the presets here; nearest: model=gpt2 (124M parameters), "
    "gpt2-medium (355M), gpt2-xl (1.6B), llama2-7b, llama2-13b, or the fields themselves (model.d_model, n_layers, ...)"
)
_IMAGES = "are images, and the models here are language models; nearest: random, or shakespeare_char"
_HUB = (
    "is a name on the Hugging Face hub, from which nothing is downloaded; nearest: data.corpus=text with data.path of "
    "text or JSONL files, or random"
)
_ON_HUB = "c4 fineweb fineweb-edu openwebtext wikitext redpajama slimpajama dolma dclm pile tinystories lm1b enwik8"
_CHATS_ON_HUB = "alpaca ultrachat sharegpt openassistant oasst dolly slimorca tulu openhermes"
_CHAT = "is a set of conversations, which is not downloaded; nearest: data.corpus=chat with data.path of its file"
_FORMAT = "is a format of files; nearest: data.corpus=text, or chat for conversations, with data.path of the file"


def plain(text: str) -> str:
    """Returns the lower-case letters and digits of a word."""
    return "".join(letter for letter in text.lower() if letter.isalnum())


_REFUSED: Mapping[str, Mapping[str, str]] = {
    "model.preset": dict.fromkeys(("debug", "s", "m", "l", "xl", "xxl", "xxxl", "agpt2b", "agpt20b"), _SIZES),
    "data.corpus": {
        **dict.fromkeys(("mnist", "cifar10", "cifar100"), _IMAGES),
        **dict.fromkeys(map(plain, _ON_HUB.split()), _HUB),
        **dict.fromkeys(map(plain, _CHATS_ON_HUB.split()), _CHAT),
        **dict.fromkeys(("json", "jsonl", "csv", "tsv", "parquet", "arrow"), _FORMAT),
    },
}
"""Values that other programs have, with the reason why there are none here."""


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
