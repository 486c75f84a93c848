"""Reads files that somebody else may have written, with bounds on their kind, their size and their nesting.

Only regular files are read: a named pipe without a writer would block for ever, and a device such as /dev/zero has no
end. Whatever is wrong is an OSError or a ValueError whose text is the end of a sentence that begins with the file's
name; the caller turns both into its own error.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from phalanx.units import gib

MOST_BYTES = 64 * 2**20
"""Most bytes of a JSON file unless the caller says otherwise. The largest published tokenizer has 33 MB."""
MOST_NESTING = 64
"""Most levels of lists and objects in JSON. Files that Phalanx reads have at most ten."""
LARGEST_INTEGER = 2**63 - 1

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_LFS = b"version https://git-lfs."

T = TypeVar("T")


class UnreadableError(OSError):
    """A file that is not read, whatever its permissions are; its text is the reason alone."""

    def __str__(self) -> str:
        return self.strerror or ""


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file to read its bytes, and never blocks. Raises OSError for anything else, and for a pointer of
    Git LFS, which stands for the file where `git lfs pull` did not run."""
    try:
        _require_regular(os.stat(path).st_mode, path)  # before it is opened: opening a device may have effects
        file = open(path, "rb", opener=_without_blocking)  # noqa: SIM115 (the caller closes it)
    except ValueError:  # what os.stat says about NUL bytes and half surrogate pairs
        raise UnreadableError(errno.EINVAL, "a file cannot have this name", str(path)) from None
    try:
        status = os.fstat(file.fileno())
        _require_regular(status.st_mode, path)  # it may have been replaced in between
        if status.st_size < 1024 and os.pread(file.fileno(), len(_LFS), 0) == _LFS:  # the format's upper bound
            raise UnreadableError(errno.EINVAL, "it is a pointer of Git LFS, not the file: git lfs pull", str(path))
    except OSError:
        file.close()
        raise
    return file


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Returns the content of a regular file of at most `most` bytes. Raises OSError."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnreadableError(errno.EFBIG, f"it is larger than {gib(most)}, the most that is read", str(path))
    return content


def read_tail(path: Path, most: int) -> bytes:
    """Returns the last bytes of a regular file, at most `most`. Raises OSError."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most)


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Returns the text of a regular UTF-8 file of at most `most` bytes, without the mark that editors of Windows begin
    it with. Raises OSError, and UnicodeDecodeError."""
    return read_bytes(path, most).decode("utf-8-sig")


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Returns the value of a JSON file, as `parse_json` does. Raises OSError, and ValueError."""
    return parse_json(read_bytes(path, most))


def parse_json(text: str | bytes, *, lenient: bool = False, once: str = "") -> Any:
    """Returns the value of JSON text.

    Args:
        text: the text, or its UTF-8 bytes.
        lenient: for records of which only one field is used: the caller checks that field, and integers of more than 20
            digits are cut short.
        once: with `lenient`: the field that is used.

    Raises ValueError for what is no JSON (json.JSONDecodeError), for a key that an object has twice, and, unless
    `lenient`, for values that code cannot handle safely: nesting deeper than MOST_NESTING, integers of more than 64
    bits, half a surrogate pair (a lone "\\ud800", which can be neither printed nor written).
    """
    text = text if isinstance(text, str) else text.decode()
    checks: dict[str, Any] = {} if lenient and not once else {"object_pairs_hook": lambda pairs: _object(pairs, once)}
    try:
        value = json.loads(text.removeprefix("\ufeff"), parse_int=_first_digits if lenient else _integer, **checks)
    except RecursionError:
        raise ValueError(f"nested deeper than {MOST_NESTING} levels") from None
    if not lenient:
        _check_nesting(value)
        if _SURROGATE.search(text) and _has_half_pairs(value):
            raise ValueError("a text in it holds half a surrogate pair")
    return value


_WORDS: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    type(None): "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def kind_of(value: object) -> str:
    """Returns what a value of JSON is in words: "a list"."""
    return _WORDS.get(type(value), f"a value of type {type(value).__name__}")


def field(entry: Any, name: str, kind: type[T]) -> T:
    """Returns the field of a JSON object. Raises ValueError if it is absent, of another type than `kind`, or if `entry`
    is no object. A boolean is no integer; an integer is a number."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object with {name!r}, found {kind_of(entry)}")
    value = entry.get(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)  # pyrefly: ignore[bad-return]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name!r} is {kind_of(value)}, expected {_WORDS.get(kind, kind.__name__)}")
    return value


def _without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _require_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise UnreadableError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _object(pairs: list[tuple[str, Any]], once: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values and once in ("", name):
                both = " and as ".join(f"{str(each)[:40]!r}" for each in (values[name], value))
                raise ValueError(f"the key {name[:100]!r} is given twice, as {both}")
            values[name] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(value := int(digits)) > LARGEST_INTEGER:
        raise ValueError(f"a whole number of {len(digits.lstrip('-')):,} digits")
    return value


def _first_digits(digits: str) -> int:
    return int(digits[:20])


def _check_nesting(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth == MOST_NESTING:
            raise ValueError(f"nested deeper than {MOST_NESTING} levels")
        depth += 1
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]


def _has_half_pairs(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
