"""The job of `phalanx init`: from five answers to a resolved job, in the layout that the planner chooses."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from phalanx.check.load import LoadedJob, load_words
from phalanx.cli.auto_layout import fixed_of, on_known_devices, with_layout, worlds_of
from phalanx.config import local_cluster, overrides, yaml_file
from phalanx.config.cluster import Cluster
from phalanx.config.clusters import cluster_of
from phalanx.config.corpora import CORPORA
from phalanx.config.presets import FROM_FILE, named, preset_of
from phalanx.config.tokenizers import MIN_BPE_VOCAB
from phalanx.data.progress import stderr_progress
from phalanx.data.vocabulary import vocabulary_size
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.units import gib

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
    """The answers."""

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
    from phalanx.plan.planner import choose  # here, because it imports numpy

    if job.cluster == HERE and not local_cluster.default_path().exists():
        echo("this machine is measured once, which takes about half a minute; --no-plan skips it", file=sys.stderr)
    known = on_known_devices(loaded, measures=True)
    worlds = worlds_of(known.job)
    with stderr_progress() as progress:
        plan = choose(known.job, fixed_of(known), _vocabulary(known), worlds, progress)
    best = plan.best[0]
    chosen = with_layout(known if job.cluster != HERE else loaded, best.layout, worlds, "planned")
    memory = f"{gib(best.prediction.fullest.peak)} of {gib(best.prediction.memory_limit)} per device"
    return chosen, f"predicted: {best.seconds:.3g} s per step, {best.tokens_per_s:,.0f} tokens/s in all, {memory}"


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
    """Returns whether the machine is one that a file describes."""
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
    own = _tokenizer_of(job.model)
    if own:
        return {**found, "data.tokenizer": own}
    if CORPORA[found["data.corpus"]].rows is not None:
        found["data.template"] = "alpaca"  # which needs no tokens of its own for roles
    if vocab < MIN_BPE_VOCAB:
        return {**found, "data.tokenizer": "char"}
    return {**found, "data.tokenizer": "bpe", "data.bpe_vocab": str(min(vocab, 4096))}


def _tokenizer_of(model: str) -> str:
    """Returns the tokenizer.json beside the config.json of "hf:FOLDER", or nothing."""
    path = Path(model.removeprefix(FROM_FILE))
    file = (path if os.path.isdir(path) else path.parent) / "tokenizer.json"
    return str(file) if model.startswith(FROM_FILE) and os.path.isfile(file) else ""


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
            return "preferences" if any(each <= row.keys() for each in pairs) else "chat"
    return "text"


def _vocabulary(loaded: LoadedJob) -> int:
    try:
        return vocabulary_size(loaded.job)
    except JobError:
        return loaded.job.data.bpe_vocab if loaded.job.data.tokenizer == "bpe" else UNPREPARED_VOCAB
