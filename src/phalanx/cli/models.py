"""`phalanx models [NAME or WORDS]`: the presets, with parameters, kinds and sources."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from phalanx.blocks.parameters import count, count_active, train_flops_per_token
from phalanx.check.job import shape_problems
from phalanx.cli.columns import filled
from phalanx.cli.commands import WHOLE, Command, CommandVerb
from phalanx.cli.option import Option
from phalanx.config.families import kinds
from phalanx.config.families.preset import Preset
from phalanx.config.model import ModelConfig
from phalanx.config.presets import CATALOGUE, FROM_FILE, named, preset_of, unknown
from phalanx.echo import echo, terminal_columns
from phalanx.errors import JobError

_FIGURES = 5
"""Columns of a row before its kinds and its source: the name, and figures."""

IGNORE_CONFIG = {
    "ignore_config": Option(
        tuple[str, ...], (), "fields of config.json to leave out though they are refused: a,b", value="FIELDS"
    )
}
IGNORE_CONFIG_ALIAS = {"model.ignore_config": "ignore_config"}
VERB = CommandVerb(
    "models",
    "Lists known models, for `model=NAME` of any job.",
    {WHOLE: Command(("[NAME|WORD]",), IGNORE_CONFIG, aliases=IGNORE_CONFIG_ALIAS, more=True)},
    (
        ("models experts window", "those with both words in name, kinds or source"),
        ("models meta-llama/Llama-3.1-8B", "one in detail, here by its name on the hub"),
    ),
    (
        "Words find the presets that have all of them in name, kinds or source; without one all are listed. A NAME is "
        "shown in detail: a preset, a repository on the hub, or a Hugging Face config.json as hf:DIR/config.json.",
    ),
    default=WHOLE,
)


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    name = named(" ".join(words.subjects))
    ignored = words.options.get("ignore_config", ())
    if ignored and not name.startswith(FROM_FILE):
        raise JobError(f"--ignore-config is for fields of a config.json: name it, as in {FROM_FILE}DIR/config.json")
    if name in CATALOGUE or name.startswith(FROM_FILE):
        shown = json.dumps(entry(name, ignored), indent=1) if words.as_json else details(name, ignored)
        echo(shown, wrap=not words.as_json)
        return 0
    names = _matching(words.subjects)
    if words.as_json:
        echo(json.dumps([entry(name) for name in names], indent=1))
    else:
        echo(table(names, terminal_columns(sys.stdout)), wrap=True)
    return 0


def _found(name: str, ignored: Sequence[str] = ()) -> tuple[Preset, ModelConfig]:
    preset = preset_of(name, ignored)
    if problems := shape_problems(preset.model):
        raise JobError([f"{name}: {path}: {message}" for path, message in problems])
    return preset, preset.model


def entry(name: str, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the document of one preset, or of a config.json without its `ignored` fields. Counts are null where the
    vocabulary is the tokenizer's."""
    preset, model = _found(name, ignored)
    known = bool(model.vocab_size)
    return {
        "name": name,
        "parameters": count(model) if known else None,
        "active_parameters": count_active(model) if known else None,
        "train_flops_per_token": train_flops_per_token(model) if known else None,
        "layers": model.n_layers,
        "d_model": model.d_model,
        "attention": kinds.attention(model),
        "windows": kinds.windows(model),
        "norm": kinds.norm(model),
        "feed_forward": kinds.feed_forward(model),
        "positions": kinds.positions(model),
        "seq_len": model.seq_len,
        "context": preset.context or model.seq_len,
        "hub": list(preset.hub),
        "source": preset.source,
        "note": preset.note,
    }


