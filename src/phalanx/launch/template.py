"""The options of launchers, the directives of schedulers and the manifests of Kubernetes, as data: YAML files of this
room, in which `{name}` stands for a value."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_PLACE = re.compile(r"\{(\w+)(\??)\}")


@functools.cache
def template(file: str) -> dict[str, Any]:
    """Returns the templates of a YAML file, by name."""
    return yaml.safe_load((Path(__file__).parent / "templates" / file).read_text(encoding="utf-8"))


def filled(form: Any, values: Mapping[str, Any]) -> Any:
    """Returns a template with the values. A text of which a value is None, False or "" is left out of its list or
    mapping; `{name?}` is only for that, and stands for nothing itself. A text that is one `{name}` becomes the value
    itself, of whatever type; the items of such a list become items of the list around it."""
    if isinstance(form, dict):
        found = {key: filled(each, values) for key, each in form.items()}
        return {filled(key, values): each for key, each in found.items() if each is not None}
    if isinstance(form, list):
        items = []
        for each in form:
            item = filled(each, values)
            items += item if isinstance(item, list | tuple) and isinstance(each, str) else [item]
        return [item for item in items if item is not None]
    if not isinstance(form, str):
        return form
    if any(_is_empty(values[name]) for name, _ in _PLACE.findall(form)):
        return None
    whole = _PLACE.fullmatch(form)
    return values[whole[1]] if whole else _PLACE.sub(lambda place: "" if place[2] else str(values[place[1]]), form)


def words(lines: Sequence[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the words of lines, of which one with an empty value is left out as a whole."""
    kept = [line.split() for line in lines if filled(line, values) is not None]
    return tuple(str(word) for parts in kept for word in filled(parts, values))


def _is_empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str) and not value)
