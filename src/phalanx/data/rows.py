"""Rows of a data set for fine-tuning: files of conversations, prompts with completions, or instructions.

A row that cannot be used is not skipped: it is yielded with what is wrong, and the data set is refused with the first
problems of all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.bounded import kind_of, parse_json
from phalanx.config.corpora import BUILT_IN, CORPORA, OWN_TEMPLATE
from phalanx.config.job import Data
from phalanx.data.corpus import SAVED_FACTS, Scan, chosen_files, code_points, describe, in_order
from phalanx.data.formats import ROW_SUFFIXES, missing, records, records_inside
from phalanx.data.index import ANSWER, EncodedRows
from phalanx.data.template import (
    ANSWERS,
    FOR_TOOLS,
    THOUGHTS,
    ChatTemplate,
    Part,
    Renderer,
    find_template,
    replaced,
    texts_of,
)
from phalanx.data.tokenizer import Tokenizer, require_in_vocabulary
from phalanx.data.workers import Workers
from phalanx.errors import DataError
from phalanx.nearest import did_you_mean


@dataclass(frozen=True)
class RowText:
    """A row as text: its conversations in parts, each an answer's or not."""

    where: str
    conversations: tuple[list[Part], ...]

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> RowText:
        """Returns the row of its fields, with lists for tuples."""
        where, conversations = found
        return cls(where, tuple([(text, answer) for text, answer in parts] for parts in conversations))

    @property
    def text(self) -> str:
        """The text of all its conversations."""
        return "".join(text for parts in self.conversations for text, _ in parts)

    def __len__(self) -> int:
        return sum(len(text) for parts in self.conversations for text, _ in parts)


def row_texts(
    files: Sequence[Path], data: Data, warn: Callable[[str], object] | None = None, processes: int = 1
) -> Iterator[RowText]:
    """Yields the rows of a data set as text, at most data.limit_mb megabytes of it. After the last row,
    calls `warn` if answers end without a stop token, and with the day that the template writes. Several `processes`
    render the rows of large files.

    Raises DataError, after the last row, with the first problems of rows that cannot be used: of their form, and those
    that the template has with them."""
    causes, left = Causes(), round(data.limit_mb * 1e6) or sys.maxsize
    rows = CORPORA.code(data.corpus, "rows")(files, data)
    if sum(file.stat().st_size for file in files) < RENDERED_HERE_BYTES:
        processes = 1
    with Renderer(find_template(data)) as renderer:
        for found in _rendered_rows(rows, renderer) if processes == 1 else _shared_out(rows, renderer, processes):
            if isinstance(found, tuple):
                causes.add(*found)
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


RENDERED_HERE_BYTES = 4_000_000
"""Bytes of files below which rows are rendered before other processes would have begun to."""
_ROWS_AT_ONCE = 64


def _rendered_rows(rows: Iterable[Row], renderer: Renderer) -> Iterator[RowText | tuple[str, str]]:
    """Yields each row as text, or its place and why it cannot be used."""
    for row in rows:
        try:
            yield _rendered(row, renderer)
        except ValueError as error:
            yield row.where, str(error)


def _shared_out(rows: Iterable[Row], renderer: Renderer, processes: int) -> Iterator[RowText | tuple[str, str]]:
    """Yields what `_rendered_rows` does, in the same order, by several processes. `renderer` counts the answers."""
    left = iter(rows)
    several = iter(lambda: [vars(row) for row in islice(left, _ROWS_AT_ONCE)], [])
    with Workers("phalanx.data.rows:row_renderer", json.dumps(asdict(renderer.template)), processes) as workers:
        for answer in workers.map(json.dumps(some, default=_refused).encode() for some in several):
            found, answers, open_answers = json.loads(answer)
            renderer.answers, renderer.open_answers = renderer.answers + answers, renderer.open_answers + open_answers
            yield from (RowText.from_json(each) if isinstance(each[1], list) else (each[0], each[1]) for each in found)


def _refused(value: object) -> str:
    raise DataError(f"a row holds {kind_of(value)}, which no template writes")


