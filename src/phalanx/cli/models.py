"""`phalanx models [NAME or WORDS]`: the presets, with parameters, kinds and sources; `phalanx import hf DIR … --out
RUN`: weights of another program as a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.blocks.parameters import count, count_active, train_flops_per_token
from phalanx.check.job import shape_problems
from phalanx.cli.help_page import filled
from phalanx.cli.option import Option, flag_of
from phalanx.cli.verb import WHOLE, Command, Verb, Words
from phalanx.config import kinds
from phalanx.config.hugging_face.families import BY_TYPE
from phalanx.config.model import ModelConfig
from phalanx.config.precision import WeightFormat
from phalanx.config.presets import CATALOGUE, FROM_FILE, Preset, named, preset_of, unknown
from phalanx.data.files import stderr_progress
from phalanx.echo import echo, terminal_columns
from phalanx.errors import JobError
from phalanx.units import aligned, gib

if TYPE_CHECKING:
    from phalanx.exchange.import_run import Imported


_FIGURES, _SIDES = 5, "lrrrrll"
"""Columns of a row before its kinds and its source: the name, and figures."""

IGNORE_CONFIG = {
    "ignore_config": Option(
        tuple[str, ...], (), "fields of config.json to leave out though they are refused: a,b", value="FIELDS"
    )
}
IGNORE_CONFIG_ALIAS = {"model.ignore_config": "ignore_config"}
VERB = Verb(
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


@VERB.runs
def run(words: Words) -> None:
    name = named(" ".join(words.subjects))
    ignored = words.options["ignore_config"]
    if ignored and not name.startswith(FROM_FILE):
        raise JobError(f"--ignore-config is for fields of a config.json: name it, as in {FROM_FILE}DIR/config.json")
    if name in CATALOGUE or name.startswith(FROM_FILE):
        words.show(entry(name, ignored), details(name, ignored))
    else:
        names = _matching(words.subjects)
        words.show([entry(name) for name in names], table(names, terminal_columns(sys.stdout)))


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
    lines = aligned(rows, _SIDES)
    if 0 < width < max(map(len, lines)):
        words = [filled("; ".join(cell for cell in row[_FIGURES:] if cell), width, indent=4) for row in rows]
        firsts = aligned([row[:_FIGURES] for row in rows], _SIDES[:_FIGURES])
        lines = [line for first, below in zip(firsts, words, strict=True) for line in (first, *below)]
    return "\n".join(lines)


def details(name: str, ignored: Sequence[str] = ()) -> str:
    """Returns everything known of a preset, or of a config.json without its `ignored` fields."""
    preset, model = _found(name, ignored)
    counts, flops = "as many as the tokenizer's vocabulary makes", ""
    if model.vocab_size:
        total, active = count(model), count_active(model)
        counts = f"{total:,} ({_short(total)})" + (f", of which {active:,} per token" if active < total else "")
        flops = (
            f"{train_flops_per_token(model) / 1e9:,.1f} G per token, forward and backward, at {model.seq_len:,} tokens"
        )
    moe, experts = model.moe, ""
    if moe.n_experts:
        dense = f" after {moe.n_dense_layers} dense layers" if moe.n_dense_layers else ""
        experts = f" of {model.expert_ff_size:,}{dense}; {moe.router} router"
    facts = {
        "parameters": counts,
        "FLOPs": flops,
        "shape": f"{model.n_layers} layers, {model.d_model:,} wide, heads of {model.head_size}, MLP of "
        f"{model.ff_size:,}, {'one table' if model.tied else 'two tables'} of "
        f"{f'{model.vocab_size:,} tokens' if model.vocab_size else 'the tokenizer'}",
        "attention": kinds.attention(model),
        "windows": kinds.windows(model),
        "norm": kinds.norm(model),
        "MLP": kinds.feed_forward(model) + experts,
        "positions": kinds.positions(model),
        "samples": f"{model.seq_len:,} tokens (seq_len); released context {preset.context or model.seq_len:,}",
        "hub": ", ".join(preset.hub),
        "source": preset.source,
        "note": preset.note,
    }
    return _listed(name, facts)


def _listed(head: str, facts: Mapping[str, str]) -> str:
    width = max(map(len, facts))
    return "\n".join([head, *(f"  {fact:<{width}}  {text}" for fact, text in facts.items() if text)])


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


def _matching(words: Sequence[str]) -> list[str]:
    """Returns the presets that have all words. Raises JobError with the likely name if there are none."""
    found = []
    for name in CATALOGUE:
        preset, model = _found(name)
        text = " ".join([name, _kinds(model), kinds.positions(model), *preset.hub, preset.source]).lower()
        found += [name] if all(word.lower() in text for word in words) else []
    if found:
        return found
    asked = " ".join(words)
    if (meant := named(asked)) in CATALOGUE:
        return [meant]
    raise JobError(f"no model preset has {asked!r} in its name, kinds or source{unknown(asked)}")


def _short(parameters: int) -> str:
    """Returns a count with three digits: "8.03B"."""
    exponent = int(f"{parameters:.2e}".partition("e")[2]) // 3  # of the rounded count: 999.9M are 1.00B
    return f"{parameters / 1000**exponent:#.3g}".rstrip(".") + ("", "K", "M", "B", "T")[exponent]


def _tokens(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else f"{length:,}"


WHAT = {
    "precision": Option(WeightFormat, "", "type of the weights (default: each tensor's own; of GGUF fp32)"),
    "layers": Option(int, 0, "the first N layers only: a smaller model, for trials", at_least=1),
}
_FOLDERS = {
    **IGNORE_CONFIG,
    "base": Option(str, "", "of a PEFT adapter: the folder of its base, or hub:OWNER/NAME", value="DIR"),
}
IMPORT = Verb(
    "import",
    "Makes a run of another program's weights: `phalanx generate RUN` continues a text with it, and a job with "
    "`model.from: RUN` trains from its weights in any layout.",
    {
        "hf": Command(
            ("SOURCE",),
            {"out": Option(str, "", "the run's directory, which must not exist", value="RUN"), **WHAT, **_FOLDERS},
            aliases=IGNORE_CONFIG_ALIAS,
            more=True,
            about="a folder of Hugging Face or its files, a GGUF file, or a model of the hub",
        )
    },
    (
        ("import hf SmolLM2-135M --out runs/smollm", "a folder"),
        ("import hf hub:openai-community/gpt2 --out runs/gpt2", "a model of the hub"),
    ),
    (
        "SOURCE is a Hugging Face folder (config.json, safetensors, tokenizer.json), its files, a LoRA folder of PEFT, "
        "which is merged into its base, a GGUF file, which is dequantised, or hub:OWNER/NAME, which the hub's library "
        "downloads. The run has one checkpoint, at step 0. Nothing but `hub:` is downloaded, and no pickle is read.",
        f"Model types: {', '.join(BY_TYPE)}.",
    ),
    hint=lambda word: f"name the format first: `phalanx import hf {word}`" if Path(word).exists() else "",
)


@IMPORT.runs
def run_import(words: Words) -> None:
    if not words.options["out"]:
        raise JobError("phalanx import needs --out RUN, the directory of the new run")
    from phalanx.exchange import folder as hub
    from phalanx.exchange.gguf import import_gguf  # imported here, because it imports torch
    from phalanx.exchange.import_run import import_folder, target_problems

    target = Path(words.options["out"])
    if any(subject.startswith(hub.PREFIX) for subject in words.subjects) and (wrong := list(target_problems(target))):
        raise JobError(wrong)  # before a long download
    paths = [hub.downloaded(each) if each.startswith(hub.PREFIX) else Path(each) for each in words.subjects]
    options, more = words.given(WHAT), words.given(_FOLDERS)
    gguf = [path for path in paths if path.suffix == ".gguf"]
    if gguf and more:
        raise JobError(f"{flag_of(next(iter(more)))} is for folders of Hugging Face, and {gguf[0]} is a GGUF file")
    if base := more.get("base"):
        more["base"] = hub.downloaded(base) if base.startswith(hub.PREFIX) else Path(base)
    if gguf and len(paths) > 1:
        raise JobError(f"{gguf[0]} is a whole model: a GGUF file is imported by itself")
    with stderr_progress() as progress:
        if gguf:
            done = import_gguf(gguf[0], target, **options, progress=progress)
        else:
            done = import_folder(paths, target, **options, **more, progress=progress)
    for note in done.notes:
        echo(note, file=sys.stderr, wrap=True)
    words.show(_document(done), _text(done))


def _text(done: Imported) -> str:
    model = done.model
    facts = {
        "model": f"{done.model_type}, {done.parameters:,} parameters, {model.n_layers} layers, {model.d_model:,} wide",
        "attention": kinds.attention(model),
        "windows": kinds.windows(model),
        "MLP": kinds.feed_forward(model),
        "positions": kinds.positions(model),
        "context": f"{model.seq_len:,} tokens",
        "tokenizer": f"{done.tokens:,} of {model.vocab_size:,} rows" if done.tokens else "none",
        "weights": f"{done.precision}, {gib(done.bytes)}",
        "generate": f"phalanx generate {done.target}",
    }
    return _listed(str(done.target), facts)


def _document(done: Imported) -> dict[str, Any]:
    return {
        "run": str(done.target),
        "model_type": done.model_type,
        "parameters": done.parameters,
        "precision": done.precision,
        "bytes": done.bytes,
        "vocab_size": done.model.vocab_size,
        "tokens": done.tokens or None,
        "seq_len": done.model.seq_len,
        "notes": list(done.notes),
    }
