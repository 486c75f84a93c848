"""`phalanx init`: a job file with comments and a planned layout, from five questions or from options."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from phalanx.check.load import LoadedJob, as_dict, load_words
from phalanx.cli.auto_layout import on_known_devices, request_of, with_layout, worlds_of
from phalanx.cli.files import write
from phalanx.cli.installation import schema_text
from phalanx.cli.verb import WHOLE, Option, Verb, Words, alone, clipped
from phalanx.config import clusters, overrides, reference, yaml_file
from phalanx.config.cluster import Cluster
from phalanx.config.clusters import cluster_of
from phalanx.config.corpora import CORPORA, MIN_BPE_VOCAB
from phalanx.config.fields import get
from phalanx.config.layout import Layout
from phalanx.config.presets import FROM_FILE, named, preset_of
from phalanx.data.files import stderr_progress
from phalanx.data.settings import vocabulary_size
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.partition.derived import solve
from phalanx.units import counted, figure, gib

WIDTH = 110
"""Columns of a line with its comment."""
COMMENT_AT = 30
"""Column at which comments begin."""
LEAST_COMMENT = 40
"""Columns without which a comment says too little."""
NOTES = {
    "model.preset": "other fields of this section override it",
    "model.activation": "the MLP's: gelu, or with a gate swiglu, geglu",
    "cluster.preset": "machine and number of its nodes (`phalanx docs devices`)",
    "layout.auto": "the planner chooses it when training starts",
    "layout.dp_replicate": "data-parallel replicas with whole copies (DDP)",
    "layout.dp_shard": "data-parallel ranks that shard the state (ZeRO, FSDP)",
    "layout.zero": "sharded: 1 optimizer state, 2 gradients too, 3 parameters too",
    "layout.accumulate": "sharded: gradients of every micro-batch, less memory, more traffic",
    "layout.micro_batch": "sequences in one forward pass of a data rank",
    "layout.accumulation": "micro-batches per step and data rank",
    "data.corpus": "`phalanx docs data` lists them",
    "data.tokenizer": "char, byte, bpe (trained on the corpus), or a tokenizer.json",
    "train.precision": "bf16 and fp16 keep fp32 master weights",
    "checkpoint.every": "steps between checkpoints; the newest two are kept",
}
"""Comments in fewer words than the fields' own texts."""


def as_job_file(loaded: LoadedJob, facts: str, command: str, schema: str) -> str:
    """Returns the job file. Reading it gives the job, under the file's name.

    Args:
        loaded: the job; fields that something has set are written, with what they mean.
        facts: the predicted figures of a step.
        command: the command that trains it.
        schema: the file name of the JSON schema.
    """
    lines = [
        f"# yaml-language-server: $schema={schema}",
        f"# {command}",
        "# Every field: `phalanx docs job`, or `phalanx train --help SECTION`.",
    ]
    for section, values in as_dict(loaded.job).items():
        if written := [*_written(loaded, values, section)]:
            lines += ["", f"{section}:", *([f"  # {facts}"] if section == "layout" and facts else []), *written]
    return "\n".join(lines) + "\n"


def _written(loaded: LoadedJob, values: dict[str, Any], section: str) -> Iterator[str]:
    """Yields the lines of a section's fields that the file states, those of sections inside of it last."""
    indent = "  " * (section.count(".") + 1)
    for name, value in sorted(values.items(), key=lambda item: isinstance(item[1], dict)):
        path = f"{section}.{name}"
        if not isinstance(value, dict):
            if _is_written(loaded, path):
                dumped = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
                yield _line(f"{indent}{name}: {dumped}", _comment(loaded, path))
        elif inner := [*_written(loaded, value, path)]:
            yield from (f"{indent}{name}:", *inner)


def _is_written(loaded: LoadedJob, path: str) -> bool:
    """Returns whether the file states a field: one that the answers set, and of a planned layout what differs from the
    defaults, or is one axis of it."""
    if path == "run.name" or path not in reference.fields():
        return False
    if path.startswith("layout.") and not loaded.job.layout.auto:
        changed = [name for name in vars(Layout()) if get(loaded.job.layout, name) != getattr(Layout(), name)]
        return path.partition(".")[2] in (changed or ["dp_replicate"])
    return loaded.origins.get(path, "default").startswith(("command line", "phalanx init"))


def _comment(loaded: LoadedJob, path: str) -> str:
    if path == "train.global_batch" and not loaded.job.layout.auto:
        return solve(loaded.job.train.global_batch, loaded.job.layout).equation().removeprefix("global batch ")
    return NOTES.get(path) or reference.fields()[path].about


