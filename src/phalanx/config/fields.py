"""Every field of a Job by its dotted path, and the shorter names by which a user may call it."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections import Counter
from collections.abc import Sequence
from typing import Any

from phalanx.config import foreign_names, values
from phalanx.config.constraints import Constraint
from phalanx.config.job import Job
from phalanx.nearest import nearest

SECTION_SHORTHAND = {"model": "model.preset", "cluster": "cluster.preset", "data": "data.corpus"}
"""What a section given as one word means: `model: llama3-8b` is `model.preset: llama3-8b`."""

LAUNCHER_NAMES = {"nproc_per_node": "cluster.devices_per_node", "nnodes": "cluster.nodes"}
"""torchrun's names for things that have another name here."""

ALIKE, NEARLY_THE_SAME = 0.7, 0.85
"""Share of letters (difflib) that a mistyped name has in common with what was meant, at least: with a field that users
set, and with one that few set or another framework's."""


@functools.cache
def leaves(cls: type = Job) -> dict[str, Any]:
    """The type of every leaf field of a (nested) dataclass, by dotted path, in order of definition."""
    return {path: _plain(kind) for path, kind in _annotated_leaves(cls).items()}


@functools.cache
def constraints(cls: type = Job) -> dict[str, tuple[Constraint, ...]]:
    """Returns the range of every leaf field that has one stated in its type (config/constraints.py), by dotted path."""
    found = {path: getattr(kind, "__metadata__", ()) for path, kind in _annotated_leaves(cls).items()}
    return {path: ranges for path, ranges in found.items() if ranges}


def _annotated_leaves(cls: type) -> dict[str, Any]:
    """Returns the types of leaf fields as they are written, with Annotated."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            inner = _annotated_leaves(typing.cast(type, kind))
            found.update({f"{field.name}.{path}": leaf for path, leaf in inner.items()})
        else:
            found[field.name] = kind
    return found


def _plain(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def sections() -> list[str]:
    """Every section that a job file may have, nested ones by dotted path: model, model.moe, train, ..."""
    return list(dict.fromkeys(path.rsplit(".", 1)[0] for path in leaves()))


@functools.cache
def short_names() -> dict[str, str]:
    """Names that need no section, because only one field has them: {"tp": "layout.tp", "lr": "optimizer.lr", ...}.

    Of several fields with one name the least nested wins, if it is alone there: d_ff is model.d_ff, not model.moe.d_ff.
    """
    by_name: dict[str, list[str]] = {}
    for path in leaves():
        by_name.setdefault(path.rsplit(".", 1)[-1], []).append(path)
    chosen = dict(LAUNCHER_NAMES)
    for name, paths in by_name.items():
        depth = Counter(path.count(".") for path in paths)
        shallowest = min(depth)
        if depth[shallowest] == 1:
            chosen[name] = next(path for path in paths if path.count(".") == shallowest)
    return chosen


def resolve(name: str, text: str | None = None) -> str | None:
    """The dotted path that a user's name means (`tp`, `layout.tp`, `dp-shard`, `model`), or None.

    Where several fields have the name, the `text` of the value decides: `schedule=zb_v` is the pipeline's,
    `schedule=cosine` the optimizer's. Where it fits several of them the layout's field wins, so that what a layout's
    line says may also be written word by word."""
    name = name.replace("-", "_")
    if name in leaves():
        return name
    path = SECTION_SHORTHAND.get(name) or short_names().get(name)
    return path or (_by_value(_namesakes(name), text) if text is not None else None)


def _namesakes(name: str) -> list[str]:
    """Every field whose last name it is."""
    return [path for path in leaves() if path.rsplit(".", 1)[-1] == name]


def _by_value(paths: Sequence[str], text: str) -> str | None:
    """The one of several fields that takes a value: one with a type of its own before one that takes any text, unless
    the text looks like a mistyped choice of the former."""
    closed = [path for path in paths if leaves()[path] is not str]
    fitting = [path for path in closed if _fits(text, leaves()[path])]
    choices = [str(choice) for path in closed for choice in typing.get_args(leaves()[path])]
    if not fitting and not nearest(text, choices):
        fitting = [path for path in paths if path not in closed]
    ours = [path for path in fitting if path.startswith("layout.")]
    return fitting[0] if len(fitting) == 1 else ours[0] if len(ours) == 1 else None


def _fits(text: str, kind: Any) -> bool:
    try:
        values.convert(text, kind)
    except ValueError:
        return False
    return True


def suggestion(name: str) -> str:
    """What to say about an unknown name: "; did you mean train.steps?", or nothing where that would be far-fetched."""
    plain = name.replace("-", "_")
    same = _namesakes(plain)
    if len(same) > 1:
        return f"; which one: {' or '.join(same)}?"
    parts = plain.split(".")[::-1]  # DeepSpeed's zero_optimization.stage is known by its section
    if advice := next((foreign_names.ADVICE[part] for part in parts if part in foreign_names.ADVICE), ""):
        return f"; {advice}"
    foreign = next((foreign_names.FIELDS[part] for part in parts if part in foreign_names.FIELDS), None)
    target = foreign or _mistyped(*plain.rpartition(".")[::2])
    return f"; did you mean {target}?" if target else ""


def _mistyped(section: str, name: str) -> str | None:
    """The field that a wrong section, a mistyped name or both most likely meant: of the section that is named, by its
    exact name of any, or, where no section is known, by a name like it."""
    home = section if section in sections() else nearest(section, sections(), ALIKE)
    if home and (found := _alike(name, [path for path in leaves() if path.startswith(f"{home}.")], ALIKE)):
        return found
    exact = _namesakes(name)
    if section in sections() or exact:
        return exact[0] if len(exact) == 1 else None
    shallow = [path for path in leaves() if path.count(".") == 1]
    if found := _alike(name, shallow, ALIKE) or _alike(name, list(leaves()), NEARLY_THE_SAME):
        return found
    foreign = nearest(name, foreign_names.FIELDS, NEARLY_THE_SAME)
    return foreign_names.FIELDS[foreign] if foreign else None


def _alike(name: str, paths: Sequence[str], cutoff: float) -> str | None:
    """The path whose last name is most like a name."""
    by_name = {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}
    found = nearest(name, by_name, cutoff)
    return by_name[found] if found else None


def get(obj: Any, path: str) -> Any:
    """The value at a dotted path."""
    return functools.reduce(getattr, path.split("."), obj)


def replace(obj: Any, path: str, value: Any) -> Any:
    """A copy of a frozen dataclass with the value at a dotted path changed."""
    head, _, rest = path.partition(".")
    return dataclasses.replace(obj, **{head: replace(getattr(obj, head), rest, value) if rest else value})
