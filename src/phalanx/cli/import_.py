"""`phalanx import hf DIR|FILE ... --out RUN`: weights of another program as a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phalanx.cli.commands import JSON, Command, CommandWords, parse, wants_help
from phalanx.cli.option import Option
from phalanx.config.families import kinds
from phalanx.config.hugging_face.families import BY_TYPE
from phalanx.data.progress import stderr_progress
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.units import gib

if TYPE_CHECKING:
    from phalanx.exchange.import_run import Imported

PAGE = f"""\
phalanx import: weights of another program as a run

usage: phalanx import hf DIR --out RUN           a Hugging Face folder: config.json, safetensors, tokenizer.json
       phalanx import hf FILE ... --out RUN      its files: safetensors, with config.json among them or beside them
       phalanx import hf FILE.gguf --out RUN     a file of llama.cpp, dequantised
       phalanx import hf hub:OWNER/NAME --out RUN    a model of the hub, downloaded by its own library

The run has one checkpoint, at step 0. `phalanx generate RUN` continues a text with it, and a job with
`model.from: RUN` trains from its weights in any layout. Nothing but `hub:` is downloaded, and no pickle is read.

options:
  --out RUN           the run's directory, which must not exist
  --precision TYPE    type of the weights: fp64, fp32, bf16 or fp16 (default: each tensor's own; of GGUF fp32)
  --layers N          the first N layers only: a smaller model, for trials
  --json              {JSON["json"]}

model types: {", ".join(BY_TYPE)}

examples:
  phalanx import hf SmolLM2-135M --out runs/smollm
  phalanx import hf SmolLM2-135M --out runs/smollm --precision fp32
  phalanx import hf hub:openai-community/gpt2 --out runs/gpt2
  phalanx generate runs/smollm --prompt "Gravity is"
  phalanx predict model=hf:SmolLM2-135M/config.json cluster=dgx-h100:1 dp_shard=8\
"""
WHAT = {
    "precision": Option(Literal["fp64", "fp32", "bf16", "fp16"], "", "type of the weights"),
    "layers": Option(int, 0, "the first layers only", at_least=1),
}
COMMANDS = {
    "hf": Command(
        ("a folder or files",),
        {
            "out": Option(str, "", "the run's directory"),
            **WHAT,
        },
        more=True,
    )
}


def run(argv: Sequence[str]) -> int:
    if wants_help(argv):
        echo(PAGE)
        return 0
    hint = f"name the format first: `phalanx import hf {argv[0]}`" if Path(argv[0]).exists() else ""
    words = parse("import", COMMANDS, argv, hint)
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
    options = words.given(WHAT)
    gguf = [path for path in paths if path.suffix == ".gguf"]
    if gguf and len(paths) > 1:
        raise JobError(f"{gguf[0]} is a whole model: a GGUF file is imported by itself")
    with stderr_progress() as progress:
        if gguf:
            done = import_gguf(gguf[0], target, **options, progress=progress)
        else:
            done = import_folder(paths, target, **options, progress=progress)
    for note in done.notes:
        echo(note, file=sys.stderr)
    echo(json.dumps(_document(done), indent=1) if words.as_json else _text(done))
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
