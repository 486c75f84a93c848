"""The messages of conversations as templates see them, and the answers in the text that a template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
