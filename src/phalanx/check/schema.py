"""The JSON schema of a job file, for editors: fields, types, ranges, meanings and known names."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any

from phalanx.config import reference
from phalanx.config.clusters import ACCELERATORS, CLUSTERS, LOCAL
from phalanx.config.constraints import Constraint, FolderName, Interval, Matches
from phalanx.config.corpora import BUILT_IN, CORPORA, OWN_TEMPLATE, TOKENIZERS
from phalanx.config.dispatchers import DISPATCHERS
from phalanx.config.fields import NESTED_SECTIONS, SECTION_SHORTHAND, constraints
from phalanx.config.layout import TILED
from phalanx.config.layout_line import SECTION
from phalanx.config.presets import CATALOGUE
from phalanx.config.reference import FieldReference
from phalanx.config.trackers import TRACKERS
from phalanx.config.values import row_of
from phalanx.config.yaml_file import SET_FIELDS
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.schedule.catalogue import SCHEDULES


def known_names() -> dict[str, list[str]]:
    """Returns the names by the dotted path of the field. A field may take others, too: a path, or `dgx-h100:4`."""
    return {
        "model.preset": [*CATALOGUE],
        "cluster.preset": [*CLUSTERS, LOCAL],
        "cluster.accelerator.name": [*ACCELERATORS],
        "layout.schedule": [*SCHEDULES],
        "layout.tile": [*TILED, "all"],
        "layout.dispatch": [*DISPATCHERS],
        "data.corpus": [*CORPORA],
        "data.tokenizer": [*TOKENIZERS],
        "data.template": [OWN_TEMPLATE, *BUILT_IN],
        "optimizer.name": [*OPTIMIZERS],
        "run.trackers": [*TRACKERS],
    }


COMMAND = "phalanx schema --markdown --out docs/reference/job.md"
MOST_NAMES = 20
"""Longest catalogue that is listed beside its field; models and machines have pages of their own."""
HEAD = f"""\
# The job file: every field

<!-- `{COMMAND}` writes this page from the dataclasses in src/phalanx/config; edit those. -->

A job is one YAML file of sections. Every field has a default, and the command line may set it by its dotted path, or
by its last name where only one field has that: `phalanx train job.yaml layout.tp=2`, `--tp 2`. `phalanx init` writes
a file to begin with, `phalanx train --help SECTION` shows a section with the values of a job, and `phalanx schema`
prints a JSON schema, with which an editor completes and checks the file. Later values win: default, preset, job files
in order, command line.

The first column has the name that the command line takes. In a file each field stands in its section.
"""


def page() -> str:
    """Returns the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    names = known_names()
    yield HEAD
    for section in reference.section_texts():
        yield from (f"## {section}", "", reference.section_texts()[section], "")
        yield from ("| field | type | default | meaning | example |", "|---|---|---|---|---|")
        for field in reference.fields().values():
            if field.section == section:
                yield _row(field, names.get(field.path, []))
        yield ""


def _row(field: FieldReference, names: list[str]) -> str:
    about = field.about
    if names and len(names) <= MOST_NAMES and any(name not in about for name in names):
        about = f"{about} Known: {', '.join(names)}."
    default = f"`{reference.shown(field.default)}`"
    cells = (f"`{field.short}`", field.type_words, default, about, f"`{field.name}: {field.example}`")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


TITLE = "Phalanx job"
REST = ("layout.dp_replicate", "layout.dp_shard")
"""Fields in which -1 stands for the rest of the devices."""
_WRITTEN_NUMBER = "^[+-]?[0-9][0-9_.]*([eE][+-]?[0-9]+)?$"
"""A number that YAML 1.1 or 1.2 reads as text: 1e6, 1_000_000."""


