"""Finds the chat template of a job's data, and renders conversations with it.

A tokenizer's own template stands beside its tokenizer.json: in chat_template.jinja, or in tokenizer_config.json, which
also names the special tokens that templates write. Prepared shards and runs carry both files, so that whoever has a run
can make a prompt for its model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import secrets
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any

from phalanx.bounded import kind_of, parse_json, read_bytes, read_text
from phalanx.check.start import KEPT
from phalanx.config.corpora import BUILT_IN, END_OF_TEXT, JINJA_FILE, OWN_TEMPLATE, TOKENIZER_CONFIG, TOKENIZERS
from phalanx.config.job import Data
from phalanx.data.files import write_atomic
from phalanx.data.tokenizer import SPECIAL_MAP, Tokenizer, named_token
from phalanx.data.workers import Worker, WorkerEndedError
from phalanx.errors import DataError, JobError, NotFoundError, RunError
from phalanx.nearest import near_file

if TYPE_CHECKING:
    from jinja2.nodes import CallBlock
    from jinja2.parser import Parser


Part = tuple[str, bool]
"""A part of a conversation's text, and whether it is an answer's."""

MOST_TEXTS = 64
"""Most texts of a message, in its content, thoughts and calls, that are marked to find the message."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's thought; templates read the first two."""


def with_thoughts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose thought has each name that templates read, as transformers does."""
    thought = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def open_answers(parts: Sequence[Part], messages: Sequence[Mapping[str, Any]], eos: str) -> int:
    """Returns the number of answers that nothing ends: after the message's content neither `eos` follows nor any other
    text than white space. A model that learns them never learns to stop."""
    answers = [text for text, answer in parts if answer]
    contents = [each.get("content") for each in messages if each["role"] == "assistant" and each.get("trained", True)]
    if len(answers) != len(contents):  # some are written in several blocks
        answers, contents = answers[-1:], contents[-1:]
    count = 0
    for answer, content in zip(answers, contents, strict=False):
        written = core(content) if isinstance(content, str) else ""
        place = answer.rfind(written) if written else -1
        if place < 0 or (eos and eos in answer[place:]):
            continue
        count += not answer[place + len(written) :].strip()
    return count


def require_written(parts: Sequence[Part], messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if the text leaves out an answer's content or its calls, as a template does that expects the
    content in another form, or that knows no calls. Only answers that are one part each are looked at."""
    answers = [text.casefold() for text, answer in parts if answer]
    asked = [(n, each) for n, each in enumerate(messages, start=1) if each["role"] == "assistant"]
    if len(answers) != len(asked) or not any(answers):  # a text without an answer is its own problem
        return
    for text, (n, message) in zip(answers, asked, strict=True):
        content = message.get("content")
        words = core(content).casefold().split() if isinstance(content, str) else []
        if words and not any(word in text for word in words):
            raise ValueError(
                f"message {n}: the template does not write its content, which is text; it may expect a list of parts: "
                'content [{"type": "text", "text": ...}]'
            )
        for call in message.get("tool_calls") or []:
            name = call.get("function", call).get("name") if isinstance(call, Mapping) else None
            if isinstance(name, str) and name.casefold() not in text:
                raise ValueError(f"message {n}: the template does not write its tool_calls (function {name[:40]!r})")


def untrained_removed(parts: Sequence[Part], trained: Sequence[bool]) -> list[Part]:
    """Returns the parts with only trained answers marked. Raises ValueError if answers are not one part each."""
    if sum(answer for _, answer in parts) != len(trained):
        raise ValueError(
            "the template does not mark each answer once, so that single ones cannot be left out of the loss"
        )
    left = iter(trained)
    return [(text, answer and next(left)) for text, answer in parts]


def core(content: str) -> str:
    """Returns a content without its thought, which templates may leave out, and without white space around it."""
    return content.rpartition("</think>")[2].strip()


def texts_of(message: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], str]]:
    """Returns the texts in a message that are not blank, each with the keys that lead to it: the content first."""
    found: list[tuple[tuple[Any, ...], str]] = []

    def collect(value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, str):
            if value.strip() and path[-1] not in ("role", "type", "id"):
                found.append((path, value))
        elif isinstance(value, Mapping | list | tuple):
            for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
                collect(each, (*path, key))

    collect(dict(sorted(message.items(), key=lambda item: item[0] != "content")), ())
    return found[:MOST_TEXTS]


