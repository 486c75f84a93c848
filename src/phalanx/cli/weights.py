"""Verbs about models and weights: `phalanx models [NAME or WORDS]` lists presets; `phalanx import hf DIR ... --out RUN`
makes a run of another program's weights, and `phalanx export RUN DIR --to hf` writes those of a run for other programs;
`phalanx checkpoint list | show | verify | convert | diff` handles the checkpoints of a run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phalanx.blocks.parameters import count, count_active, train_flops_per_token
from phalanx.check.job import shape_problems
from phalanx.checkpoint import inventory, report
from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.inventory import by_age, check
from phalanx.checkpoint.manifest import MANIFEST, Manifest
from phalanx.cli.verb import JSON, WHOLE, Command, Option, Verb, Words, alone, filled, flag_of
from phalanx.config import kinds
from phalanx.config.hugging_face.families import TRAINED
from phalanx.config.model import ModelConfig
from phalanx.config.precision import WeightFormat
from phalanx.config.presets import CATALOGUE, FROM_FILE, Preset, named, preset_of, unknown
from phalanx.data.files import meter, stderr_progress
from phalanx.echo import echo, terminal_columns
from phalanx.errors import CheckpointError, JobError, NotFoundError
from phalanx.nearest import nearest, no_run
from phalanx.units import aligned, finite, gib

if TYPE_CHECKING:
    from phalanx.exchange.import_run import Imported

_FIGURES, _SIDES = 5, "lrrrrll"
"""Columns of a row before its kinds and its source: the name, and figures."""

IGNORE_CONFIG = {
    "ignore_config": Option(
        "fields of config.json to leave out though they are refused: a,b", (), tuple[str, ...], value="FIELDS"
    )
}
IGNORE_CONFIG_ALIAS = {"model.ignore_config": "ignore_config"}
MODELS = Verb(
    "models",
    "Lists known models, for `model=NAME` of any job.",
    alone(("[NAME|WORD]",), IGNORE_CONFIG, aliases=IGNORE_CONFIG_ALIAS, more=True),
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


@MODELS.runs
def models(words: Words) -> None:
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
    "precision": Option("type of the weights (default: each tensor's own; of GGUF fp32)", kind=WeightFormat),
    "layers": Option("the first N layers only: a smaller model, for trials", 0, at_least=1),
}
_FOLDERS = {
    **IGNORE_CONFIG,
    "base": Option("of a PEFT adapter: the folder of its base, or hub:OWNER/NAME", value="DIR"),
}
IMPORT = Verb(
    "import",
    "Makes a run of another program's weights: `phalanx generate RUN` continues a text with it, and a job with "
    "`model.from: RUN` trains from its weights in any layout.",
    {
        "hf": Command(
            ("SOURCE",),
            {"out": Option("the run's directory, which must not exist", value="RUN"), **WHAT, **_FOLDERS},
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
        f"Model types: {', '.join(TRAINED)}.",
    ),
    hint=lambda word: (
        f"name the format first: `phalanx import hf {word}`"
        if Path(word).exists()
        else "`phalanx import hf FILE.gguf --out RUN` reads one" * (word == "gguf")
    ),
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
        **({} if model.reward else {"generate": f"phalanx generate {done.target}"}),
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


EXPORT = Verb(
    "export",
    "Writes the model of a run for other programs: a Hugging Face folder, which transformers, vLLM and others load.",
    alone(
        ("RUN", "DIR"),
        {
            "to": Option("the form", None, Literal["hf"]),
            "step": Option("the checkpoint of this step (default: the newest whole one)", 0, at_least=1),
            "precision": Option("type of the weights (default: that of the run)", kind=WeightFormat),
            "max_shard_size": Option("most bytes in a file, such as 5GB, 500MB or 4GiB (default 5GiB)", value="SIZE"),
        },
        aliases={"dtype": "precision"},
    ),
    (
        ("export runs/main main-hf --to hf", "the newest checkpoint"),
        ("export runs/main main-hf --to hf --step 200 --precision bf16", "another one, in bf16"),
    ),
    (
        "RUN is a run's directory, or one of its checkpoints, of any layout. DIR must not exist, or be empty: it "
        "appears when everything is written. Adapters are merged into their matrices.",
    ),
    exits={4: "the checkpoint is missing or damaged"},
)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@EXPORT.runs
def run_export(words: Words) -> None:
    options = words.options
    if options["to"] is None:
        raise JobError("phalanx export needs --to hf")
    limit = {"most_file_bytes": _bytes(options["max_shard_size"])} if options["max_shard_size"] else {}
    if not os.path.exists(words.subjects[0]):
        raise NotFoundError(no_run(Path(words.subjects[0]), "nothing"))  # before torch is imported, which takes seconds
    from phalanx.checkpoint.consolidated import open_source
    from phalanx.exchange.export import document_of, export, text_of

    source, target = map(Path, words.subjects)
    with open_source(source, options["step"]) as tensors, stderr_progress() as progress:
        done = export(tensors, target, dtype=options["precision"], progress=progress, **limit)
    for note in done.notes:
        echo(note, file=sys.stderr, wrap=True)
    words.show(document_of(done), text_of(done))


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) ?([A-Za-z]*)", text)
    if not found or found[2].upper() not in _UNITS or not (size := int(float(found[1]) * _UNITS[found[2].upper()])):
        raise JobError(f"--max-shard-size {text}: expected bytes such as 5GB, 500MB or 4GiB")
    return size


LIMIT, FILE_GIB = 40, 5
STEP = {"step": Option("the checkpoint of this step (default: the newest whole one)", 0, at_least=1)}
CHOSEN = {
    "tensors": Option("tensors whose names match, such as 'blocks.0.*' or 'exp_avg/*'", "*", value="PATTERN"),
    "limit": Option(f"most tensors to print (default {LIMIT}; 0 prints all)", LIMIT, int, at_least=0),
}
TRUST = {"trust": "read a DCP checkpoint, whose metadata is pickle, from somebody you trust"}
COMMANDS = {
    "list": Command(("RUN",), about="the checkpoints, which are whole, and which will be removed"),
    "show": Command(
        ("SOURCE",),
        STEP | CHOSEN,
        switches={"boxes": "the parts of each tensor, with their files"} | TRUST | JSON,
        about="metadata, sizes, tensors and files of one",
    ),
    "verify": Command(("RUN",), STEP, about="read every file and check its digest"),
    "convert": Command(
        ("SOURCE", "TARGET"),
        STEP
        | {
            "to": Option(
                "one file if TARGET ends in .safetensors, otherwise a folder (safetensors); a folder that "
                "torch.distributed.checkpoint loads (dcp); or a run's directory, to resume from (phalanx)",
                None,
                Literal["safetensors", "dcp", "phalanx"],
            ),
            "dtype": Option("type of the parameters, with --weights-only", kind=WeightFormat),
            "max_file_gib": Option(
                "most GiB in a file of a folder of safetensors", FILE_GIB, float, at_least=0, value="N"
            ),
        },
        switches={
            "weights_only": "leave moments and master weights out",
            "merge_lora": "add the adapters to their matrices; the result is a model without adapters",
        }
        | TRUST
        | JSON,
        about="write it in another form",
    ),
    "diff": Command(
        ("A", "B"),
        STEP | CHOSEN,
        switches={"tensors_only": "do not compare step and metadata"} | TRUST | JSON,
        about="compare two states",
    ),
}
CHECKPOINT = Verb(
    "checkpoint",
    "Lists, shows, verifies, converts and compares checkpoints.",
    COMMANDS,
    (
        ("checkpoint list runs/main", "what is there, and which are whole"),
        ("checkpoint convert runs/main main.safetensors --to safetensors --weights-only", "the weights, in one file"),
    ),
    (
        "RUN is a run's directory, a folder of checkpoints, or one checkpoint. SOURCE, A and B are one of those (the "
        "newest whole checkpoint), a safetensors file, a folder of safetensors, or a checkpoint of torch's DCP.",
    ),
    exits={1: "diff: they differ", 4: "a checkpoint is missing or damaged"},
    hint=lambda word: f"put the command first: `phalanx checkpoint list {word}`" if Path(word).exists() else "",
)


@CHECKPOINT.runs
def checkpoint(words: Words) -> int | None:
    return {"list": _list, "show": _show, "verify": _verify, "convert": _convert, "diff": _diff}[words.command](words)


def _list(words: Words) -> None:
    found = inventory.listing(Path(words.subject))
    _print(words, report.listing_document(found), report.listing(found))


def _show(words: Words) -> None:
    path = Path(words.subject)
    if inventory.form_of(path) == "checkpoint":
        manifest = manifests.read(inventory.checkpoint_at(path, words.options["step"]))
        damage = _damage(manifest)
    else:
        from phalanx.checkpoint.consolidated import open_source  # imported here and below, because it imports torch

        manifest, damage = open_source(path, words.options["step"], "trust" in words.switches).manifest, ""
    pattern, limit = (words.options[name] for name in CHOSEN)
    if not report.matching(manifest, pattern) and pattern != "*":
        raise _no_tensor(pattern, manifest)
    _print(
        words,
        report.manifest_document(manifest, damage, pattern),
        report.manifest(manifest, damage, pattern, limit, boxes="boxes" in words.switches),
    )


def _no_tensor(pattern: str, manifest: Manifest) -> JobError:
    """Returns the error about --tensors with a pattern that no tensor matches."""
    near = nearest(pattern, manifest.tensors) or next(iter(manifest.tensors), "")
    return JobError(f"--tensors {pattern}: no tensor has such a name" + (f"; there is {near}" if near else ""))


def _damage(manifest: Manifest) -> str:
    try:
        check(manifest.path, verify=False)
    except CheckpointError as error:
        return str(error)
    return ""


def _verify(words: Words) -> int:
    path = Path(words.subject)
    if words.options["step"] or os.path.isfile(path / MANIFEST):
        paths = [inventory.checkpoint_at(path, words.options["step"])]
    else:
        root = inventory.root_of(path)
        paths = [each for _, each in by_age(root)]
        if not paths:
            raise CheckpointError(f"{root} has no checkpoint yet")
    total, verified = sum(map(inventory.bytes_in, paths)), {}
    try:
        with stderr_progress() as progress:
            count = meter(progress, "verifying", total)
            for each in paths:
                verified[each] = inventory.damage(each, count)
    finally:  # an interruption still tells what is known; a bar would take what is printed meanwhile
        if not words.as_json:
            for each, wrong in verified.items():
                echo(report.verified(each, wrong), wrap=True)
    damaged = sum(map(bool, verified.values()))
    if words.as_json:
        entries = [{"path": str(each), "ok": not wrong, "problems": wrong} for each, wrong in verified.items()]
        _print(words, {"ok": not damaged, "checkpoints": entries}, "")
    else:
        echo(f"{len(paths) - damaged} of {len(paths)} whole")
    return CheckpointError.exit_code if damaged else 0


def _convert(words: Words) -> None:
    source, target = map(Path, words.subjects)
    if words.options["to"] is None:
        raise JobError("phalanx checkpoint convert needs --to safetensors, --to dcp or --to phalanx")
    if "max_file_gib" in words.stated and (words.options["to"] != "safetensors" or target.suffix == ".safetensors"):
        raise JobError("--max-file-gib is for a folder of safetensors: no effect here")
    from phalanx.checkpoint.consolidated import open_source
    from phalanx.checkpoint.convert import convert

    with (
        open_source(source, words.options["step"], "trust" in words.switches) as tensors,
        stderr_progress() as progress,
    ):
        done = convert(
            tensors,
            target,
            words.options["to"],
            weights_only="weights_only" in words.switches,
            merge_lora="merge_lora" in words.switches,
            dtype=words.options["dtype"],
            most_file_bytes=words.options["max_file_gib"] * 2**30,
            progress=progress,
        )
    for note in done.notes:
        echo(note, file=sys.stderr, wrap=True)
    _print(words, report.converted_document(done), report.converted(done))


def _diff(words: Words) -> int:
    from phalanx.checkpoint.consolidated import open_source
    from phalanx.checkpoint.diff import compare

    step, trusted = words.options["step"], "trust" in words.switches
    pattern, limit = (words.options[name] for name in CHOSEN)
    a, b = map(Path, words.subjects)
    with open_source(a, step, trusted) as left, open_source(b, step, trusted) as right, stderr_progress() as progress:
        fields = "tensors_only" not in words.switches
        found = compare(left, right, pattern=pattern, fields=fields, progress=progress)
    if not found.tensors and not found.equal and pattern != "*":
        raise _no_tensor(pattern, left.manifest)
    _print(words, report.difference_document(found), report.difference(found, limit))
    return 0 if found.is_empty else 1


def _print(words: Words, document: Any, as_text: str) -> None:
    words.show(finite(document, str), as_text)  # NaN and infinity as texts
