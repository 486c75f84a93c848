"""The JSON schema of a job file, for editors: fields, types, ranges, meanings and known names."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

from phalanx.check.known_names import known_names
from phalanx.config import reference
from phalanx.config.constraints import Above, AtLeast, Below, Between, Constraint, FolderName, HalfOpen, Matches
from phalanx.config.fields import NESTED_SECTIONS, SECTION_SHORTHAND, constraints
from phalanx.config.layout_line import SECTION
from phalanx.config.reference import FieldReference
from phalanx.config.rows import row_of
from phalanx.config.yaml_file import SET_FIELDS

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
        root["properties"][short] = root["properties"][section]["then"]["properties"][name]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": TITLE, **root}


def _object(text: str) -> dict[str, Any]:
    return {"type": "object", "description": text, "additionalProperties": False, "properties": {}}


def _or_word(section: dict[str, Any], word: dict[str, Any]) -> dict[str, Any]:
    return {"description": section["description"], "if": {"type": "object"}, "then": section, "else": word}


def _of_field(field: FieldReference, names: list[str]) -> dict[str, Any]:
    found = {"description": field.about, **_of_kind(field.kind)}
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
    if isinstance(each, AtLeast | Between | HalfOpen):
        found["minimum"] = each.least
    if isinstance(each, Above):
        found["exclusiveMinimum"] = each.bound
        found |= {"maximum": each.most} if math.isfinite(each.most) else {}
    if isinstance(each, Between):
        found["maximum"] = each.most
    if isinstance(each, Below | HalfOpen):
        found["exclusiveMaximum"] = each.bound
    if isinstance(each, Matches):
        found["pattern"] = f"^({each.pattern})?$"
    if isinstance(each, FolderName):
        found["maxLength"] = each.longest