def replaced(value: Any, path: Sequence[Any], text: str) -> Any:
    """Returns a copy of a message in which the text at `path` is another."""
    if not path:
        return text
    copy = dict(value) if isinstance(value, Mapping) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], text)
    return copy


ANSWERS = "assistant"
"""The role whose contents are answers."""


MOST_OUTPUT = 1 << 26
"""Most characters of a conversation's text."""
MOST_REPEATED = 1 << 20
"""Most elements that a template's product of a text or a list with a number may have."""
MOST_EXPONENT = 64
MOST_FORMAT = 200
"""Most characters of a format of a date."""
RENDER_S = 5.0
"""Most seconds of processor time of a child for one conversation."""
CHILD_BYTES = 1 << 30
"""Most bytes of address space of a child."""
TEMPLATE_DATE = "2024-07-26"
"""The day that templates write as today's, so that shards do not depend on the day of their preparation. Llama 3.2's
template writes this day where it knows no other."""
TAG = re.compile(r"<[^<>\s]{1,80}>|\[[^][\s]{1,80}\]")
"""The form of nearly all special tokens."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class TemplateRenderer:
    """A compiled chat template. Raises ValueError, saying what Jinja says, if it is none."""

    def __init__(self, source: str, variables: Mapping[str, str], date: str = TEMPLATE_DATE):
        self.variables = dict(variables)
        self.date = datetime.fromisoformat(date)
        """The time that strftime_now writes."""
        self.marks_answers = GENERATION.search(source) is not None
        self._tools: list[Any] | None = None
        self._between = ("", "")
        """The texts that stand around answers while they are being marked."""
        self._template = _failing_as_value_error(lambda: _environment(self).from_string(source))

    def text(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = False) -> str:
        """Returns the text of messages, with `generation_prompt` up to where the model's answer begins.

        Raises ValueError, saying what the template says, if it refuses the messages, fails, or writes too much."""
        return _failing_as_value_error(lambda: self._render(messages, generation_prompt))

    def parts(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[Part]:
        """Returns the text of a conversation, in which the model may use `tools`, in parts, each an answer's or not:
        joined they are `text`.

        A template marks answers with `{% generation %}`. Without it, an answer is the text between the rendering of the
        messages before it, with the generation prompt, and the rendering that includes it. Where these do not begin the
        whole text, because the template drops earlier thoughts, the answer is found by marks in the message's texts.
        A message whose "trained" is false is no answer. Raises ValueError as `text` does, and where answers cannot be
        told."""
        trained = [bool(each.get("trained", True)) for each in messages if each["role"] == "assistant"]
        messages = [{key: value for key, value in each.items() if key != "trained"} for each in messages]
        self._tools = [*tools] or None
        whole = self.text(messages)
        parts = self._marked(messages) if self.marks_answers else self._by_messages(messages, whole)
        if "".join(text for text, _ in parts) != whole:
            raise ValueError("the template writes another text when the answers in it are marked")
        require_written(parts, messages)
        if not all(trained):
            parts = untrained_removed(parts, trained)
        return [part for part in parts if part[0]]

    def mark(self, caller: Callable[[], str]) -> str:
        """Returns the text of a `generation` block."""
        before, after = self._between
        return f"{before}{caller()}{after}"

    def _marked(self, messages: Sequence[Mapping[str, Any]]) -> list[Part]:
        # Nobody who writes messages can know these texts. Noncharacters and digits pass filters such as upper and trim.
        secret = secrets.randbits(64)
        self._between = begin, end = f"\ufdd0{secret}\ufdd1", f"\ufdd2{secret}\ufdd3"
        try:
            text = self.text(messages)
        finally:
            self._between = ("", "")
        parts, depth = [], 0
        for piece in re.split(f"({begin}|{end})", text):
            if piece in (begin, end):
                depth += 1 if piece == begin else -1
            else:
                parts.append((piece, depth > 0))
        return parts

    def _by_messages(self, messages: Sequence[Mapping[str, Any]], whole: str) -> list[Part]:
        parts, done = [], 0
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.text(messages[:n], generation_prompt=True), self.text(messages[: n + 1])
            if whole.startswith(after) and after.startswith(before) and done <= len(before):
                start, end = len(before), len(after)
            else:
                start, end = self._span(messages, n, whole, done)
            parts += [(whole[done:start], False), (whole[start:end], True)]
            done = end
        return [*parts, (whole[done:], False)]

    def _span(self, messages: Sequence[Mapping[str, Any]], n: int, whole: str, done: int) -> tuple[int, int]:
        """Returns where the answer that is message n begins and ends in the whole text."""
        problem = ValueError(
            f"the template's text of the first {n + 1} messages does not begin its text of all, and does not repeat "
            f"the content of message {n + 1} in it, so the answers cannot be told: use a template that marks them with "
            "{% generation %}, or a built-in one"
        )
        content = self._content_ends(messages, n, whole)
        alone = self.text(messages[: n + 1])
        content_alone = self._content_ends(messages[: n + 1], n, alone)
        if not content or not content_alone:
            raise problem
        before = self._content_ends(messages, n - 1, whole) if n else []
        end = content[-1]
        for one, other in zip(whole[end:], alone[content_alone[-1] :], strict=False):
            if one != other:
                break
            end += 1
        # Where the last turn ends otherwise than those before it, what ends each message of these ends an answer, too.
        for tag in TAG.finditer(whole, content[-1]):
            if tag.start() < end < tag.end():
                end = tag.start()
        if before and not whole[content[-1] : end].strip() and (tag := TAG.match(whole, end)):
            closing = TAG.search(whole, before[-1])
            end = tag.end() if closing and closing[0] == tag[0] else end
        # The turn begins where the message before it has been written; the answer, after what prompts it.
        begin = max(done, before[-1]) if before else done
        asked, prompted = self.text(messages[:n]), self.text(messages[:n], generation_prompt=True)
        prompt = prompted[len(asked) :] if prompted.startswith(asked) else ""
        # A prompt may begin a thought, which the text of all leaves out.
        cuts = [len(prompt), *(found.start() for found in reversed(list(re.finditer(r"[<\[]", prompt))))]
        for cut in filter(None, cuts):
            if (place := whole.find(prompt[:cut], begin, content[0])) >= 0:
                return place + cut, end
        first = core(texts_of(messages[n])[0][1])
        start = whole.rfind(first, begin, content[0])
        if start < 0:
            raise problem
        return start, end

    def _content_ends(self, messages: Sequence[Mapping[str, Any]], n: int, whole: str) -> list[int]:
        """Returns where the texts of message n end in the text of all, in order, of those that it repeats."""
        mark = f"\ufdd0{secrets.randbits(64)}\ufdd1"
        ends = []
        for path, value in texts_of(messages[n]):
            place = len(value.rstrip())
            marked = replaced(messages[n], path, value[:place] + mark + value[place:])
            try:
                text = self.text([*messages[:n], marked, *messages[n + 1 :]])
            except ValueError:
                continue
            if text.count(mark) == 1 and text.replace(mark, "") == whole:
                ends.append(text.index(mark))
        return sorted(ends)

    def _render(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
        pieces, size = [], 0
        values = {
            **self.variables,
            "messages": list(map(with_thoughts, messages)),
            "add_generation_prompt": generation_prompt,
        }
        values = {"tools": self._tools, "documents": None, **values}  # as transformers has them where there are none
        for piece in self._template.generate(values):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_OUTPUT:
                raise ValueError(f"the template writes more than {MOST_OUTPUT:,} characters")
        return "".join(pieces)


def renderer(setting: str) -> Callable[[bytes], bytes]:
    """Returns the work of a child process that may do nothing else (data/workers.py): to render conversations.

    `setting` is the template, {"source": ..., "variables": ..., "date": ..., "seconds": ...}. A request is {"messages":
    ...}, or with "prompt" true for the text that an answer follows; an answer {"parts": ...}, {"text": ...} or
    {"error": ...}. A conversation that takes longer than those seconds ends the process with SIGPROF."""
    first, problem = json.loads(setting), ""
    _confine()
    made = None
    try:
        made = _within(first["seconds"], partial(TemplateRenderer, first["source"], first["variables"], first["date"]))
    except ValueError as error:
        problem = str(error)

    def render(request: bytes) -> bytes:
        try:
            if made is None:
                raise ValueError(problem)
            reply = _within(first["seconds"], partial(_reply, made, json.loads(request)))
        except ValueError as error:
            reply = {"error": str(error)}
        return json.dumps(reply).encode()

    return render


def _reply(renderer: TemplateRenderer, request: dict[str, Any]) -> dict[str, Any]:
    if request.get("prompt"):
        return {"text": renderer.text(request["messages"], generation_prompt=True)}
    return {"parts": renderer.parts(request["messages"], request.get("tools", ()))}


def _within(seconds: float, act: Callable[[], Any]) -> Any:
    """Calls `act`; the kernel ends the process, which may be deep in one call of C, when it takes too long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return act()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _confine() -> None:
    """Takes from this process what rendering does not need: memory without end, further files, and writing files."""
    # What rendering imports must be there before files can no longer be opened; so must the codec of texts.
    import textwrap  # noqa: F401

    import jinja2.debug  # noqa: F401

    TemplateRenderer("{% generation %}{{ '\\n' + strftime_now('%d %b %Y') }}{% endgeneration %}", {}).parts([])
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def _failing_as_value_error(act: Callable[[], Any]) -> Any:
    """Returns what `act` returns. Raises ValueError for whatever a template can raise, which is anything."""
    try:
        return act()
    except ValueError:
        raise
    except MemoryError:
        raise ValueError("the template needs more memory than it may have") from None
    except RecursionError:
        raise ValueError("the template calls itself without end") from None
    except Exception as error:
        raise ValueError(f"{_line_of(error)}{type(error).__name__}: {error}"[:500]) from error


