"""The shape and tokenizer of the run or Hugging Face folder that `model.from` names. Reads no weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path

from phalanx.config import values, yaml_file
from phalanx.config.fields import leaves, replace
from phalanx.config.hugging_face import config_json
from phalanx.config.model import ModelConfig
from phalanx.config.tokenizers import tokenizer_in
from phalanx.errors import JobError

CONFIG = "config.yaml"
ADAPTER = "adapter_config.json"
"""The file that describes an adapter of PEFT."""
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
        model, folder = config_json.read_file(path / "config.json", ignored).model, path
    else:
        folder = run_of(path)
        if ignored:
            raise JobError(f"model.ignore_config is for fields of a config.json, and {folder} is a run: leave it out")
        model = _model_of(folder / CONFIG)
    tokenizer = tokenizer_in(folder)
    model = replaced(model, preset="", from_=text, ignore_config=ignored)
    return StartingPoint(model, str(tokenizer or ""))


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
    what = "there is no such folder" if not os.path.exists(path) else f"it has neither {CONFIG} nor config.json"
    raise JobError(f"{path}: {what}; give a run's directory, one of its checkpoints, or a Hugging Face folder")


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
