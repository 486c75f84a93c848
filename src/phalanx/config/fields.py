"""Every field of a Job by its dotted path, and the shorter names that users may write."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import keyword
import operator
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.config import foreign_names, values
from phalanx.config.added import ADDED, AXES, Axes, Techniques, load_for, once
from phalanx.config.constraints import Constraint, Example
from phalanx.config.job import Job
from phalanx.nearest import did_you_mean, nearest

SECTION_SHORTHAND = {
    "model": "model.preset",
    "cluster": "cluster.preset",
    "cluster.accelerator": "cluster.accelerator.name",
    "data": "data.corpus",
    "optimizer": "optimizer.name",
}
"""Field that is set by a section written as one word: `model: llama3-8b` is `model.preset: llama3-8b`."""

NESTED_SECTIONS = {"lora": "model.lora", "axes": AXES}
"""Sections that may be written without the one that they are a part of: `lora: {rank: 8}`, `lora.rank=8`."""

LAUNCHER_NAMES = {"nproc_per_node": "cluster.devices_per_node", "nnodes": "cluster.nodes"}
"""torchrun's names of fields."""
SHARED_NAMES = {"name": "run.name"}
"""Field that a name means without its section, though others have it too."""


@once
def leaves(cls: type = Job) -> dict[str, Any]:
    """Returns the type of every leaf field of a (nested) dataclass, by dotted path, in order of definition. Those of
    packages' techniques are among a job's once the packages are loaded (techniques.load_for)."""
    return {
        path: typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
        for path, kind in _annotated_leaves(cls).items()
    }


@once
def metadata(cls: type = Job) -> dict[str, tuple[Constraint | Example, ...]]:
    """Returns what the type of every leaf field states besides the type, by dotted path."""
    return {path: getattr(kind, "__metadata__", ()) for path, kind in _annotated_leaves(cls).items()}


@once
def constraints(cls: type = Job) -> dict[str, tuple[Constraint, ...]]:
    """Returns the range of every leaf field that has one stated in its type (config/constraints.py), by dotted path."""
    found = {path: [each for each in said if not isinstance(each, Example)] for path, said in metadata(cls).items()}
    return {path: tuple(ranges) for path, ranges in found.items() if ranges}


def children(cls: type) -> dict[str, Any]:
    """Returns the types of a dataclass's fields as they are written, with Annotated, by the names that users write;
    of what packages add, the options of each."""
    if issubclass(cls, Techniques | Axes):
        return dict(cls.options)
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name_of(field.name): hints[field.name] for field in dataclasses.fields(cls)}


def _annotated_leaves(cls: type) -> dict[str, Any]:
    """Returns the types of leaf fields as they are written, with Annotated."""
    found: dict[str, Any] = {}
    for name, kind in children(cls).items():
        if dataclasses.is_dataclass(kind):
            inner = _annotated_leaves(typing.cast(type, kind))
            found.update({f"{name}.{path}": leaf for path, leaf in inner.items()})
        else:
            found[name] = kind
    return found


def name_of(attribute: str) -> str:
    """Returns the name that users write for an attribute: from for from_, since from is a word of Python."""
    plain = attribute.removesuffix("_")
    return plain if keyword.iskeyword(plain) else attribute


def attribute_of(name: str) -> str:
    """Returns the attribute of a name: the inverse of `name_of`."""
    return f"{name}_" if keyword.iskeyword(name) else name


def sections() -> list[str]:
    """Returns every section that a job file may have, nested ones by dotted path: model, model.moe, train, ..."""
    return list(dict.fromkeys(path.rsplit(".", 1)[0] for path in leaves()))


@functools.cache
def short_names() -> dict[str, str]:
    """Returns names that need no section because only one field has them: {"tp": "layout.tp", "lr": "optimizer.lr",
    ...}. Among several fields of one name, the only one at the lowest nesting wins: d_ff is model.d_ff, not
    model.moe.d_ff."""
    chosen = LAUNCHER_NAMES | SHARED_NAMES
    for name, paths in _by_last_name().items():
        depth = Counter(path.count(".") for path in paths)
        shallowest = min(depth)
        if depth[shallowest] == 1:
            chosen[name] = next(path for path in paths if path.count(".") == shallowest)
    return chosen


def resolve(name: str, text: str | None = None) -> str | None:
    """Returns the dotted path of a user's name (`tp`, `layout.tp`, `dp-shard`, `model`), or None. If several fields
    have the name, the `text` of the value decides: `schedule=zb_v` is the pipeline's, `schedule=cosine` the
    optimizer's. If it fits several, the layout's field wins, so a layout's line may also be written word by word."""
    name = within(name.replace("-", "_"))
    load_for(name)
    if name in leaves():
        return name
    path = SECTION_SHORTHAND.get(name) or short_names().get(name)
    if path or text is None or not (same := _namesakes(name)):
        return path
    # By the value: specific types precede free text, unless the text looks like a mistyped choice of the former.
    closed = [path for path in same if leaves()[path] is not str]
    fitting = [path for path in closed if _fits(foreign_names.value(path, text, leaves()[path]), leaves()[path])]
    choices = [str(choice) for path in closed for choice in typing.get_args(leaves()[path])]
    if not fitting and not nearest(text, choices):
        fitting = [path for path in same if path not in closed]
    ours = [path for path in fitting if path.startswith("layout.")]
    return fitting[0] if len(fitting) == 1 else ours[0] if len(ours) == 1 else None


