"""From rows to texts, and from texts to the tokens of shards."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.config.corpora import CORPORA
from phalanx.config.data import Data
from phalanx.data.answers import Part, replaced, texts_of
from phalanx.data.build import EncodedRows
from phalanx.data.corpus import Scan, code_points, describe
from phalanx.data.row_fields import ANSWERS, Message, unwritten
from phalanx.data.rows import Causes, Row
from phalanx.data.shards import ANSWER
from phalanx.data.template import Renderer, find_template
from phalanx.data.tokenizer import Tokenizer, require_in_vocabulary
from phalanx.errors import DataError


@dataclass(frozen=True)
class RowText:
    """A row as text: its conversations in parts, each an answer's or not."""

    where: str
    conversations: tuple[list[Part], ...]

    @property
    def text(self) -> str:
        """The text of all its conversations."""
        return "".join(text for parts in self.conversations for text, _ in parts)

    def __len__(self) -> int:
        return sum(len(text) for parts in self.conversations for text, _ in parts)


def row_texts(files: Sequence[Path], data: Data, warn: Callable[[str], object] | None = None) -> Iterator[RowText]:
    """Yields the rows of a data set as text, at most data.limit_mb megabytes of it. After the last row,
    calls `warn` if answers end without a stop token, and with the day that the template writes.

    Raises DataError, after the last row, with the first problems of rows that cannot be used: of their form, and those
    that the template has with them."""
    causes, left = Causes(), round(data.limit_mb * 1e6) or sys.maxsize
    with Renderer(find_template(data)) as renderer:
        for row in CORPORA.code(data.corpus, "rows")(files, data):
            try:
                found = _rendered(row, renderer)
            except ValueError as error:
                causes.add(row.where, str(error))
                continue
            left -= len(found.text.encode())
            if left < 0:
                break
            if not causes.rows:
                yield found
        if warn is not None and not causes.rows:
            if renderer.warning:
                warn(renderer.warning)
            if renderer.template.writes_date:
                warn(f"{renderer.template.origin} writes a date: {renderer.template.date} in every conversation")
    if causes.rows:
        raise DataError("\n  ".join([f"{describe(data)}: {causes.head()}:", *causes.lines()]))


def _rendered(row: Row, renderer: Renderer) -> RowText:
    if row.problem:
        raise ValueError(row.problem)
    template = renderer.template
    for messages in row.conversations:
        if wrong := unwritten(messages, list(row.tools), template.source):
            raise ValueError(f"{wrong} ({template.origin})")
    try:
        conversations = tuple(renderer.parts(messages, row.tools) for messages in row.conversations)
    except ValueError as error:
        raise ValueError(f"{template.origin}: {error}") from error
    for messages, parts in zip(row.conversations, conversations, strict=True):
        text = "".join(text for text, _ in parts)
        for what, others, tools in _left_out(messages, row.tools, text):
            try:
                same = renderer.parts(others, tools) == parts
            except ValueError:  # the template has looked at it
                continue
            if same:
                raise ValueError(f"{what} not written by the template ({template.origin}); use one that writes it")
    if row.only_last:
        conversations = tuple(map(_last_answer, conversations))
    if not all(any(answer for _, answer in parts) for parts in conversations):
        raise ValueError(f"the template ({renderer.template.origin}) writes no answer")
    return RowText(row.where, conversations)


def _left_out(
    messages: list[Message], tools: Sequence[Any], text: str
) -> Iterator[tuple[str, list[Message], Sequence[Any]]]:
    """Yields a conversation with another text, or none, in place of what a template may leave out although its source
    has the word, as `function.name` has: names of messages, contents and arguments that its `text` does not show, and
    the tools. What stands in answers is looked at where they are rendered (answers.require_written)."""
    for number, message in enumerate(messages):
        where = f"message {number + 1}: its"
        changed: list[tuple[str, Message]] = []
        if message.get("name"):
            changed.append((f"{where} name is", {key: value for key, value in message.items() if key != "name"}))
        for path, value in texts_of(message):
            is_content = path == ("content",) and message["role"] != ANSWERS
            if (is_content or (path[0] == "tool_calls" and "arguments" in path)) and value.strip() not in text:
                what = "content is" if is_content else "tool_calls have arguments that are"
                changed.append((f"{where} {what}", replaced(message, path, f"{value}\ufdd0")))
        for what, other in changed:
            yield what, [*messages[:number], other, *messages[number + 1 :]], tools
    if tools:
        yield "tools of the row: they are", messages, ()


def _last_answer(parts: list[Part]) -> list[Part]:
    """Returns the parts with only the last answer marked."""
    last = max((n for n, (_, answer) in enumerate(parts) if answer), default=-1)
    return [(text, n == last) for n, (text, _) in enumerate(parts)]


def scan_rows(texts: Iterable[RowText]) -> Scan:
    """Reads everything once, as `corpus.scan` does: the digest is of the parts, with whose they are."""
    digest, counts = hashlib.sha256(), np.zeros(0x110000, dtype=np.int64)
    rows = characters = size = 0
    for row in texts:
        for parts in row.conversations:
            for text, answer in parts:
                encoded = text.encode()
                digest.update(encoded + (b"\xfe" if answer else b"\xff"))  # bytes that are never part of UTF-8
                size += len(encoded)
            digest.update(b"\xff\xff")
        found = np.bincount(code_points(row.text), minlength=1)
        counts[: found.size] += found
        rows, characters = rows + 1, characters + len(row)
    return Scan(rows, characters, size, digest.hexdigest(), counts)


def encode_rows(tokenizer: Tokenizer, rows: Sequence[RowText]) -> EncodedRows:
    """Returns the tokens of rows. Raises DataError, with file and line, for a conversation without a token to learn."""
    encoded = tokenizer.encode_marked([parts for row in rows for parts in row.conversations])
    table = np.array([(ids.size, marks[1:].sum()) for ids, marks in encoded], dtype=np.int64).reshape(-1, 2)
    if not table[:, 1].all():
        conversation = int(table[:, 1].argmin())
        raise DataError(f"{rows[conversation // len(rows[0].conversations)].where}: its answer has no token to learn")
    ids = np.concatenate([each for each, _ in encoded])
    require_in_vocabulary(ids, tokenizer.vocab_size, "the tokenizer")
    marks = np.concatenate([each for _, each in encoded])
    return EncodedRows(np.where(marks, ids | ANSWER, ids).astype(np.uint32), table)