def schema() -> dict[str, Any]:
    """Returns the schema as JSON schema, draft 2020-12. A job file in the fields' own spelling that `phalanx`
    accepts is valid; one with unknown keys, values of another type, or values out of range is not. Rules over several
    fields are not in it."""
    names = known_names()
    root: dict[str, Any] = _object("A job file of Phalanx.")
    for field in reference.fields().values():
        place, section = root, ""
        for part in field.section.split("."):
            section = f"{section}.{part}" if section else part
            text = reference.section_texts().get(section, "")
            place = place["properties"].setdefault(part, _object(text))
        place["properties"][field.name] = _of_field(field, names.get(field.path, []))
    for short, path in SECTION_SHORTHAND.items():
        field = reference.fields()[path]
        *outer, last = short.split(".")
        place = root["properties"]
        for part in outer:
            place = place[part].get("then", place[part])["properties"]
        place[last] = _or_word(place[last], _of_field(field, names.get(path, [])))
    root["properties"][SECTION] = _or_word(
        root["properties"][SECTION], {"type": ["string", "array"], "description": "auto, or a line: dp_shard=4,tp=2"}
    )
    root["properties"][SET_FIELDS] = {
        "type": "array",
        "items": {"type": "string"},
        "description": "the fields that somebody set, in the config.yaml of a run; all others were resolved",
    }
    for short, path in NESTED_SECTIONS.items():
        section, _, name = path.partition(".")
        inner = root["properties"][section]["then"]["properties"]
        if name in inner:  # packages' axes may be none
            root["properties"][short] = inner[name]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": TITLE, **root}


def _object(text: str) -> dict[str, Any]:
    return {"type": "object", "description": text, "additionalProperties": False, "properties": {}}


def _or_word(section: dict[str, Any], word: dict[str, Any]) -> dict[str, Any]:
    return {"description": section["description"], "if": {"type": "object"}, "then": section, "else": word}


def _of_field(field: FieldReference, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"description": field.about, **_of_kind(field.kind)}
    if names and field.kind is str:
        found = {"description": field.about, "anyOf": [{"enum": names}, {"type": "string"}]}
    for each in field.ranges:
        if field.kind in (int, float, str):
            _limit(found, each)
        elif "anyOf" in found:
            _limit(found["anyOf"][0], each)
    if field.path in REST:
        found = {"description": field.about, "anyOf": [{"const": -1}, found]}
    return {**found, "default": [*field.default] if isinstance(field.default, tuple) else field.default}


def _of_kind(kind: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return {"enum": [*arguments]}
    if row := row_of(kind):
        return {"type": ["array", "string"], "items": _of_row(row)}
    if origin is tuple:
        count = {} if arguments[1:] == (...,) else {"minItems": len(arguments), "maxItems": len(arguments)}
        return {"type": ["array", "string"], "items": _of_kind(arguments[0]), **count}
    if arguments:
        return {"anyOf": [_of_kind(each) for each in arguments]}
    if kind is bool:
        return {"anyOf": [{"type": "boolean"}, {"enum": ["true", "false", "yes", "no", "on", "off", 0, 1]}]}
    if kind is str:
        return {"type": ["string", "number"]}
    return {"type": ["number", "string"], "pattern": _WRITTEN_NUMBER}


def _of_row(row: type) -> dict[str, Any]:
    """Returns the schema of one mapping of a list."""
    texts, kinds = reference.texts_below(row), typing.get_type_hints(row)
    found = {name: {"description": texts[name], **_of_kind(kind)} for name, kind in kinds.items()}
    for name, ranges in constraints(row).items():
        for each in ranges:
            _limit(found[name], each)
    needed = [each.name for each in dataclasses.fields(row) if each.default is dataclasses.MISSING]
    return {"type": "object", "additionalProperties": False, "required": needed, "properties": found}


def _limit(found: dict[str, Any], each: Constraint) -> None:
    """Adds a range to the schema of a number, or a form to that of a text."""
    if isinstance(each, Interval):
        bounds = {"minimum": each.least, "exclusiveMinimum": each.above, "maximum": each.most}
        bounds["exclusiveMaximum"] = each.below
        found |= {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
    if isinstance(each, Matches):
        found["pattern"] = f"^({each.pattern})?$"
    if isinstance(each, FolderName):
        found["maxLength"] = each.longest
