"""Names and values that other programs have for fields of a job, from foreign_names.json with their sources.

Names of ezpz, wordplay and nanoGPT are taken on the command line, and answered with the field's own name and value;
those of other frameworks are only suggested. A value that another word names unambiguously is taken, too:
`train.precision=bfloat16` is bf16, `norm=RMSNorm` is rmsnorm.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.config import presets
from phalanx.config.corpora import CORPORA
from phalanx.config.values import data_file, read_as

_FILE = data_file("foreign_names.json")


@dataclass(frozen=True)
class Alias:
    """Another program's name for a field."""

    path: str = ""
    """Dotted path of the field; of a rule, the field that it mainly sets, or empty."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Values with other names in that program, in lower case; others are the field's own."""
    nothing: Mapping[str, str] = field(default_factory=dict)
    """Values that ask for what happens anyway, with what happens. Others are refused, with ADVICE."""
    rule: bool = False
    """Whether the value depends on other fields, by the rule of this name in check/load.py."""


@dataclass(frozen=True)
class Derived:
    """A name with a rule, its value, and where it was written."""

    name: str
    text: str
    origin: str


def _by_name(names: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: path for path, several in names.items() for name in several}


ALIASES = {name: Alias(path) for name, path in _by_name(_FILE["aliases"]).items()} | {
    name: read_as(Alias, stored, name) for name, stored in _FILE["special"].items()
}
"""Aliases by name, as it is written without its section, or with it where only that is unambiguous."""
FIELDS = _by_name(_FILE["suggested"])
"""Fields of a Job by the last part of a foreign name that is only suggested."""
ADVICE: dict[str, str] = {name: each["advice"] for each in _FILE["advice"] for name in each["names"]}
"""Advice about names that no single field corresponds to."""
SECTIONS = ("train", "model", "data", "optimizer")
"""Wordplay's sections, which may stand before an alias."""
FLAGS = {"fp32": ("train.precision", "fp32"), "no_reshard_after_forward": ("layout.reshard", "false")}
"""Options without a value: the field and the value that they set."""
SWITCHES = {"no_resume": "fresh"}
"""Options without a value that are a switch of a verb."""
GROUPS: dict[str, dict[str, str]] = _FILE["groups"]
"""Wordplay's groups of settings. Other words of the command line win over them."""
VALUES: Mapping[str, Mapping[str, str]] = _FILE["values"]
"""Other words for values, by field, as `plain` gives them."""


def find(name: str) -> tuple[str, Alias] | None:
    """Returns an alias with its name in ALIASES, whether or not wordplay's section stands before it
    (`train.dtype`, `dtype`), or None."""
    section, _, last = name.replace("-", "_").rpartition(".")
    for known in (f"{section}.{last}", last):
        if known in ALIASES and (not section or section in SECTIONS):
            return known, ALIASES[known]
    return None


def plain(text: str) -> str:
    """Returns the lower-case letters and digits of a word."""
    return "".join(letter for letter in text.lower() if letter.isalnum())


def value(path: str, text: str, kind: Any) -> str:
    """Returns the value of the field `path` with type `kind` that a text names, or the text itself. Upper case and
    separators do not matter, if the field takes one of several words."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) is typing.Union else (kind,)
    words = (typing.get_args(each) for each in kinds if typing.get_origin(each) is typing.Literal)
    choices = [str(choice) for every in words for choice in every]
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
    reasons = {word: each["reason"] for each in _FILE["refused"] if each["field"] == path for word in each["values"]}
    on_hub = reasons["c4"] if path == "data.corpus" and text.count("/") == 1 else ""
    reason = reasons.get(plain(text), on_hub)
    return f"{text} {reason}" if reason else ""
