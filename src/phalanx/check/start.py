"""The shape and tokenizer of the run or Hugging Face folder that `model.from` names. Reads no weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path

from phalanx import bounded
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config import values, yaml_file
from phalanx.config.corpora import tokenizer_in, tokens_at
from phalanx.config.fields import get, leaves, replace
from phalanx.config.job import Job
from phalanx.config.model import LoRA, ModelConfig
from phalanx.config.presets import states_no_rows
from phalanx.errors import JobError
from phalanx.nearest import near_file
from phalanx.techniques.technique import Problem

CONFIG = "config.yaml"
ADAPTER = "adapter_config.json"
"""The file that describes an adapter of PEFT."""
MOST_HEADER = 100_000_000
"""Most bytes of the header of a safetensors file, as the library has it."""
KEPT = "hugging_face"
"""The folder of a run with the small files of the folder that it was imported from, or of the run it started from."""


@dataclass(frozen=True)
class StartingPoint:
    """Shape and tokenizer, which a job takes over from the weights it starts from."""

    model: ModelConfig
    tokenizer: str
    """Path of its tokenizer; empty if it has none."""


def is_hugging_face(path: Path) -> bool:
    """Returns whether a folder is one of Hugging Face's."""
    return os.path.isfile(path / "config.json") and not os.path.isfile(path / CONFIG)


def starting_point(text: str, ignored: tuple[str, ...] = ()) -> StartingPoint:
    """Returns the shape and the tokenizer at the path `text`, of a config.json without its `ignored` fields. Raises
    JobError if there are none."""
    path = Path(text)
    if is_hugging_face(path):
        from phalanx.config.hugging_face import config_json

        described = config_json.read_file(path / "config.json", ignored)
        model, folder = described.with_modules(tensor_names(path)).model, path
    else:
        folder = run_of(path)
        if ignored:
            raise JobError(f"model.ignore_config is for fields of a config.json, and {folder} is a run: leave it out")
        model = _model_of(folder / CONFIG)
    tokenizer = tokenizer_in(folder)
    if tokenizer and not model.from_ and states_no_rows(model) and not is_hugging_face(path):
        model = replaced(model, vocab_size=tokens_at(tokenizer) or model.vocab_size)  # the rows that training gave it
    model = replaced(model, preset="", from_=text, ignore_config=ignored)
    return StartingPoint(model, str(tokenizer or ""))


def tensor_names(folder: Path) -> set[str]:
    """Returns the names of the tensors in a Hugging Face folder, from its index or the headers of its files; those that
    cannot be read are named when weights are."""
    names = set[str]()
    with suppress(OSError, ValueError, AttributeError):
        index = folder / "model.safetensors.index.json"
        if os.path.isfile(index):
            return set(bounded.read_json(index).get("weight_map", {}))
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as content:
                header = content.read(min(MOST_HEADER, int.from_bytes(content.read(8), "little")))
            names |= set(bounded.parse_json(header))
    return names


def run_of(path: Path) -> Path:
    """Returns the directory of the run at `path`, which may be a checkpoint in it. Raises JobError if there is none."""
    for folder in (path, path.parent, path.parent.parent):
        if os.path.isfile(folder / CONFIG):
            return folder
    if path.suffix == ".gguf" and os.path.isfile(path):
        raise JobError(
            f"{path} is a GGUF file, which is imported first: `phalanx import hf {path} --out runs/{path.stem}`, then "
            f"model.from=runs/{path.stem}"
        )
    if os.path.isfile(path / ADAPTER):
        raise JobError(
            f"{path} is an adapter of PEFT, which is merged into its base first: `phalanx import hf {path} --out RUN`, "
            "then model.from=RUN"
        )
    known = "give a run's directory, one of its checkpoints, or a Hugging Face folder"
    if not os.path.exists(path):
        raise JobError(f"{path}: there is no such folder; {known}{near_file(path)}")
    raise JobError(f"{path}: it has neither {CONFIG} nor config.json; {known}")


def _model_of(file: Path) -> ModelConfig:
    """Returns the model of a run's config.yaml, which states every field."""
    settings, problems = yaml_file.read(file)
    model = ModelConfig()
    for setting in settings:
        section, _, path = setting.path.partition(".")
        if section != "model":
            continue
        try:
            model = replace(model, path, values.convert(setting.text, leaves()[setting.path]))
        except ValueError as error:
            problems.append(f"{setting.origin}: {setting.path}: {error}")
    if problems:
        raise JobError(problems)
    return model


def start_problems(job: Job, given: Set[str]) -> Iterator[Problem]:
    """Yields each field of `given` (dotted paths) with which a model has other parameters than the weights that it
    starts from."""
    if not job.model.from_:
        return
    with suppress(JobError):  # what is wrong with the start itself is said where its shape is taken over
        there = starting_point(job.model.from_, job.model.ignore_config).model
        rows = job.model.vocab_size
        if "model.vocab_size" in given and rows not in (0, there.vocab_size):
            has = f"{there.vocab_size:,}" if there.vocab_size else "its own"
            yield (
                "model.vocab_size",
                f"is {rows:,}, and the embedding of {there.from_} has {has} rows: leave it out, or use new weights",
            )
        if job.model.reward:  # its head begins anew
            there = replaced(there, reward=True, tied=False)
        if not there.sparse.top_k and not there.attention:  # and an indexer
            there = replaced(there, sparse=job.model.sparse)
        if _shapes(job.model) == _shapes(there):
            return
        from phalanx.config.hugging_face import config_json

        names = [path for path, _, _ in config_json.differing(job.model, there)]
        others = [name for name in names if _shapes(replace(there, name, get(job.model, name))) != _shapes(there)]
        here = ", ".join(f"{name} {get(job.model, name)} (there {get(there, name)})" for name in others or names)
        at = next((path for name in others if (path := f"model.{name}") in given), "model.preset")
        yield (
            at if at in given else "model.from",
            f"the model has other parameters than the weights of {there.from_}: {here}; leave that out, or start from "
            "weights of this shape",
        )


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's parameters, without its rows and its adapters, which may begin with a run."""
    return parameter_shapes(replaced(model, lora=LoRA()), 1)
