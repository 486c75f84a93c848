"""The lines of a JSON document's fields, for messages."""

from __future__ import annotations

import re

_TOKEN = re.compile(r'"(?P<text>(?:[^"\\]|\\.)*)"(?P<colon>\s*:)?|[{}\n]')


def lines_of(text: str) -> dict[str, int]:
    """Returns the line of every field of valid JSON, from 1, by dotted path such as "rope_scaling.factor"."""
    lines: dict[str, int] = {}
    around: list[str] = []
    line, field = 1, ""
    for token in _TOKEN.finditer(text):
        if token["colon"] is not None:
            field = token["text"]
            lines[".".join((*around, field))] = line
        elif token[0] == "{":
            around += [field] if lines else []
        elif token[0] == "}":
            del around[-1:]
        line += token[0].count("\n")
    return lines
