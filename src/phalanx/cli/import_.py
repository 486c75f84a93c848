"""`phalanx import hf DIR|FILE ... --out RUN`: weights of another program as a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phalanx.cli.commands import Command, CommandVerb, CommandWords
from phalanx.cli.models import IGNORE_CONFIG, IGNORE_CONFIG_ALIAS
from phalanx.cli.option import Option
from phalanx.cli.page import flag_of
from phalanx.config import kinds
from phalanx.config.hugging_face.families import BY_TYPE
from phalanx.data.files import stderr_progress
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.units import gib

if TYPE_CHECKING:
    from phalanx.exchange.import_run import Imported

WHAT = {
    "precision": Option(
        Literal["fp64", "fp32", "bf16", "fp16"], "", "type of the weights (default: each tensor's own; of GGUF fp32)"
    ),
    "layers": Option(int, 0, "the first N layers only: a smaller model, for trials", at_least=1),
}
_FOLDERS = {
    **IGNORE_CONFIG,
    "base": Option(str, "", "of a PEFT adapter: the folder of its base, or hub:OWNER/NAME", value="DIR"),
}
VERB = CommandVerb(
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


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    if not words.options.get("out"):
        raise JobError("phalanx import needs --out RUN, the directory of the new run")
    return _import_hf(words)


def _import_hf(words: CommandWords) -> int:
    from phalanx.exchange import hub
    from phalanx.exchange.import_gguf import import_gguf  # imported here, because it imports torch
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
    echo(json.dumps(_document(done), indent=1) if words.as_json else _text(done), wrap=not words.as_json)
    return 0


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
    width = max(map(len, facts))
    return "\n".join([str(done.target), *(f"  {name:<{width}}  {text}" for name, text in facts.items() if text)])


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
