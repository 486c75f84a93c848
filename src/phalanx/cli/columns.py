"""Text of help pages in the width of the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

MOST_COLUMNS = 120
"""Widest page: longer lines are hard to read."""
GAP, LONGEST_FIRST, LEAST_SECOND = 2, 30, 20
"""Columns between the two columns of a page, the longest text in the first that shares its line with the second, and
the fewest columns of the second."""


def page_width() -> int:
    """Returns the width of a page in columns: the terminal's ($COLUMNS, or 80 where there is none)."""
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS)


def in_columns(rows: Sequence[tuple[str, str]], width: int, *, clips: bool = False) -> Iterator[str]:
    """Yields the lines of rows in two columns. A long first cell has its own line, or several that a shell reads as
    one. The second cell is wrapped, or with `clips` cut to one line."""
    longest = min(LONGEST_FIRST, width * 2 // 5)
    left = max((len(first) for first, _ in rows if len(first) <= longest), default=0)
    indent = " " * (left + 2 * GAP)
    room = max(width - len(indent), LEAST_SECOND)
    for first, second in rows:
        lines = [clipped(second, room)] if clips else filled(second, room)
        if len(first) > left:
            yield from command_lines(first, width, GAP)
        else:
            yield f"{' ' * GAP}{first:<{left}}{' ' * GAP}{lines.pop(0) if lines else ''}".rstrip()
        yield from (f"{indent}{line}" for line in lines)


def command_lines(words: str, width: int, indent: int = 0) -> list[str]:
    """Returns a command in lines that a shell reads as one."""
    first, later = " " * indent, " " * (indent + 2 * GAP)
    lines = textwrap.wrap(
        words, width - len(" \\"), initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def filled(text: str, width: int, indent: int = 0) -> list[str]:
    """Returns the lines of a paragraph."""
    start = " " * indent
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def clipped(text: str, room: int) -> str:
    """Returns a text that fits into `room` columns: if it is longer its first sentence or clause, unless that says
    little, or its first words."""
    for mark in (". ", "; ", ": "):
        clause = text.partition(mark)[0]
        if len(text) > room and len(clause) >= room // 2:
            text = clause
    return text if len(text) <= room else f"{text[: room - 2].rsplit(' ', 1)[0]} …"