def within(name: str) -> str:
    """Returns a dotted name with the section around a nested one that may stand alone: model.lora.rank of lora.rank."""
    section, dot, rest = name.partition(".")
    return f"{NESTED_SECTIONS.get(section, section)}{dot}{rest}"


def _namesakes(name: str) -> list[str]:
    """Returns every field with this last name."""
    return _by_last_name().get(name, [])


@functools.cache
def _by_last_name() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in leaves():
        section, _, name = path.rpartition(".")
        if section.startswith(tuple(f"{each}." for each in ADDED)):
            continue  # their names may be those of fields here, and of each other
        # `rank` alone is hardly that of adapters, `label_smoothing` that of the cross-entropy.
        if section not in NESTED_SECTIONS.values() and name not in foreign_names.ADVICE:
            found.setdefault(name, []).append(path)
    return found


def _fits(text: str, kind: Any) -> bool:
    try:
        values.convert(text, kind)
    except ValueError:
        return False
    return True


def suggestion(name: str) -> str:
    """Returns a hint about an unknown name: "; did you mean train.steps?", or nothing if none is close."""
    plain = within(name.replace("-", "_"))
    for section, added in ADDED.items():
        if f"{plain}.".startswith(f"{section}."):
            return _of_packages(plain, section, added)
    same = _namesakes(plain)
    if len(same) > 1:
        return f"; which one: {' or '.join(same)}?"
    section, _, last = plain.rpartition(".")
    # DeepSpeed's zero_optimization.stage is known by its section.
    parts = [last] if section in sections() else plain.split(".")[::-1]
    if advice := next((foreign_names.ADVICE[part] for part in parts if part in foreign_names.ADVICE), ""):
        return f"; {advice}"
    if within_it := [leaf for leaf in leaves() if f".{last}." in f".{leaf}"]:
        return f"; that is a section: {', '.join(within_it[:4])}{', ...' * (len(within_it) > 4)}"
    known = [_foreign_fields()[part] for part in parts if part in _foreign_fields()]
    if section not in sections() and last not in _foreign_fields() and len(ours := _namesakes(last)) == 1:
        known = ours  # lr_scheduler.warmup_steps is no schedule
    target = next(iter(known), None) or _mistyped(section, last)
    return f"; did you mean {target}?" if target else ""


def _of_packages(path: str, section: str, added: Mapping[str, type]) -> str:
    """Returns a hint about an unknown field, or an unknown name, of a section that packages add to."""
    name = path[len(section) + 1 :].partition(".")[0]
    if name in added:
        own = [leaf for leaf in leaves() if leaf.startswith(f"{section}.{name}.")]
        return f"; did you mean {_alike(path.rpartition('.')[2], own) or ' or '.join(own)}?"
    known = ", ".join(added) or "none; is the package that adds it installed?"
    return f"{did_you_mean(name, added)} ({section.rpartition('.')[2]} of packages: {known})"


def _mistyped(section: str, name: str) -> str | None:
    """Returns the field that a wrong section, a mistyped name or both most likely meant: a field of the section that is
    named, any field with exactly that name, or, if the section is unknown too, a field with a similar name."""
    home = section if section in sections() else nearest(section, sections())
    if home and (found := _alike(name, [path for path in leaves() if path.startswith(f"{home}.")])):
        return found
    # `kind` in a section that has none is hardly that of another section's part.
    exact = [path for path in _namesakes(name) if section not in sections() or path.count(".") == 1]
    if section in sections() or exact:
        return exact[0] if len(exact) == 1 else None
    shallow = [path for path in leaves() if path.count(".") == 1]
    if found := _alike(name, shallow) or _alike(name, [*itertools.chain(*_by_last_name().values())], strictly=True):
        return found
    foreign = nearest(name, _foreign_fields(), strictly=True)
    return _foreign_fields()[foreign] if foreign else None


@functools.cache
def _foreign_fields() -> dict[str, str]:
    """Returns the field of every name in other frameworks. Files have the field's own name, so that for them aliases
    are suggestions, too."""
    return {**foreign_names.FIELDS, **{name: alias.path for name, alias in foreign_names.ALIASES.items() if alias.path}}


def _alike(name: str, paths: Sequence[str], *, strictly: bool = False) -> str | None:
    """Returns the path whose last name is most similar."""
    by_name = {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}
    found = nearest(name, by_name, strictly=strictly)
    return by_name[found] if found else None


def get(obj: Any, path: str) -> Any:
    """Returns the value at a dotted path."""
    return _getter(path)(obj)


@functools.lru_cache(4096)
def _getter(path: str) -> operator.attrgetter[Any]:
    return operator.attrgetter(".".join(map(attribute_of, path.split("."))))


def replace(obj: Any, path: str, value: Any) -> Any:
    """Returns a copy of a frozen dataclass with the value at a dotted path changed."""
    head, _, rest = path.partition(".")
    head = attribute_of(head)
    if isinstance(obj, Techniques | Axes):
        return obj.having(head, replace(getattr(obj, head), rest, value))
    return dataclasses.replace(obj, **{head: replace(getattr(obj, head), rest, value) if rest else value})
