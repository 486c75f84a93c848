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
from phalanx.data.corpus import SAVED_FACTS, walk
from phalanx.data.formats import ROW_SUFFIXES, missing, records, suffix_of
from phalanx.data.row_fields import Message, conversation_of, for_template, renamed, tools_of
from phalanx.errors import DataError, NotFoundError

SHOWN_PROBLEMS = 10


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
    return sorted(files, key=lambda file: file.relative_to(path).as_posix())


def chat_rows(files: Iterable[Path], data: Data) -> Iterator[Row]:
    """Yields the rows of corpus chat, one conversation each."""
    return rows_of(files, data, lambda record: (conversation_of(record),))


def rows_of(
    files: Iterable[Path],
    data: Data,
    read: Callable[[dict[str, Any]], tuple[list[Message], ...]],
    *,
    only_last: bool = False,
) -> Iterator[Row]:
    """Yields the rows of files, whose conversations `read` makes of their objects; its ValueErrors are the rows'
    problems."""
    for where, record in (each for file in files for each in records(file)):
        try:
            if isinstance(record, ValueError):
                raise record
            row = renamed(record, data)
            conversations = read(row)
            plain = tuple(for_template(messages, marked=not only_last) for messages in conversations)
            yield Row(where, plain, only_last, tools=tuple(tools_of(row)))
        except ValueError as error:
            yield Row(where, problem=str(error))
