"""Primus' YAML: a module pre_trainer with a framework, a model and overrides; `${NAME:default}` is its default."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from phalanx.bounded import read_text
from phalanx.errors import JobError
from phalanx.foreign.frame import MOST_BYTES, Fields, Source, Stated, Unresolved, plain_value, yaml_values
from phalanx.foreign.megatron import SCRIPT, grouped, launched, overlapped
from phalanx.foreign.megatron_core import core, start_from

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::([^}]*))?\}")
MOST_FILES = 40
_ABOVE = ("bases", "includes", "extends")
"""Keys that list files whose values come first."""


def recognises(source: Source) -> bool:
    return "modules" in source.keys and "pre_trainer" in source.text


def parse(source: Source) -> Sequence[Stated]:
    """Returns the values of the module that trains, over those of its files where Primus' folders lie above."""
    values = [_default(each) for each in yaml_values(source)]
    start = "modules.pre_trainer."
    inner = {each.name.removeprefix(start): each for each in values if each.name.startswith(start)}
    framework = str(inner["framework"].value) if "framework" in inner else ""
    if framework != "megatron":
        raise JobError(f"{source.path}: modules.pre_trainer.framework is {framework!r}; read is megatron")
    found = list[Stated]()
    folder = next((each for each in source.path.resolve().parents if (each / "primus/configs").is_dir()), None)
    model = inner.get("model")
    for key, kind in (("config", "modules"), ("model", "models")):
        file = inner.get(key)
        if folder and file and isinstance(file.value, str):
            found += _file(folder / "primus/configs", folder / f"primus/configs/{kind}/megatron" / file.value, [])
    read_model = any("/models/" in str(each.path) for each in found)
    found += [
        replace(each, name=name.removeprefix("overrides."), label=each.name)
        for name, each in inner.items()
        if name.startswith("overrides.")
    ]
    if model and not read_model:
        found.append(replace(model, name="model", label="model"))
    return found


def _file(root: Path, path: Path, seen: list[Path]) -> list[Stated]:
    """Returns the values of one of Primus' files, over those of the files that it begins with."""
    path = path.resolve()
    if path in seen or len(seen) >= MOST_FILES or not path.is_relative_to(root) or not path.is_file():
        return []
    seen.append(path)
    try:
        source = Source(path, read_text(path, MOST_BYTES))
    except (OSError, UnicodeDecodeError):
        return []
    values = yaml_values(source) if source.root is not None else []
    above = list[Stated]()
    for each in values:
        if each.name in _ABOVE and isinstance(each.value, list | str):
            for name in [each.value] if isinstance(each.value, str) else each.value:
                above += _file(root, path.parent / str(name), seen)
    return [*above, *(replace(_default(each), path=path) for each in values if each.name not in _ABOVE)]


def _default(stated: Stated) -> Stated:
    """Returns a value with the defaults of its variables in their place."""
    value = stated.value
    if not isinstance(value, str) or "${" not in value:
        return stated
    for found in _VARIABLE.finditer(value):
        if found[2] is None:
            return replace(stated, value=Unresolved(value, f"{found[1]} is not set in the file"))
    text = _VARIABLE.sub(lambda found: found[2], value)
    node = Source(stated.path or Path(), text).root
    plain = plain_value(node) if isinstance(node, yaml.ScalarNode) else text
    whole = _VARIABLE.fullmatch(value)
    return replace(stated, value=plain, text=whole[2] if whole else stated.text)


def finish(fields: Fields) -> None:
    """Sets what the values mean together, from the shape of a known model if Primus' own files are not there."""
    name = fields.take("model", str, "")
    if name and not start_from(fields, "model", name.removesuffix(".yaml")):
        fields.need("model.preset", f"the shape of {name}, which lies in primus/configs/models/megatron of Primus")
    launched(fields)
    if not name:
        fields.set("model.dropout", fields.take("hidden_dropout", float, 0.1), ("hidden_dropout", "attention_dropout"))
    grouped(fields)
    core(fields)
    overlapped(fields, fields.on("overlap_grad_reduce"))


FORMAT = replace(
    SCRIPT,
    kind="Primus",
    table="primus",
    recognises=recognises,
    parse=parse,
    finish=finish,
    absent="null",
    new_line=lambda name, value: f"      {name}: {str(value).lower() if isinstance(value, bool) else value}",
    marks="YAML with modules: pre_trainer",
)