def _line(start: str, comment: str) -> str:
    """Returns a line with a comment, of which only the first sentence or clause is kept if it does not fit."""
    start = f"{start:<{COMMENT_AT}}"
    room = WIDTH - len(start) - 3
    if room < LEAST_COMMENT:
        return start
    comment = clipped(comment, room)
    if comment[1:2].islower():
        comment = f"{comment[0].lower()}{comment[1:]}"
    return f"{start} # {comment.rstrip('.')}"


HERE, SMALL = "this", "small"
SMALL_MODEL = {
    "n_layers": "4",
    "d_model": "128",
    "n_heads": "4",
    "d_ff": "384",
    "seq_len": "128",
    "norm": "rmsnorm",
    "positions": "rope",
    "activation": "swiglu",
    "bias": "false",
}
"""The model of examples/main.yaml."""
SMALL_LR, USUAL_LR = "4e-3", "3e-4"
"""Peak learning rates: of the small model, and of Llama's kind with billions of parameters (Touvron et al. 2023)."""
UNPREPARED_VOCAB = 256
"""Vocabulary that is assumed in planning for a tokenizer whose size only the corpus tells."""


@dataclass(frozen=True)
class NewJob:
    cluster: str
    model: str
    data: str
    batch: int
    steps: int


def planned_job(job: NewJob, path: Path, *, plans: bool) -> tuple[LoadedJob, str]:
    """Returns the job, resolved under the name of its file, and the predicted figures of its step, empty without a
    plan. Raises JobError if it is not legal, DoesNotFitError if no layout fits."""
    words = overrides.parse([f"{name}={value}" for name, value in _fields(job).items()])
    words.settings.append(overrides.Setting("run.name", path.stem, "the job file's name"))
    loaded = load_words(words, opens="phalanx init")
    if not plans:
        return loaded, ""
    from phalanx.plan.planner import choose

    if job.cluster == HERE and not clusters.default_path().exists():
        echo("this machine is measured once, which takes about half a minute; --no-plan skips it", file=sys.stderr)
    known = on_known_devices(loaded, measures=True)
    worlds = worlds_of(known.job)
    with stderr_progress() as progress:
        plan = choose(request_of(known, _vocabulary(known), worlds), progress)
    best = plan.best[0]
    chosen = with_layout(known if job.cluster != HERE else loaded, best.layout, worlds, "planned")
    memory = f"{gib(best.prediction.fullest.peak)} of {gib(best.prediction.memory_limit)} per device"
    return chosen, f"predicted: {figure(best.seconds)} s per step, {best.tokens_per_s:,.0f} tokens/s in all, {memory}"


