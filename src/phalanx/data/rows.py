"""Rows of a data set for fine-tuning: JSONL files of conversations, prompts with completions, or instructions.

A row that cannot be used is not skipped: it is yielded with what is wrong, and the data set is refused with the first
problems of all (data/row_text.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from phalanx.bounded import open_regular, parse_json
from phalanx.config.data import Data
from phalanx.data.corpus import JSONL_SUFFIXES, LINE_BYTES, NAMES_SHOWN, walk
from phalanx.errors import DataError
from phalanx.nearest import did_you_mean
from phalanx.units import gib

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"
"""The role whose contents are answers."""
SHOWN_PROBLEMS = 10

Message = dict[str, Any]
"""A message: its "role", its "content", and what else a template may use."""


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


def row_files(data: Data) -> list[Path]:
    """Returns the files of a data set: data.path, or the JSONL files in it. Raises DataError if there are none."""
    path = Path(data.path).expanduser()
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise DataError(f"data.path={path}: there is no such file or folder (corpus {data.corpus})")
    found = walk(path, lambda name: name.startswith("."))
    files = [file for file in found if file.suffix.lower() in JSONL_SUFFIXES]
    if not files:
        known = " ".join(sorted(JSONL_SUFFIXES))
        raise DataError(f"data.path={path}: none of its {len(found)} files holds rows; files are chosen by {known}")
    return sorted(files, key=lambda file: file.relative_to(path).as_posix())


def chat_rows(files: Iterable[Path], data: Data) -> Iterator[Row]:
    """Yields the rows of corpus chat, one conversation each."""
    return rows_of(files, lambda record: (conversation_of(record),))


def rows_of(
    files: Iterable[Path], read: Callable[[dict[str, Any]], tuple[list[Message], ...]], *, only_last: bool = False
) -> Iterator[Row]:
    """Yields the rows of JSONL files, whose conversations `read` makes of their objects; its ValueErrors are the rows'
    problems."""
    for where, record in _records(files):
        try:
            if isinstance(record, ValueError):
                raise record
            yield Row(where, read(record), only_last)
        except ValueError as error:
            yield Row(where, problem=str(error))


def conversation_of(record: dict[str, Any]) -> list[Message]:
    """Returns the messages of a row with `messages`, with `prompt` and `completion`, or, as Alpaca has them, with
    `instruction`, `input` (which may be absent) and `output`. Raises ValueError with everything that is wrong."""
    if "messages" in record:
        messages = record["messages"]
    elif "prompt" in record and "completion" in record:
        messages = [*messages_of(record["prompt"], "user"), *messages_of(record["completion"], ANSWERS)]
    elif "instruction" in record and "output" in record:
        asked = [record["instruction"], *([record["input"]] if record.get("input") else [])]
        question = "\n\n".join(asked) if all(isinstance(text, str) for text in asked) else record["instruction"]
        messages = [{"role": "user", "content": question}, {"role": ANSWERS, "content": record["output"]}]
    else:
        raise ValueError(
            f"no messages, no prompt with completion, and no instruction with output (its fields: {_names(record)})"
        )
    return checked(messages, answered=True)


def messages_of(value: Any, role: str) -> list[Any]:
    """Returns the messages of a field that holds a list of them, or the text of one of `role`."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def checked(messages: Any, *, answered: bool) -> list[Message]:
    """Returns messages that templates can use. Raises ValueError with everything that is wrong with them; with
    `answered` also if no message is an answer."""
    if not isinstance(messages, list):
        raise ValueError(f"messages is {type(messages).__name__}, not a list")
    if not messages:
        raise ValueError("messages is empty")
    problems = [f"message {n}: {each}" for n, m in enumerate(messages, start=1) for each in _message_problems(m)]
    roles = [message.get("role") for message in messages if isinstance(message, dict)]
    if answered and ANSWERS not in roles:
        problems.append(f"no answer: no message has the role {ANSWERS}")
    if problems:
        raise ValueError("; ".join(problems))
    return messages


def _message_problems(message: Any) -> Iterator[str]:
    if not isinstance(message, dict):
        yield f"it is {type(message).__name__}, not an object with role and content"
        return
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        yield "no role" if role is None else f"its role is {type(role).__name__}, not text"
    elif role not in ROLES:
        yield f"unknown role {role[:40]!r}{did_you_mean(role[:40], ROLES)} (known: {', '.join(ROLES)})"
    if message.get("tool_calls"):
        yield "tool_calls are not supported"
    elif content is None:
        yield "no content"
    elif not isinstance(content, str):
        yield f"its content is {type(content).__name__}, not text"
    elif not content.strip():
        yield "no answer: its content is empty" if role == ANSWERS else "its content is empty"


def _records(files: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    """Yields the place and the object of every line that is not blank, or what is wrong with it."""
    for file in files:
        with open_regular(file) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES + 1), b""), start=1):
                if len(line) > LINE_BYTES:
                    raise DataError(f"{file}:{number}: the line is longer than {gib(LINE_BYTES)}, the most for JSON")
                if line.strip():
                    yield f"{file}:{number}", _record(line)


def _record(line: bytes) -> dict[str, Any] | ValueError:
    try:
        record = parse_json(line.rstrip())
    except UnicodeDecodeError as error:
        return ValueError(f"byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason})")
    except ValueError as error:
        return ValueError(f"not a line of JSON: {error}")
    if not isinstance(record, dict):
        return ValueError(f"expected a JSON object, found {type(record).__name__}")
    return record


def _names(record: dict[str, Any]) -> str:
    names = ", ".join(map(repr, islice(record, NAMES_SHOWN))) or "none"
    return names + (f" and {len(record) - NAMES_SHOWN:,} more" if len(record) > NAMES_SHOWN else "")
