"""Text of help pages in the width of the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

MOST_COLUMNS = 120
"""Widest page: longer lines are hard to read."""
GAP, LONGEST_FIRST = 2, 30
"""Columns between the two columns of a page, and the longest text in the first that shares its line with the second."""


def page_width() -> int:
    """Returns the width of a page in columns: the terminal's ($COLUMNS, or 80 where there is none)."""
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS)


def in_columns(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Yields the lines of rows in two columns, of which the second is wrapped; a long first cell has its own line."""
    left = max((len(first) for first, _ in rows if len(first) <= LONGEST_FIRST), default=0)
    indent = " " * (left + 2 * GAP)
    for first, second in rows:
        lines = textwrap.wrap(second, max(width - len(indent), 20))
        if len(first) > left:
            yield f"{' ' * GAP}{first}"
        else:
            yield f"{' ' * GAP}{first:<{left}}{' ' * GAP}{lines.pop(0) if lines else ''}".rstrip()
        yield from (f"{indent}{line}" for line in lines)


def filled(text: str, width: int, indent: int = 0) -> list[str]:
    """Returns the lines of a paragraph."""
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)