def _fields(job: NewJob) -> dict[str, str]:
    """Returns the fields of the job file, in its order."""
    fields: dict[str, str] = {}
    vocab = 0
    if job.model == SMALL:
        fields |= {f"model.{name}": value for name, value in SMALL_MODEL.items()}
    elif os.path.isdir(job.model):
        fields["model.from"] = job.model
    else:
        name = job.model if job.model.startswith(FROM_FILE) else named(job.model)
        fields["model.preset"] = name
        vocab = preset_of(name).model.vocab_size
    here = job.cluster == HERE
    if is_file(job.cluster):
        fields |= described_machine(job.cluster)
    elif not here:
        fields["cluster.preset"] = job.cluster
    fields |= _data(job, vocab)
    fields["optimizer.lr"] = SMALL_LR if job.model == SMALL else USUAL_LR
    fields["optimizer.warmup_steps"] = str(max(1, min(2000, job.steps // 25)))
    fields |= {"train.steps": str(job.steps), "train.global_batch": str(job.batch)}
    fields["train.precision"] = "fp32" if here and not os.path.exists("/dev/nvidia0") else "bf16"
    fields["train.log_every"] = str(max(1, min(100, job.steps // 25)))
    if fields["data.corpus"] != "random":
        fields["train.eval_every"] = str(max(1, job.steps // 5))
    fields["checkpoint.every"] = str(max(1, job.steps // 2))
    return fields


def is_file(cluster: str) -> bool:
    return cluster.endswith((".yaml", ".yml"))


def machine_of(cluster: str) -> Cluster:
    """Returns the machine of a preset, or of the section `cluster` of a job file. Raises JobError if it is none."""
    if not is_file(cluster):
        return cluster_of(cluster)
    words = [f"{path}={value}" for path, value in described_machine(cluster).items()]
    return load_words(overrides.parse([*words, "layout=auto"])).job.cluster


def described_machine(file: str) -> dict[str, str]:
    """Returns the fields of the section `cluster` of a job file. Raises JobError with what is wrong with the file, or
    if it describes no machine."""
    settings, problems = yaml_file.read(Path(file))
    found = {
        each.path: ",".join(each.text) if isinstance(each.text, list) else each.text
        for each in settings
        if each.path.startswith("cluster.")
    }
    if not problems and not any(path.startswith(("cluster.preset", "cluster.accelerator.")) for path in found):
        problems = [f"{file}: no section `cluster` with a machine, such as cluster: {{accelerator: h100-80gb}}"]
    if problems:
        raise JobError(problems)
    return found


def _data(job: NewJob, vocab: int) -> dict[str, str]:
    """Returns the fields of the corpus, with the tokenizer of the weights or of the Hugging Face folder where there is
    one. Another model with a vocabulary of its own gets a tokenizer with subwords."""
    data = job.data
    if data == "random":
        return {"data.corpus": data, "data.random_vocab": str(vocab or UNPREPARED_VOCAB)}
    found = {"data.corpus": data} if data in CORPORA else {"data.corpus": _kind_of(data), "data.path": data}
    if os.path.isdir(job.model):
        return found
    path = Path(job.model.removeprefix(FROM_FILE))
    beside = (path if os.path.isdir(path) else path.parent) / "tokenizer.json"
    if job.model.startswith(FROM_FILE) and os.path.isfile(beside):  # that of "hf:FOLDER"
        return {**found, "data.tokenizer": str(beside)}
    if CORPORA[found["data.corpus"]].rows is not None:
        found["data.template"] = "alpaca"  # which needs no tokens of its own for roles
    if vocab < MIN_BPE_VOCAB:
        return {**found, "data.tokenizer": "char"}
    return {**found, "data.tokenizer": "bpe", "data.bpe_vocab": str(min(vocab, 4096))}


def _kind_of(path: str) -> str:
    """Returns the corpus of a path: chat if the first row of a JSONL file is a conversation, otherwise text."""
    if path.endswith(".jsonl"):
        with open(path, encoding="utf-8", errors="replace") as file:
            first = "".join(islice(file, 1))
        try:
            row = json.loads(first)
        except ValueError:
            return "text"
        if isinstance(row, dict) and {"messages", "conversations", "prompt"} & row.keys():
            pairs = ({"chosen", "rejected"}, {"completion", "label"}, {"responses"})
            if {"prompt", "answer"} <= row.keys():
                return "prompts"
            return "preferences" if any(each <= row.keys() for each in pairs) else "chat"
    return "text"


def _vocabulary(loaded: LoadedJob) -> int:
    try:
        return vocabulary_size(loaded.job)
    except JobError:
        return loaded.job.data.bpe_vocab if loaded.job.data.tokenizer == "bpe" else UNPREPARED_VOCAB


FILES = ("text", "mix", "chat", "preferences", "prompts")
"""Corpora that are files of the user."""
VERB = Verb(
    "init",
    "Writes a job file with comments, and a layout planned for the machine.",
    alone(
        ("[FILE]",),
        {
            "cluster": Option(
                "machine: this (the default), or one that you plan for, such as dgx-h100:4", value="NAME[:NODES]"
            ),
            "model": Option(
                "the model: small (the default here), a preset (`phalanx models`), hf:FOLDER, or a run's directory",
                value="NAME",
            ),
            "data": Option(
                f"the corpus: {', '.join(name for name in CORPORA if name not in FILES)}, or your text or JSONL",
                value="NAME|PATH",
            ),
            "batch": Option("sequences per step over all devices", 0, at_least=1),
            "steps": Option("optimizer steps", 0, at_least=1),
        },
        switches={
            "yes": "ask nothing",
            "force": "replace an existing file",
            "no_plan": "write `layout: auto`: the layout is planned when training starts",
        },
    ),
    (("init", "five questions"), ("init big.yaml --model llama3-8b --cluster dgx-h100:2 --yes", "none")),
    (
        "FILE is job.yaml unless given. On a terminal it asks for what no option says; elsewhere, and with --yes, it "
        "takes the defaults. An existing file is replaced only if you say so. Beside it lies phalanx.schema.json, with "
        "which an editor completes and checks the file.",
    ),
    default=WHOLE,
)
QUESTIONS = {
    "cluster": "Machine: this ({devices}), or one to plan for, such as dgx-h100:4 (`phalanx docs devices`)",
    "model": "Model: small (0.9 million parameters), a preset (`phalanx models`), hf:FOLDER, or a run",
    "data": "Data: stdlib (Python's own library), shakespeare_char (downloads), random, or your text or JSONL",
    "batch": "Global batch: sequences per step over all devices",
    "steps": "Training: optimizer steps",
}
"""What is asked for where no option says it, by option."""
SCHEMA = "phalanx.schema.json"
STEPS = 500
SMALL_BATCH = 32
TOKENS_PER_STEP = 2**20
"""Tokens per step proposed for a cluster: a million, about that of published runs of 1 to 8 billion parameters."""


@VERB.runs
def run(words: Words) -> None:
    path = Path(words.subjects[0] if words.subjects else "job.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise JobError(f"a job file ends in .yaml, found {str(path)!r}; nearest: {path.with_suffix('.yaml')}")
    given = {name: str(value) for name, value in words.given(words.options).items()}
    asks = "yes" not in words.switches and sys.stdin.isatty() and sys.stderr.isatty()
    _require_free(path, forced="force" in words.switches, asks=asks)
    job = _answers(given, asks)
    loaded, facts = planned_job(job, path, plans="no_plan" not in words.switches)
    write(str(path), as_job_file(loaded, facts, f"phalanx train {path}", SCHEMA))
    _write_schema(path.parent / SCHEMA)
    echo(f"written: {path}\n  layout:  {loaded.job.layout.line()}{f'  ({facts})' if facts else ''}", wrap=True)
    if job.cluster == HERE:
        echo(
            f"  train:   phalanx train {path}\n"
            f"  change:  edit it (`phalanx docs job`), or phalanx train {path} --steps 1000"
        )
    else:
        echo(f"  predict: phalanx predict {path}\n  there:   phalanx launch {path} --nnodes {loaded.job.cluster.nodes}")


def _require_free(path: Path, *, forced: bool, asks: bool) -> None:
    if not os.path.isdir(path.parent):
        raise JobError(f"folder {path.parent} does not exist; create it, or name another file")
    if forced or not os.path.exists(path):
        return
    if not asks or _asked(f"{path} exists. Replace it? (y/n)", "n").lower() not in ("y", "yes"):
        raise JobError(f"{path} exists and was not changed; name another file, or --force replaces it")


def _answers(given: dict[str, str], asks: bool) -> NewJob:
    """Returns what the options say, else the answers, else the defaults. Raises JobError with all wrong options."""
    gpus, cores = len(glob.glob("/dev/nvidia[0-9]*")), len(os.sched_getaffinity(0))
    devices = counted(gpus, "GPU") if gpus else f"{counted(cores, 'core')}, no GPU"
    problems, answers = list[str](), dict[str, str]()
    for number, (name, text) in enumerate(QUESTIONS.items(), 1):
        answers[name] = default = _default(name, answers)
        asked = f"{number}/{len(QUESTIONS)}  {text.format(devices=devices)}"
        while name in given or asks:
            answer = given[name] if name in given else _asked(asked, default)
            try:
                _check(name, answer)
                answers[name] = answer
                break
            except (JobError, ValueError) as error:
                if name in given:
                    problems.append(f"--{name}: {error}")
                    break
                echo(f"     {error}", file=sys.stderr, wrap=True)
    if problems:
        raise JobError(problems)
    return NewJob(answers["cluster"], answers["model"], answers["data"], int(answers["batch"]), int(answers["steps"]))


def _default(name: str, answers: dict[str, str]) -> str:
    """Returns the answer by default, which depends on earlier ones."""
    here = answers.get("cluster") == HERE
    if name == "batch":
        return str(SMALL_BATCH if here else _batch_for(answers))
    model, data = (SMALL, "stdlib") if here else ("llama3.1-8b", "random")
    return {"cluster": HERE, "model": model, "data": data, "steps": str(STEPS)}[name]


def _check(name: str, text: str) -> None:
    """Raises JobError or ValueError about a wrong answer."""
    if name == "cluster":
        if text != HERE:
            machine_of(text)
    elif name == "model":
        if text != SMALL and not os.path.isdir(text):
            preset_of(text if text.startswith(FROM_FILE) else named(text))
    elif name == "data":
        if text in FILES:
            raise ValueError(f"corpus {text} is files of your own: give their path")
        if text not in CORPORA and not os.path.exists(text):
            raise ValueError(f"neither a corpus ({', '.join(CORPORA)}) nor a file or folder: {text!r}")
    elif not text.isdecimal() or not 0 < int(text) < 10**9:
        raise ValueError(f"expected a whole number of at least 1, found {text!r}")


def _asked(text: str, default: str) -> str:
    """Returns the answer to a question on standard error, so that standard output stays free for results."""
    echo(f"{text}\n     [{default}]: ", file=sys.stderr, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise JobError("the input ended before all questions were answered: nothing was written")
    return line.strip() or default


def _batch_for(answers: dict[str, str]) -> int:
    """Returns the number of sequences of a million tokens, at least one per device, as a power of two."""
    model = answers["model"]
    length = preset_of(named(model)).model.seq_len if model != SMALL and not os.path.isdir(model) else 128
    devices = machine_of(answers["cluster"]).devices
    wanted = max(TOKENS_PER_STEP // length, devices, 1)
    return 1 << (wanted - 1).bit_length()


def _write_schema(path: Path) -> None:
    try:
        ours = json.loads(path.read_text(encoding="utf-8")).get("title") == json.loads(schema_text())["title"]
    except FileNotFoundError:
        ours = True
    except (OSError, ValueError, AttributeError):
        ours = False
    if ours:
        write(str(path), schema_text())