def row_renderer(setting: str) -> Callable[[bytes], bytes]:
    """Returns the work of a child process: it renders rows in JSON, and says how many answers they have, and how many
    of these no token ends."""
    template = ChatTemplate(**json.loads(setting))

    def render(request: bytes) -> bytes:
        renderer.answers = renderer.open_answers = 0
        rows = [Row(**row) for row in json.loads(request)]
        found = [vars(each).values() if isinstance(each, RowText) else each for each in _rendered_rows(rows, renderer)]
        return json.dumps([[*map(tuple, found)], renderer.answers, renderer.open_answers]).encode()

    renderer = Renderer(template)
    return render


def _rendered(row: Row, renderer: Renderer) -> RowText:
    if row.problem:
        raise ValueError(row.problem)
    template = renderer.template
    if row.tools and template.for_tools:
        raise ValueError(
            f"the row has tools, for which {template.origin} is not used: the tokenizer has another template, "
            f"{FOR_TOOLS}; name that in data.template (a .jinja file) for a data set of such rows"
        )
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


ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]
"""A message: its "role", its "content", and what else a template may use."""

_ALSO_CALLED = {
    "human": "user",
    "prompter": "user",
    "gpt": ANSWERS,
    "chatgpt": ANSWERS,
    "bard": ANSWERS,
    "bing": ANSWERS,
    "model": ANSWERS,
    "bot": ANSWERS,
    "ai": ANSWERS,
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
"""Roles as ShareGPT, axolotl and Llama name them."""
_TRAINED = ("weight", "train", "training", "trainable", "loss_mask")
"""Fields of a message that say whether it counts in the loss: OpenAI and mistral-finetune, axolotl, and others."""
_FOR_TEMPLATES = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning")
"""Fields of a message that some templates write."""
_METADATA = """
id _id idx index uuid row_id key conversation_id conversation_hash prompt_id question_id example_id
sample_id source sources dataset subset split category categories task tasks topic domain type tag tags
label_source language lang license url title model model_name generator created_at timestamp date time
version turn num_turns n_turns length num_tokens token_count score scores score_chosen score_rejected
rating ratings quality difficulty redacted toxic meta metadata extra info annotator annotation
"""
METADATA = frozenset(_METADATA.split())
"""Fields of a row that describe it and train nothing, in published data sets."""
_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval", "evaluation")
"""Values of the field `split` of rows that are not for training."""
_SAYS_NOTHING = (None, "", [])
"""Values of a field that are no reason to refuse it."""
_OF_MESSAGES = "messages."
"""Begins a name of data.ignore_keys that is a field of messages, not of rows."""
_QUESTIONS = ("prompt", "question", "query", "problem", "user", "human", "input", "inputs")
_REPLIES = ("completion", "output", "answer", "response", "solution", "reply", "assistant", "target", "targets")
"""Names of columns that published data sets have for what `prompt` and `completion`, or Alpaca's `output`, are here."""
_FOR_ROLES = {OWN_TEMPLATE, *BUILT_IN} - {"raw"}
"""Templates that write who says what."""
_EXTRA = ("tools", "system")
"""Fields that may stand beside any conversation."""


def renamed(record: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """Returns a row with the names of data.columns ("question:prompt") and without data.ignore_keys. Raises ValueError
    if a column is absent, or its new name is taken."""
    found = {name: value for name, value in record.items() if name not in data.ignore_keys}
    for pair in data.columns:
        theirs, _, ours = pair.partition(":")
        if theirs not in found:
            raise ValueError(f"no field {theirs!r} of data.columns (its fields: {', '.join(map(repr, record))})")
        if ours != theirs and ours in found:
            raise ValueError(f"data.columns={pair}: the row has a field {ours!r}, too")
        found[ours] = found.pop(theirs)
    if data.template in _FOR_ROLES and re.search(r"\n\nAssistant:\s*$", str(found.get("prompt"))):
        raise ValueError(
            "prompt is a transcript that ends with 'Assistant:', and would be one message of the user: write messages, "
            "or set data.template=raw, which writes the texts alone"
        )
    if ignored := {name.removeprefix(_OF_MESSAGES) for name in data.ignore_keys if name.startswith(_OF_MESSAGES)}:
        for name, value in found.items():
            if isinstance(value, list):
                found[name] = [
                    {key: each for key, each in item.items() if key not in ignored} if isinstance(item, dict) else item
                    for item in value
                ]
    return found


def require_known(record: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ValueError with every field that is neither of the row's format nor known metadata. None and an empty list
    or text say nothing, so they are no reason."""
    every = {*known, *_EXTRA}
    unknown = [name for name, value in record.items() if name not in every | METADATA and value not in _SAYS_NOTHING]
    if str(record.get("split")).lower() in _HELD_OUT:
        raise ValueError(
            f"split is {record['split']!r}, and every row is trained on: take out those of other splits, whose part "
            "data.val_fraction plays, or train on them with data.ignore_keys=[split]"
        )
    if "label" in unknown and "completion" in known:
        raise ValueError(
            "'label' is that of KTO, which marks an answer as good or bad: keep only rows whose label is true, without "
            "it, or set data.corpus=preferences, which makes pairs where a prompt has answers of both labels"
        )
    if unknown:
        hint = did_you_mean(unknown[0], sorted(every)) if len(unknown) == 1 else ""
        raise ValueError(
            f"{', '.join(map(repr, unknown[:8]))} {'is' if len(unknown) == 1 else 'are'} not understood{hint} (known: "
            f"{', '.join(sorted(every))}, and metadata such as id and source); allow it with "
            f"data.ignore_keys=[{','.join(unknown[:8])}], or name columns with data.columns"
        )


def conversation_of(record: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of a row: `messages` or `conversations` (role and content, or from and value), `prompt` with
    `completion`, or, as Alpaca has them, `instruction`, `input` and `output`, with `history` before. `system` comes
    first in all of them. Raises ValueError with everything that is wrong."""
    form = _form({name for name, value in record.items() if value is not None}) or _form(record)
    if form in ("messages", "conversations"):
        if form == "messages" and record.get("conversations", record[form]) not in (None, record[form]):
            raise ValueError("both messages and conversations, and they differ: leave one out with data.ignore_keys")
        require_known(record, ("messages", "conversations"))
        messages = record[form]
    elif form == "completion":
        require_known(record, ("prompt", "completion", "history"))
        messages = [*messages_of(record["prompt"], "user"), *messages_of(record["completion"], ANSWERS)]
    elif form == "output":
        require_known(record, ("instruction", "input", "output", "history", "text"))
        asked = [record[name] for name in ("instruction", "input") if record.get(name) not in _SAYS_NOTHING]
        if wrong := next((text for text in asked if not isinstance(text, str)), None):
            raise ValueError(f"instruction and input are texts, found {kind_of(wrong)}")
        rendered = record.get("text")  # all of them, as Alpaca's own file has it
        if rendered and not all(str(text) in str(rendered) for text in (*asked, record["output"])):
            raise ValueError("text stands beside instruction and output, and is not them: data.ignore_keys=[text]")
        messages = [{"role": "user", "content": "\n\n".join(asked)}, {"role": ANSWERS, "content": record["output"]}]
    else:
        way = records_inside(record) if _columns(record) == _COLUMNS else ""
        way = way or f"; data.columns names others, such as {_columns(record)}"
        if {"chosen", "rejected"} <= record.keys():
            way = "; chosen and rejected are pairs, for data.corpus=preferences"
        raise ValueError(
            "no messages, no prompt with completion, and no instruction with output (its fields: "
            f"{', '.join(map(repr, [*record][:20])) or 'none'}){way}"
        )
    return checked(with_context(messages, record), answered=True)


def _form(names: Collection[str]) -> str:
    """Returns the field that tells the format of a row with fields of these names, or nothing."""
    forms = {"messages": (), "conversations": (), "completion": ("prompt",), "output": ("instruction",)}
    return next((name for name, others in forms.items() if name in names and all(map(names.__contains__, others))), "")


_COLUMNS = "[question:prompt,answer:completion]"


def _columns(record: Mapping[str, Any]) -> str:
    """Returns the data.columns that a row most likely needs, or an example."""
    theirs = {name.lower(): name for name in record}
    spoken = (name for name, value in record.items() if isinstance(value, list) and value and role_of(value[0]))
    if name := next(spoken, ""):
        return f"[{name}:messages]"
    question = next((theirs[name] for name in _QUESTIONS if name in theirs), "")
    reply = next((theirs[name] for name in _REPLIES if name in theirs), "")
    pairs = {question: "prompt", reply: "completion"}
    if "instruction" in record:
        pairs = {reply: "output"} | ({"context": "input"} if "context" in record and "input" not in record else {})
    if not reply or "" in pairs:
        return _COLUMNS
    return f"[{','.join(f'{theirs}:{ours}' for theirs, ours in pairs.items() if theirs != ours)}]"


def with_context(messages: Any, record: Mapping[str, Any]) -> Any:
    """Returns messages with the row's `history` and its `system` before them. Raises ValueError if they are not what
    they should be."""
    if not isinstance(messages, list):
        return messages
    before: list[Any] = []
    history = record.get("history")
    if not isinstance(history, list | None) and history not in _SAYS_NOTHING:
        raise ValueError(f"history is {kind_of(history)}, not a list of questions with answers")
    for n, turn in enumerate(history or [], start=1):
        if not (isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise ValueError(f"history: turn {n} is not a list of two texts, a question and an answer")
        before += [{"role": "user", "content": turn[0]}, {"role": ANSWERS, "content": turn[1]}]
    system = record.get("system")
    if system:
        if not isinstance(system, str):
            raise ValueError(f"system is {kind_of(system)}, not text")
        first = messages[0] if messages and isinstance(messages[0], dict) else {}
        if first.get("role", first.get("from")) in ("system", "developer"):
            if first.get("content", first.get("value")) != system:
                raise ValueError("system stands beside messages that begin with another system message")
        else:
            before = [{"role": "system", "content": system}, *before]
    return [*before, *messages]


def tools_of(record: Mapping[str, Any]) -> list[Any]:
    """Returns the row's tools: a list, or a JSON text of one. Raises ValueError for anything else."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except json.JSONDecodeError:
            raise ValueError("tools is a text that is no JSON") from None
        except ValueError as error:
            raise ValueError(f"tools: {error}") from None
    if not tools:
        return []
    listed = tools if isinstance(tools, list) else [None]
    if wrong := [each for each in listed if not isinstance(each, dict)]:
        found = kind_of(wrong[0] or tools)
        raise ValueError(f"tools is not a list of objects, which describe one tool each: found {found}")
    return listed


def messages_of(value: Any, role: str) -> list[Any]:
    """Returns the messages of a field that holds a list of them, one of them, or the text of one of `role`."""
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def role_of(message: Any) -> Any:
    """Returns the role of a message, also of one of ShareGPT's."""
    usual = plain(message)
    return usual.get("role") if isinstance(usual, dict) else None


def checked(messages: Any, *, answered: bool) -> list[Message]:
    """Returns messages that templates can use, in the form of OpenAI. Raises ValueError with everything that is wrong
    with them; with `answered` also if no message is an answer."""
    if not isinstance(messages, list):
        raise ValueError(f"messages is {kind_of(messages)}, not a list")
    if not messages:
        raise ValueError("messages is empty")
    problems: list[str] = []
    found: list[Message] = []
    for number, message in enumerate(messages, start=1):
        usual = plain(message)
        found.append(usual if isinstance(usual, dict) else {})
        problems += [f"message {number}: {each}" for each in _message_problems(usual)]
    roles = [message.get("role") for message in found]
    if answered and ANSWERS not in roles:
        problems.append(f"no answer: no message has the role {ANSWERS}")
    elif answered and not problems and not any(trained(found)):
        problems.append("no answer counts in the loss: all have weight 0")
    if problems:
        raise ValueError("; ".join(problems))
    return found


def plain(message: Any) -> Any:
    """Returns a message with role and content instead of ShareGPT's from and value, and a text for a list of parts that
    are texts. Fields that are None are left out, as tables have them."""
    if not isinstance(message, dict):
        return message
    found = {name: value for name, value in message.items() if value is not None or name in ("role", "content")}
    if "from" in found and "value" in found and "role" not in found and "content" not in found:
        found = {"role": found.pop("from"), **found, "content": found["value"]}
        del found["value"]
    if isinstance(role := found.get("role"), str):
        found["role"] = _ALSO_CALLED.get(role, role)
    parts = found.get("content")
    if isinstance(parts, list) and all(map(_is_text_part, parts)):
        found["content"] = "".join(part["text"] for part in parts)
    return found


def _is_text_part(part: Any) -> bool:
    told = {name for name, value in part.items() if value is not None} if isinstance(part, dict) else ()
    return told == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)


def _message_problems(message: Any) -> Iterator[str]:
    if not isinstance(message, dict):
        yield f"it is {kind_of(message)}, not an object with role and content"
        return
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        yield "no role" if role is None else f"its role is {kind_of(role)}, not text"
    elif role not in ROLES:
        hint = did_you_mean(role[:40], (*ROLES, *_ALSO_CALLED))
        yield f"unknown role {role[:40]!r}{hint} (known: {', '.join(ROLES)})"
    known = ("role", "content", *_FOR_TEMPLATES, *_TRAINED)
    for name in (name for name in message if name not in known and name not in METADATA):
        if message[name] in _SAYS_NOTHING:
            continue
        hint = did_you_mean(name, known)
        allowed = f"allow it with data.ignore_keys=[{_OF_MESSAGES}{name}]"
        yield f"{name!r} is not understood{hint} (known: {', '.join(known)}); {allowed}"
    yield from _trained_problems(message)
    thoughts = [name for name in THOUGHTS if message.get(name)]
    if any(message[name] != message[thoughts[0]] for name in thoughts):
        yield f"its {' and '.join(thoughts)} differ: leave one out with data.ignore_keys=[{_OF_MESSAGES}{thoughts[-1]}]"
    if message.get("tool_calls") and role == ANSWERS and content in (None, ""):
        return
    if content is None:
        yield "no content"
    elif isinstance(content, list):
        texts = [p for p in content if isinstance(p, dict) and p.get("type") == "text"]
        more = {name for part in texts for name, value in part.items() if value is not None}
        more -= {"type", "text"}
        kinds = sorted({str(p.get("type")) if isinstance(p, dict) else f"{kind_of(p)} without a type" for p in content})
        if kinds == ["text"] and more:
            yield f"its content has parts with {', '.join(map(repr, sorted(more)))} beside their text: leave that out"
        else:
            yield f"its content is a list of parts of type {', '.join(kinds)}, of which only text is trained on"
    elif not isinstance(content, str):
        yield f"its content is {kind_of(content)}, not text"
    elif not content.strip() and role not in ("tool", "system"):
        yield "no answer: its content is empty" if role == ANSWERS else "its content is empty"


def _trained_problems(message: Message) -> Iterator[str]:
    for name in _TRAINED:
        value = message.get(name)
        if value is None or value in (0, 1):
            if value and message.get("role") != ANSWERS:
                yield f"its {name} is {value!r}, and only answers are trained on"
            continue
        yield f"its {name} is {value!r}: an answer counts (1, true) or does not (0, false)"
    given = {bool(message[name]) for name in _TRAINED if message.get(name) in (0, 1) and name in message}
    if len(given) > 1:
        yield f"{' and '.join(name for name in _TRAINED if name in message)} contradict each other"


def trained(messages: list[Message]) -> list[bool]:
    """Returns whether each answer of a conversation counts in the loss, by the fields that say so."""
    return [
        all(message.get(name, 1) not in (0, False) for name in _TRAINED)
        for message in messages
        if message.get("role") == ANSWERS
    ]


def for_template(messages: list[Message], *, marked: bool = True) -> list[Message]:
    """Returns messages as data/template.py takes them, without metadata: with `marked`, an answer that does not count
    in the loss has "trained" false."""
    kept = ("role", "content", *_FOR_TEMPLATES)
    counts = iter(trained(messages))
    found = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name in kept}
        if message.get("role") == ANSWERS and not next(counts) and marked:
            plain["trained"] = False
        found.append(plain)
    return found


def unwritten(messages: list[Message], tools: list[Any], source: str) -> str:
    """Returns what is wrong with a conversation that has fields which the template `source` does not use, or nothing:
    they would be left out silently."""
    if tools and "tools" not in source:
        return "the row has tools, which the template does not write: use one that does, or data.ignore_keys=[tools]"
    for number, message in enumerate(messages, start=1):
        for name in _FOR_TEMPLATES:
            if message.get(name) and name not in source:
                return (
                    f"message {number}: its {name} is not written by the template; use one that writes it, or "
                    f"data.ignore_keys=[{_OF_MESSAGES}{name}]"
                )
    return ""


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
    return in_order(chosen_files(path, ROW_SUFFIXES, "holds rows", SAVED_FACTS), path)


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
