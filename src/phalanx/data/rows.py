"""Rows of a data set for fine-tuning: files of conversations, prompts with completions, or instructions.

A row that cannot be used is not skipped: it is yielded with what is wrong, and the data set is refused with the first
problems of all (data/row_text.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.data import Data
from phalanx.data.corpus import SAVED_FACTS, in_order, walk
from phalanx.data.formats import ROW_SUFFIXES, missing, records, suffix_of
from phalanx.data.row_fields import Message, conversation_of, for_template, renamed, tools_of
from phalanx.errors import DataError, NotFoundError

SHOWN_PROBLEMS = 10


Placed = tuple[str, dict[str, Any] | ValueError]
"""A record with its file and line, or what is wrong with it."""


@dataclass(frozen=True)
class Row:
    """A row of a data set, as read."""

    where: str
    """Its file and line."""
    conversations: tuple[list[Message], ...] = ()
    """Its conversations: one, or the chosen and the rejected one of a preference."""
    only_last: bool = False
    """Whether only the last answer of each conversation is one: those before it belong to the prompt."""
    problem: str = ""
    """Why the row cannot be used; empty if it can."""
    tools: tuple[Any, ...] = ()
    """The tools that the template describes to the model."""


class Causes:
    """Why rows cannot be used, each cause once with its first row and the number of rows."""

    def __init__(self) -> None:
        self.rows = 0
        self._found: dict[str, list[Any]] = {}

    def add(self, where: str, cause: str) -> None:
        self.rows += 1
        if cause in self._found:
            self._found[cause][1] += 1
        elif len(self._found) < SHOWN_PROBLEMS:
            self._found[cause] = [where, 1]

    def head(self) -> str:
        """Returns how many rows cannot be used."""
        return f"{self.rows:,} row{'s' if self.rows > 1 else ''} cannot be used"

    def lines(self, most: int = SHOWN_PROBLEMS) -> list[str]:
        """Returns a line for each of the first `most` causes, and one for the number of rows that have others."""
        shown = [*self._found.items()][:most]
        found = [
            f"{where}: {cause}" + (f" (and {same - 1:,} more row{'s' if same > 2 else ''})" if same > 1 else "")
            for cause, (where, same) in shown
        ]
        left = self.rows - sum(same for _, (_, same) in shown)
        return [*found, f"... and {left:,} more"] if left else found


def row_files(data: Data) -> list[Path]:
    """Returns the files of a data set: data.path, or those in it that hold rows. Raises DataError if there are none."""
    path = Path(data.path).expanduser()
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise missing(path, data.corpus)
    found = walk(path, lambda name: name.startswith("."))
    files = [file for file in found if suffix_of(file) in ROW_SUFFIXES and file.name not in SAVED_FACTS]
    if not files:
        known = " ".join(sorted(ROW_SUFFIXES))
        if not found:
            raise NotFoundError(f"data.path={path}: the folder has no files; it needs files that end in {known}")
        raise DataError(f"data.path={path}: none of its {len(found)} files holds rows; files are chosen by {known}")
    return in_order(files, path)


def chat_rows(files: Iterable[Path], data: Data) -> Iterator[Row]:
    """Yields the rows of corpus chat, one conversation each."""
    return rows_of(files, data, lambda record: (conversation_of(record),))


def rows_of(
    files: Iterable[Path],
    data: Data,
    read: Callable[[dict[str, Any]], tuple[list[Message], ...]],
    *,
    only_last: bool = False,
    arrange: Callable[[Iterator[Placed]], Iterator[Placed]] = iter,
) -> Iterator[Row]:
    """Yields the rows of files, whose conversations `read` makes of their objects, which `arrange` may join or split
    before; its ValueErrors are the rows' problems."""
    for where, row in arrange(_renamed(files, data)):
        try:
            if isinstance(row, ValueError):
                raise row
            conversations = read(row)
            plain = tuple(for_template(messages, marked=not only_last) for messages in conversations)
            yield Row(where, plain, only_last, tools=tuple(tools_of(row)))
        except ValueError as error:
            yield Row(where, problem=str(error))


def _renamed(files: Iterable[Path], data: Data) -> Iterator[Placed]:
    """Yields the records of files with the names of data.columns."""
    for where, record in (each for file in files for each in records(file)):
        try:
            yield where, record if isinstance(record, ValueError) else renamed(record, data)
        except ValueError as error:
            yield where, error
