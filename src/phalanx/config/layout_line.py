"""A layout from one line, `dp_shard=4,tp=2,sp=true`: what `Layout.line` prints and tables, logs and options hold."""

from __future__ import annotations

import re
from typing import Any

from phalanx.config import foreign_names, values
from phalanx.config.added import AXES, load_for
from phalanx.config.fields import get, leaves, replace, resolve, suggestion
from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.nearest import nearest

SECTION = "layout"
AUTO = "auto"
"""The word that stands for `auto=true` in a line, or for a whole line."""


def parse(line: str) -> Layout:
    """Returns the layout of a line; fields that are not in it have their defaults. Legality is checked in check/job.py.
    Raises JobError with every problem of the line."""
    layout = Layout()
    for name, (_, value) in _fields_of(line).items():
        layout = replace(layout, name, value)
    return layout


def items(line: str) -> list[str]:
    """Returns the items of a line, `key=value`, which commas or spaces separate."""
    return re.split(r"\s*,\s*|\s+", re.sub(r"\s*=\s*", "=", line.strip()))


def settings_of(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the settings of a section written as one word, by dotted path: the fields that it names, as written, and
    those that it sets without naming them. These are all others for a line such as `layout: tp=2,sp=true`, because a
    line is a whole layout, and none for `layout: auto` or `layout: auto,tp=2`. Raises JobError with every problem of
    the text."""
    if text != AUTO and "=" not in text and "," not in text:
        hint = f"; did you mean {AUTO}?" if nearest(text.lower(), [AUTO]) or text.lower().startswith(AUTO) else ""
        raise JobError(
            f"{SECTION}: expected {AUTO}, or a line such as dp_shard=4,tp=2, or fields of the section (layout.tp=2), "
            f"found {text!r}{hint}"
        )
    given = _fields_of(text.rstrip(":"))  # pasted from a sentence
    default = Layout()
    whole = {name: get(default, name) for name in leaves(Layout)} if not given.get(AUTO, ("", False))[1] else {}
    named = {f"{SECTION}.{name}": written for name, (written, _) in given.items()}
    return named, {f"{SECTION}.{name}": str(value) for name, value in whole.items() if name not in given}


def _fields_of(line: str) -> dict[str, tuple[str, Any]]:
    """Returns the text and the value of the fields in a line. Raises JobError with every problem."""
    if "axes." in line:
        load_for(AXES)
    kinds = leaves(Layout)
    found: dict[str, tuple[str, Any]] = {}
    problems: list[str] = []
    for item in items(line):
        key, equals, text = item.partition("=")
        if key == AUTO and not equals:
            equals, text = "=", "true"
        name = key.replace("-", "_").removeprefix("layout.")
        if not equals:
            problems.append(f"expected key=value with commas between, found {item!r}")
        elif name not in kinds:
            problems.append(_unknown(key, name))
        elif name in found:
            problems.append(f"{name} is given twice")
        else:
            found[name] = text, None  # given, even if it is invalid: a repetition is still reported
            try:
                meant = foreign_names.value(f"{SECTION}.{name}", text, kinds[name])
                found[name] = text, values.convert(meant, kinds[name])
            except ValueError as error:
                problems.append(f"{name}: {error}")
    if problems:
        raise JobError([f"layout {line!r}: {problem}" for problem in problems])
    return found


def _unknown(key: str, name: str) -> str:
    known = ", ".join(leaves(Layout))
    if path := resolve(name):
        return f"{path} is not a field of the layout"
    if meant := nearest(name, leaves(Layout)):
        return f"unknown key {key}; did you mean {meant}?"
    return f"unknown key {key}{suggestion(name) or f' (known: {known})'}"
