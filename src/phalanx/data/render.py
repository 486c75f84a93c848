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

from phalanx.data.answers import Part, core, replaced, require_written, texts_of, untrained_removed, with_thoughts

if TYPE_CHECKING:
    from jinja2.nodes import CallBlock
    from jinja2.parser import Parser

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


def serve() -> None:
    """Renders conversations until standard input ends: the main function of a child process.

    The first line is the template, {"source": ..., "variables": ..., "date": ..., "seconds": ...}. Each further one is
    a request, {"messages": ...}, or with "prompt" true for the text that an answer follows; each reply {"parts": ...},
    {"text": ...} or {"error": ...}. A conversation that takes longer than those seconds ends the process with
    SIGPROF."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its children
    renderer, problem = None, ""
    first = json.loads(sys.stdin.buffer.readline())
    _confine()
    try:
        renderer = _within(
            first["seconds"], partial(TemplateRenderer, first["source"], first["variables"], first["date"])
        )
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
    sandbox.globals |= {
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
