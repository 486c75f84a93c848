"""Fields that are lists of small mappings, as `data.mix: [{path: books.jsonl, weight: 0.7}]`, as YAML text.

It is the same in a job file, on the command line, and as JSON in a checkpoint's record of its job.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from typing import Any

import yaml

MOST_NESTING = 20
"""Most levels of sections and lists. A job has five, and libyaml composes nodes by recursion in C, without a bound."""
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def row_of(kind: Any) -> type | None:
    """Returns the dataclass of the rows of a type `tuple[Row, ...]`; None for any other type."""
    inner = typing.get_args(kind)[:1] if typing.get_origin(kind) is tuple else ()
    return typing.cast(type, inner[0]) if inner and dataclasses.is_dataclass(inner[0]) else None


def written(rows: Sequence[Any]) -> str:
    """Returns rows as text that is read back, without the values that are defaults."""
    fields = dataclasses.fields(rows[0]) if rows else ()
    return json.dumps(
        [{each.name: vars(row)[each.name] for each in fields if vars(row)[each.name] != each.default} for row in rows]
    )


def too_deep(text: str) -> int:
    """Returns the line on which YAML text exceeds MOST_NESTING, or 0. Events come one by one, so a deeper text is never
    held as nodes. Raises yaml.YAMLError."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MOST_NESTING:
                return event.start_mark.line + 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return 0


def read_rows(text: str, names: str) -> list[dict[str, str]]:
    """Returns the rows of a list of mappings as text by key, a list within one as "[a,b]"; `names` says in messages
    what a row has. Raises ValueError with what was expected and what was found."""
    try:
        root = None if too_deep(text) else yaml.compose(text, Loader=LOADER)
    except yaml.YAMLError:
        root = None
    if not isinstance(root, yaml.SequenceNode):
        raise ValueError(f"expected a list of mappings of {names}, found {text[:100]!r}")
    return [_row(node, names, f"item {number}") for number, node in enumerate(root.value, start=1)]


def _row(node: yaml.Node, names: str, where: str) -> dict[str, str]:
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{where}: expected a mapping of {names}, found {str(node.value)[:100]!r}")
    found: dict[str, str] = {}
    for key, value in node.value:
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not isinstance(key, yaml.ScalarNode) or not all(isinstance(item, yaml.ScalarNode) for item in items):
            raise ValueError(
                f"{where}: expected {names}, each with one value or a list of them, found a mapping or more"
            )
        if key.value in found:
            raise ValueError(f"{where}: {key.value} is given twice")
        found[key.value] = value.value if items == [value] else f"[{','.join(item.value for item in items)}]"
    return found
