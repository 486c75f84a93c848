"""Prints text for people. Names, file contents and generated text may hold control characters, which a terminal obeys:
they move the cursor, change its title or its colours, or hide what follows. Here they become visible escapes.

Figures and sentences that are wider than the terminal are broken between fields or words, so that no number is cut.
Elsewhere, and in what is copied (scripts, JSON), lines stay whole.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import TextIO

from phalanx.errors import OutputError

LEAST_COLUMNS = 40
"""Width below which text is not broken further."""
_NARROWEST = 30
"""Columns that the last field of a line needs beside the others to be broken into lines there."""
_FIELDS = re.compile(r"(?<=\S)(?=  +\S)")
# C0 except tab and newline, C1, the marks that change the direction of text, line separators, half surrogate pairs.
# JSON has its own escapes for all of them, so that it passes unchanged.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x80-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns the text with control characters as escapes: an ESC becomes the four characters \\x1b. Tabs and newlines
    stay."""
    return _CONTROLS.sub(_escape, text)


def echo(
    text: object = "", *, file: TextIO | None = None, end: str = "\n", flush: bool = False, wrap: bool = False
) -> None:
    """Prints `text` with its control characters visible, to standard output unless a `file` is given. With `wrap`,
    lines that are wider than the terminal are broken."""
    stream = file or sys.stdout
    shown = visible(str(text))
    width = terminal_columns(stream) if wrap else 0
    try:
        print(wrapped(shown, width) if width else shown, file=stream, end=end, flush=flush)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the output cannot be written: {error.strerror}") from None


def terminal_columns(stream: TextIO) -> int:
    """Returns the width of the terminal that a stream writes to ($COLUMNS, or its own), at least LEAST_COLUMNS; 0 if it
    is no terminal, or its width is not known."""
    try:
        if not stream.isatty():
            return 0
        columns = int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):
        return 0
    return max(columns, LEAST_COLUMNS) if columns > 0 else 0


def wrapped(text: str, width: int) -> str:
    """Returns the text with lines of at most `width` columns. A longer one is broken between fields (two spaces) if it
    has several, and between words; a word stays whole. The rest is indented by two more, or like the last field."""
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def _parts(line: str, width: int) -> list[str]:
    """Returns a line as several: as many fields in each as fit."""
    indent = len(line) - len(line.lstrip())
    *fields, last = _FIELDS.split(line)
    parts = [""]
    for field in fields:
        parts[-1:] = _joined(parts[-1], field, indent + 2, width)
    column = len(parts[-1]) + len(last) - len(last.lstrip())
    if fields and len(parts[-1] + last) > width and width - column >= _NARROWEST:
        parts[-1:] = _words(parts[-1] + last, column, width)
    else:
        parts[-1:] = _joined(parts[-1], last, indent + 2, width)
    return parts


def _joined(start: str, field: str, indent: int, width: int) -> list[str]:
    """Returns a line with one more field, or the line and the field as the next ones if both are too long for one."""
    if len(start + field) <= width:
        return [start + field]
    return [start, *_words(" " * indent + field.lstrip(), indent, width)] if start else _words(field, indent, width)


def _words(line: str, indent: int, width: int) -> list[str]:
    later = " " * indent
    return textwrap.wrap(line, width, subsequent_indent=later, break_long_words=False, break_on_hyphens=False) or [""]


class VisibleStream:
    """A stream for writers that only call `write`, which shows control characters."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, text: str) -> int:
        """Writes the text with its control characters visible."""
        return self._file.write(visible(text))


def shortened(text: str, most: int = 10_000) -> str:
    """Returns the text, or its beginning and its end if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters left out) … {text[-half:]}"


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