def table(names: Sequence[str], width: int = 0) -> str:
    """Returns one line per preset: parameters, active ones where they are fewer, layers, context, kinds, source. In a
    `width` that is too small for that the kinds and the source have lines of their own, below."""
    rows = [_row(name) for name in names]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = sum(widths[:_FIGURES]) + 2 * (_FIGURES - 1)
    stacks = 0 < width < first + sum(2 + wide for wide in widths[_FIGURES:])
    return "\n".join(_stacked(row, widths, width) if stacks else _aligned(row, widths) for row in rows)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Returns the cells of a row, or its first ones, in columns: figures to the right, words to the left."""
    cells = enumerate(zip(row, widths, strict=False))
    aligned = (cell.rjust(wide) if 0 < number < _FIGURES else cell.ljust(wide) for number, (cell, wide) in cells)
    return "  ".join(aligned).rstrip()


def _stacked(row: Sequence[str], widths: Sequence[int], width: int) -> str:
    """Returns the name and the figures of a row, and below them its words in lines of `width`."""
    below = "\n".join(filled("; ".join(cell for cell in row[_FIGURES:] if cell), width, indent=4))
    return f"{_aligned(row[:_FIGURES], widths)}\n{below}"


def details(name: str, ignored: Sequence[str] = ()) -> str:
    """Returns everything known of a preset, or of a config.json without its `ignored` fields."""
    preset, model = _found(name, ignored)
    facts = {
        "parameters": _counts(model),
        "FLOPs": _flops(model),
        "shape": f"{model.n_layers} layers, {model.d_model:,} wide, heads of {model.head_size}, MLP of "
        f"{model.ff_size:,}, {'one table' if model.tied else 'two tables'} of "
        f"{f'{model.vocab_size:,} tokens' if model.vocab_size else 'the tokenizer'}",
        "attention": kinds.attention(model),
        "windows": kinds.windows(model),
        "norm": kinds.norm(model),
        "MLP": kinds.feed_forward(model) + _experts(model),
        "positions": kinds.positions(model),
        "samples": f"{model.seq_len:,} tokens (seq_len); released context {preset.context or model.seq_len:,}",
        "hub": ", ".join(preset.hub),
        "source": preset.source,
        "note": preset.note,
    }
    width = max(map(len, facts))
    return "\n".join([name, *(f"  {fact:<{width}}  {text}" for fact, text in facts.items() if text)])


def _row(name: str) -> list[str]:
    preset, model = _found(name)
    known = bool(model.vocab_size)
    total, active = (count(model), count_active(model)) if known else (0, 0)
    return [
        name,
        _short(total) if known else "-",
        f"{_short(active)} active" if active < total else "",
        f"{model.n_layers} layers",
        f"{_tokens(model.seq_len)} of {_tokens(preset.context or model.seq_len)}",
        _kinds(model),
        preset.source.partition(";")[0].partition(",")[0],
    ]


def _kinds(model: ModelConfig) -> str:
    parts = [kinds.attention(model), kinds.windows(model), kinds.norm(model), kinds.feed_forward(model)]
    return "; ".join(part for part in parts if part)


def _counts(model: ModelConfig) -> str:
    if not model.vocab_size:
        return "as many as the tokenizer's vocabulary makes"
    total, active = count(model), count_active(model)
    return f"{total:,} ({_short(total)})" + (f", of which {active:,} per token" if active < total else "")


def _flops(model: ModelConfig) -> str:
    if not model.vocab_size:
        return ""
    return f"{train_flops_per_token(model) / 1e9:,.1f} G per token, forward and backward, at {model.seq_len:,} tokens"


def _experts(model: ModelConfig) -> str:
    moe = model.moe
    if not moe.n_experts:
        return ""
    dense = f" after {moe.n_dense_layers} dense layers" if moe.n_dense_layers else ""
    return f" of {model.expert_ff_size:,}{dense}; {moe.router} router"


def _matching(words: Sequence[str]) -> list[str]:
    """Returns the presets that have all words. Raises JobError with the likely name if there are none."""
    texts = {name: _searched(name) for name in CATALOGUE}
    names = [name for name, text in texts.items() if all(word.lower() in text for word in words)]
    if names:
        return names
    asked = " ".join(words)
    if (meant := named(asked)) in CATALOGUE:
        return [meant]
    raise JobError(f"no model preset has {asked!r} in its name, kinds or source{unknown(asked)}")


def _searched(name: str) -> str:
    preset, model = _found(name)
    return " ".join([name, _kinds(model), kinds.positions(model), *preset.hub, preset.source]).lower()


def _short(parameters: int) -> str:
    """Returns a count with three digits: "8.03B"."""
    exponent = int(f"{parameters:.2e}".partition("e")[2]) // 3  # of the rounded count: 999.9M are 1.00B
    return f"{parameters / 1000**exponent:#.3g}".rstrip(".") + ("", "K", "M", "B", "T")[exponent]


def _tokens(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else f"{length:,}"