def _line_of(error: Exception) -> str:
    """Returns "line N: " for an error at a line of the template, or nothing."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return f"line {line}: " if line else ""


def _environment(renderer: TemplateRenderer) -> Any:
    """Returns the sandbox, with the filters and functions that templates of Hugging Face expect."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = [value for value in (left, right) if isinstance(value, int)]
            sized = [value for value in (left, right) if hasattr(value, "__len__")]
            if operator == "*" and sized and numbers and len(sized[0]) * numbers[0] > MOST_REPEATED:
                raise SecurityError(f"a product of more than {MOST_REPEATED:,} elements")
            if operator == "**" and any(abs(value) > MOST_EXPONENT for value in numbers[-1:]):
                raise SecurityError(f"an exponent above {MOST_EXPONENT}")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's form)

        def parse(self, parser: Parser) -> CallBlock:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body, lineno=line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return renderer.mark(caller)

    class SafeNamespace(Namespace):
        """A namespace whose names cannot be those of Python's internals."""

        def __init__(*args: Any, **values: Any) -> None:  # so that a template may also name a value "self"
            self, *rest = args
            values = dict(*rest, **values)
            for name in values:
                _require_public(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _require_public(name)
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise TemplateError(str(message))

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def make_dict(*args: Any, **values: Any) -> dict[Any, Any]:  # the class itself has methods to play with
        return dict(*args, **values)

    def strftime_now(format: str) -> str:
        if len(str(format)) > MOST_FORMAT:
            raise SecurityError(f"a format of a date of more than {MOST_FORMAT} characters")
        return renderer.date.strftime(str(format))

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {  # pyrefly: ignore[bad-assignment]
        "raise_exception": refuse,
        "strftime_now": strftime_now,
        "namespace": SafeNamespace,
        "dict": make_dict,
    }
    del sandbox.globals["lipsum"]
    return sandbox


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ValueError(f"a namespace cannot have a name that begins with an underscore, as {name[:40]!r}")


_QUESTION, _ANSWER = "Question?", "Answer."


class ChatPrompts:
    """Makes prompts of messages, with a chat template. Several threads may call it."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self.template, self.tokenizer = template, tokenizer
        self._renderer, self._lock = Renderer(template), Lock()
        self._end: str | None = None

    @classmethod
    def of_run(cls, folder: Path, tokenizer: Tokenizer) -> ChatPrompts | None:
        """Returns the prompts of a run's template; None if it has none. Raises DataError if it cannot be read."""
        template = own_template(folder)
        return cls(template, tokenizer) if template else None

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation up to where the model's answer begins. Raises ValueError, saying why, if
        the template refuses it."""
        return self.encode(self.text(messages))

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of a conversation up to where the model's answer begins. Raises as a call does, also for
        what messages have that the template does not write."""
        for number, message in enumerate(messages):
            for name in message.keys() - {"role", "content"}:
                if message[name] and name not in self.template.source:
                    raise ValueError(f"messages[{number}].{name[:100]} is not written by the model's chat template")
        with self._lock:
            text = self._renderer.prompt(messages)
            for number, message in enumerate(messages):
                content = message.get("content")
                if message["role"] == ANSWERS or not isinstance(content, str) or content.strip() in text:
                    continue
                others = [*messages[:number], {**message, "content": f"{content}\ufdd0"}, *messages[number + 1 :]]
                if self._renderer.prompt(others) == text:
                    role = f"which passes over messages of the role {message['role'][:100]!r} there"
                    raise ValueError(f"messages[{number}].content is not written by the model's chat template, {role}")
            return text

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of such a text, in which special tokens are themselves. Raises DataError as the
        tokenizer."""
        [(ids, _)] = self.tokenizer.encode_marked([[(text, False)]])
        return ids.tolist()

    @property
    def end(self) -> str:
        """The text that ends an answer, "<|im_end|>" for example; empty if the template writes none."""
        with self._lock:
            if self._end is None:
                self._end = self._renderer.answer_end()
            return self._end


NAMED_TEMPLATES, FOR_TOOLS = "additional_chat_templates", "tool_use"
"""The folder beside a tokenizer.json with templates by name, and the name of the one for tools."""
DATE_KEY = "template_date"
"""The field of a tokenizer_config.json that holds the day of its template, where shards or a run have one."""
MOST_TEMPLATE = 1 << 20
"""Most bytes of a template. The longest published one has about 20 kB."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""The special tokens that a template may write, by the names that it knows them by."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, with the special tokens that it may write."""

    source: str
    """Jinja."""
    variables: Mapping[str, str]
    origin: str
    """Where it comes from, for messages."""
    trusted: bool = False
    """True for this project's own, which need no process of their own."""
    date: str = TEMPLATE_DATE
    """The day that `strftime_now` writes, as ISO 8601 has it."""
    for_tools: bool = False
    """Whether another template stands beside it that transformers takes for conversations with tools."""

    @property
    def writes_date(self) -> bool:
        """Whether the template asks for the day."""
        return "strftime_now" in self.source

    def begins_with(self, first: str) -> bool:
        """Returns whether the template writes `first`, the text of the tokens that a tokenizer puts before texts."""
        return "bos_token" in self.source or first in self.source

    @property
    def fingerprint(self) -> str:
        """sha256 (hex): equal fingerprints make the same texts."""
        dated = [self.date] if self.writes_date else []
        return hashlib.sha256(json.dumps([self.source, dict(self.variables), *dated]).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes the files that stand beside a tokenizer.json."""
        write_atomic(folder / JINJA_FILE, self.source.encode())
        config = dict(self.variables) | ({DATE_KEY: self.date} if self.writes_date else {})
        write_atomic(folder / TOKENIZER_CONFIG, (json.dumps(config, ensure_ascii=False) + "\n").encode())


def find_template(data: Data) -> ChatTemplate:
    """Returns the template of a job's data, with its day. Raises DataError if there is none, or if a file is not one;
    JobError for a day that is none, or that the template does not write."""
    found = _template_of(data)
    if not data.template_date:
        return found
    if not found.writes_date:
        raise JobError(f"data.template_date has no effect: {found.origin} calls no strftime_now")
    try:
        datetime.fromisoformat(data.template_date)
    except ValueError:
        raise JobError(f"data.template_date is {data.template_date!r}, not a day such as {TEMPLATE_DATE}") from None
    return replace(found, date=data.template_date)


def _template_of(data: Data) -> ChatTemplate:
    variables = _special_tokens(data)
    if data.template in BUILT_IN:
        source = BUILT_IN[data.template].jinja
        if data.tokenizer not in TOKENIZERS and (first := _first(Path(data.tokenizer).expanduser())):
            variables = {**variables, "bos_token": first}
            source = source if "bos_token" in source else "{{ bos_token }}" + source
        return ChatTemplate(source, variables, f"template {data.template}", trusted=True)
    if data.template != OWN_TEMPLATE:
        path = Path(data.template).expanduser()
        folder = _folder(data)
        date = TEMPLATE_DATE if data.tokenizer in TOKENIZERS else _date(_config(folder), folder)
        return ChatTemplate(_read(path), variables, str(path), date=date)
    if data.tokenizer not in TOKENIZERS and (found := own_template(_folder(data))):
        return found
    raise DataError(
        f"data.template=tokenizer: data.tokenizer={data.tokenizer} comes with no chat template; nearest: "
        f"data.template={', '.join(BUILT_IN)}, or a .jinja file"
    )


def _first(path: Path) -> str:
    """Returns the text of the tokens that a tokenizer puts before texts, `<s>` of Llama's."""
    tokenizer = Tokenizer.load(path)
    return tokenizer.decode(tokenizer.first_ids())


def template_identity(data: Data) -> dict[str, object]:
    """Returns what determines the texts of a data set, besides its rows and its settings."""
    return {"template": find_template(data).fingerprint}


def own_template(folder: Path) -> ChatTemplate | None:
    """Returns the template in the folder of a tokenizer or of a run; None if there is none. Raises DataError if its
    files cannot be read."""
    config, path = _config(folder), folder / JINJA_FILE
    variables, date, source = _named_tokens(config), _date(config, folder), config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
    named = {each.stem: "" for each in (folder / NAMED_TEMPLATES).glob("*.jinja")}
    if os.path.exists(path):
        source = _read(path)
    else:
        path = folder / TOKENIZER_CONFIG
        if isinstance(source, dict):
            named |= source
            source = source.get("default")
        if source is None:
            return None
    if not isinstance(source, str) or len(source) > MOST_TEMPLATE:
        raise DataError(f"{path}: its chat_template is no text of at most {MOST_TEMPLATE:,} characters")
    _require_special(config, folder)
    return ChatTemplate(source, variables, str(path), date=date, for_tools=named.get(FOR_TOOLS, source) != source)


def _require_special(config: Mapping[str, Any], folder: Path) -> None:
    """Raises DataError for settings with which transformers reads the special tokens of a template as text."""
    if config.get("split_special_tokens") is True:
        raise DataError(
            f"{folder / TOKENIZER_CONFIG}: split_special_tokens is true: a template's would be text; set it to false"
        )


class Renderer:
    """Renders conversations with one template: in a child process, unless the template is this project's own. There a
    conversation may take `seconds` of processor time. A context manager. Raises JobError without Jinja."""

    def __init__(self, template: ChatTemplate, seconds: float = RENDER_S):
        _require_jinja()
        self.template, self.seconds = template, seconds
        self._child: Worker | None = None
        self._renderer: TemplateRenderer | None = None
        self.answers = self.open_answers = 0
        """The answers of all conversations so far, and those of them that no token ends."""

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def parts(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[Part]:
        """Returns the parts of a conversation's text, each with whether it is an answer's. Raises ValueError, saying
        why, if the template refuses it, fails or does not end."""
        if self.template.trusted:
            parts = self._here().parts(messages, tools)
        else:
            parts = [(text, answer) for text, answer in self._ask({"messages": messages, "tools": [*tools]})["parts"]]
        self.answers += sum(answer for _, answer in parts)
        self.open_answers += open_answers(parts, messages, self.template.variables.get("eos_token", ""))
        return parts

    @property
    def warning(self) -> str:
        """A warning about answers that no token ends; empty if there are none."""
        if not self.open_answers:
            return ""
        count = "no answer ends" if self.open_answers >= self.answers else f"{self.open_answers:,} answers do not end"
        return (
            f"warning: {self.template.origin}: {count} with a stop token, so the model does not learn to stop: write "
            "one after the answer (inside {% generation %}, if it is there), as {{ message.content + eos_token }}, "
            "in a copy of the template for data.template, or choose data.template=chatml"
        )

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of messages up to where the model's answer begins. Raises ValueError as `parts` does."""
        if self.template.trusted:
            return self._here().text(messages, generation_prompt=True)
        return self._ask({"messages": messages, "prompt": True})["text"]

    def answer_end(self) -> str:
        """Returns the text that ends an answer; empty if the template writes none. Raises ValueError as `parts`."""
        messages = [{"role": "user", "content": _QUESTION}, {"role": ANSWERS, "content": _ANSWER}]
        answers = [text for text, answer in self.parts(messages) if answer]
        return answers[-1].partition(_ANSWER)[2] if answers else ""

    def close(self) -> None:
        """Ends the child process."""
        if self._child is not None:
            self._child.close()
        self._child = None

    def _here(self) -> TemplateRenderer:
        if self._renderer is None:
            self._renderer = TemplateRenderer(self.template.source, self.template.variables, self.template.date)
        return self._renderer

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._child is None:
            template, variables = self.template, dict(self.template.variables)
            setting = {"source": template.source, "variables": variables, "date": template.date}
            self._child = Worker("phalanx.data.template:renderer", json.dumps(setting | {"seconds": self.seconds}))
        try:
            reply = json.loads(self._child.ask(json.dumps(request).encode()))
        except WorkerEndedError as error:
            self.close()
            if error.code == -signal.SIGPROF:
                raise ValueError(f"the template did not end within {self.seconds:g} s of processor time") from None
            if error.code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT):
                raise ValueError(f"the process that renders the template ended with signal {-error.code}") from None
            raise RunError(f"a process that renders chat templates ended with exit code {error.code}") from None
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply


def _require_jinja() -> None:
    """Raises JobError unless Jinja is here, without the holes that its sandbox had before."""
    try:
        found = version("jinja2")
    except PackageNotFoundError:
        found = "none"
    if not re.match(r"3\.1\.([6-9]|\d\d)|3\.([2-9]|\d\d)|[4-9]", found):
        raise JobError(f"chat templates need jinja2 >= 3.1.6, found {found}: pip install 'phalanx[chat]'")


def _folder(data: Data) -> Path:
    path = Path(data.tokenizer).expanduser()
    return path if os.path.isdir(path) else path.parent


def _special_tokens(data: Data) -> Mapping[str, str]:
    """Returns the special tokens of the job's tokenizer. One that names none ends its answers as it ends documents."""
    if data.tokenizer not in TOKENIZERS:
        _require_special(config := _config(folder := _folder(data)), folder)
        found = _named_tokens(config)
        if not found["eos_token"]:
            tokenizer = Tokenizer.load(Path(data.tokenizer).expanduser())
            found["eos_token"] = tokenizer.decode(tokenizer.separator)
        return found
    end = END_OF_TEXT[0] if TOKENIZERS[data.tokenizer].read is None else "\n"
    return dict.fromkeys(SPECIAL_TOKENS, "") | {"eos_token": end}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that a tokenizer_config.json names."""
    return {name: named_token(config, name) for name in SPECIAL_TOKENS}


def _date(config: Mapping[str, Any], folder: Path) -> str:
    date = config.get(DATE_KEY, TEMPLATE_DATE)
    try:
        datetime.fromisoformat(date)
    except (TypeError, ValueError):
        path = folder / TOKENIZER_CONFIG
        raise DataError(f"{path}: {DATE_KEY} is {date!r}, not a day such as {TEMPLATE_DATE}") from None
    return date


def _config(folder: Path) -> dict[str, Any]:
    """Returns the settings of a folder's tokenizer. Older ones name special tokens in special_tokens_map.json, which an
    imported run has in its folder of small files."""
    config = _object(folder / TOKENIZER_CONFIG)
    if "added_tokens_decoder" in config:  # where there are these, transformers does not read the other file
        return config
    named = _object(folder / SPECIAL_MAP) or _object(folder / KEPT / SPECIAL_MAP)
    return {name: named[name] for name in SPECIAL_TOKENS if name in named} | config


def _object(path: Path) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    try:
        config = parse_json(read_bytes(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} holds {kind_of(config)}, not an object")
    return config


def _read(path: Path) -> str:
    try:
        return read_text(path, MOST_TEMPLATE)
    except FileNotFoundError:
        raise NotFoundError(f"data.template={path}: there is no such file{near_file(path)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"the chat template {path} cannot be read: {reason}") from error
