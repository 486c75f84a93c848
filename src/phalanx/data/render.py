"""Renders chat templates in Jinja's sandbox, and marks the text of the answers.

A tokenizer's template is a program that somebody else wrote. Jinja's sandbox keeps it from anything but its messages;
limits of size and time keep it from filling memory or never ending. Those cannot be set on a thread, so a template that
came with a tokenizer is rendered in a child process (data/template.py), whose main function is `serve`.
"""

from __future__ import annotations

import json
import re
import resource
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.nodes import CallBlock
    from jinja2.parser import Parser

Part = tuple[str, bool]
"""A part of a conversation's text, and whether it is an answer's."""

MOST_OUTPUT = 1 << 26
"""Most characters of a conversation's text."""
MOST_REPEATED = 1 << 20
"""Most elements that a template's product of a text or a list with a number may have."""
MOST_EXPONENT = 64
FIXED_DAY = datetime(2024, 7, 26)
"""The day that strftime_now writes: that of Llama 3.2's template, which has it where no date is given."""
RENDER_S = 5.0
"""Most seconds of processor time of a child for one conversation."""
CHILD_BYTES = 1 << 30
"""Most bytes of address space of a child."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class TemplateRenderer:
    """A compiled chat template. Raises ValueError, saying what Jinja says, if it is none."""

    def __init__(self, source: str, variables: Mapping[str, str]):
        self.variables = dict(variables)
        self.marks_answers = GENERATION.search(source) is not None
        self._between = ("", "")
        """The texts that stand around answers while they are being marked."""
        self._template = _failing_as_value_error(lambda: _environment(self).from_string(source))

    def text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), *, generation_prompt: bool = False
    ) -> str:
        """Returns the text of messages, with `generation_prompt` up to where the model's answer begins.

        Raises ValueError, saying what the template says, if it refuses the messages, fails, or writes too much."""
        return _failing_as_value_error(lambda: self._render(messages, tools, generation_prompt))

    def parts(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[Part]:
        """Returns the text of a conversation in parts, each an answer's or not: joined they are `text`.

        A template marks answers with `{% generation %}`. That of a template without it is what comes between the
        beginning of the conversation before the message, with the generation prompt, and that after it. Where these do
        not begin the whole text (templates that drop earlier thoughts), an answer is what the template writes from its
        content on to where the next message begins. Raises ValueError as `text` does, and where none of this tells."""
        whole = self.text(messages, tools)
        if self.marks_answers:
            parts = self._marked(messages, tools)
        else:
            parts = self._between_prefixes(messages, tools, whole) or self._by_contents(messages, tools, whole)
        if "".join(text for text, _ in parts) != whole:
            raise ValueError("the template writes another text when the answers in it are marked")
        return [part for part in parts if part[0]]

    def mark(self, caller: Callable[[], str]) -> str:
        """Returns the text of a `generation` block."""
        before, after = self._between
        return f"{before}{caller()}{after}"

    def _marked(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[Part]:
        # Nobody who writes messages can know these texts. Noncharacters and digits pass filters such as upper and trim.
        secret = secrets.randbits(64)
        self._between = begin, end = f"\ufdd0{secret}\ufdd1", f"\ufdd2{secret}\ufdd3"
        try:
            text = self.text(messages, tools)
        finally:
            self._between = ("", "")
        parts, depth = [], 0
        for piece in re.split(f"({begin}|{end})", text):
            if piece in (begin, end):
                depth += 1 if piece == begin else -1
            else:
                parts.append((piece, depth > 0))
        return parts

    def _between_prefixes(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], whole: str
    ) -> list[Part] | None:
        parts, done = [], 0
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                before = self.text(messages[:n], tools, generation_prompt=True)
                after = self.text(messages[: n + 1], tools)
            except ValueError:  # some templates refuse a part of a conversation, such as one without a question
                return None
            if not (whole.startswith(after) and after.startswith(before) and done <= len(before)):
                return None
            parts += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
            done = len(after)
        return [*parts, (whole[done:], False)]

    def _by_contents(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], whole: str) -> list[Part]:
        """Finds answers by rendering the conversation once more, with a mark before and after each answer's content,
        and once with one before and after each other message's: an answer goes from the end of the generation prompt
        (or from its content) to what belongs to the next message."""
        secret = secrets.randbits(64)
        marks = [(f"\ufdd0{secret}n{n}\ufdd1", f"\ufdd2{secret}n{n}\ufdd3") for n in range(len(messages))]
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if any(not isinstance(messages[n].get("content"), str) or not messages[n]["content"] for n in answers):
            raise ValueError(_UNTOLD)
        marked = [
            {**message, "content": f"{marks[n][0]}{message['content']}{marks[n][1]}"} if n in answers else message
            for n, message in enumerate(messages)
        ]
        text = self.text(marked, tools)
        pieces = re.split(f"(\ufdd0{secret}n\\d+\ufdd1|\ufdd2{secret}n\\d+\ufdd3)", text)
        found = pieces[1::2]
        if found != [mark for n in answers for mark in marks[n]] or "".join(pieces[0::2]) != whole:
            raise ValueError(_UNTOLD)
        prompt = self._prompt()
        parts: list[Part] = []
        plain = pieces[0::2]  # between, answer, between, answer, ..., between
        for k in range(0, len(plain) - 1, 2):
            before, answer, after = plain[k], plain[k + 1], plain[k + 2]
            at = before.rfind(prompt) + len(prompt) if prompt and prompt in before else len(before)
            stop = _stop_of(after)
            parts += [(before[:at], False), (before[at:] + answer + after[:stop], True)]
            plain[k + 2] = after[stop:]
        return [*parts, (plain[-1], False)]

    def _prompt(self) -> str:
        """Returns what the template writes where an answer is to begin, or nothing if it cannot be told."""
        question = [{"role": "user", "content": "?"}]
        try:
            with_prompt, without = self.text(question, generation_prompt=True), self.text(question)
        except ValueError:
            return ""
        return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], generation_prompt: bool) -> str:
        pieces, size = [], 0
        values = {**self.variables, "messages": messages, "add_generation_prompt": generation_prompt}
        values |= {"tools": [*tools] or None, "documents": None}
        for piece in self._template.generate(values):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_OUTPUT:
                raise ValueError(f"the template writes more than {MOST_OUTPUT:,} characters")
        return "".join(pieces)


_UNTOLD = (
    "the template's text of the first messages does not begin its text of all, and marks around the answers change it, "
    "so the answers cannot be told: use a template that marks them with {% generation %}, or a built-in one"
)
_STOP = re.compile(r"\s*(<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\]|<[｜|][^<>]{1,40}[｜|]>)")


def _stop_of(after: str) -> int:
    """Returns the length of what ends an answer, in the text after its content: its first token in brackets, as
    <|im_end|> and </s> are, with the line break behind it."""
    match = _STOP.match(after)
    if match is None:
        return 0
    return match.end() + after[match.end() :].startswith("\n")


def serve() -> None:
    """Renders conversations until standard input ends: the main function of a child process.

    The first line is the template, {"source": ..., "variables": ..., "seconds": ...}. Each further one is a request,
    {"messages": ...}, or with "prompt" true for the text that an answer follows; each reply {"parts": ...},
    {"text": ...} or {"error": ...}. A conversation that takes longer than those seconds ends the process with
    SIGPROF."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its children
    renderer, problem = None, ""
    first = json.loads(sys.stdin.buffer.readline())
    _confine()
    try:
        renderer = _within(first["seconds"], partial(TemplateRenderer, first["source"], first["variables"]))
    except ValueError as error:
        problem = str(error)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            if renderer is None:
                raise ValueError(problem)
            reply = _within(first["seconds"], partial(_reply, renderer, request))
        except ValueError as error:
            reply = {"error": str(error)}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


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

    TemplateRenderer("{% generation %}{{ '\\n' }}{% endgeneration %}", {}).parts([])
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

    def strftime_now(form: str) -> str:
        """The date of transformers' function of this name is that of the call; here it is one day, so that the same
        rows make the same text on any day."""
        return FIXED_DAY.strftime(str(form)[:200])

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {"raise_exception": refuse, "namespace": SafeNamespace, "dict": make_dict}
    sandbox.globals["strftime_now"] = strftime_now
    del sandbox.globals["lipsum"]
    return sandbox


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ValueError(f"a namespace cannot have a name that begins with an underscore, as {name[:40]!r}")
