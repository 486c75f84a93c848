"""Prints text for people. Names, file contents and generated text may hold control characters, which a terminal obeys:
they move the cursor, change its title or its colours, or hide what follows. Here they become visible escapes.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

# C0 except tab and newline, C1, the marks that change the direction of text, line separators, half surrogate pairs.
# JSON has its own escapes for all of them, so that it passes unchanged.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x80-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns the text with control characters as escapes: an ESC becomes the four characters \\x1b. Tabs and newlines
    stay."""
    return _CONTROLS.sub(_escape, text)


def echo(text: object = "", *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Prints `text` with its control characters visible, to standard output unless a `file` is given."""
    print(visible(str(text)), file=file or sys.stdout, end=end, flush=flush)


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
