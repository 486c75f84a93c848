"""Reads the bodies of OpenAI's completions and chat endpoints, and refuses what is wrong or not supported."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from phalanx.bounded import parse_json
from phalanx.generate.sampling import Sampling, prompt_problems
from phalanx.nearest import did_you_mean


@dataclass(frozen=True)
class ServeLimits:
    """The limits of one server."""

    batch: int = 8
    """Texts that are computed together at most."""
    queue: int = 32
    """Texts that wait at most; a request with more gets 429."""
    max_tokens: int = 4096
    """New tokens per text at most."""
    max_prompt: int = 0
    """Prompt tokens at most; 0: what the model's context holds."""
    max_body: int = 1 << 20
    """Bytes of a request at most; a larger one gets 413."""
    timeout: float = 300.0
    """Seconds from a request to its last token at most."""
    grace: float = 30.0
    """Seconds that requests have to end after SIGTERM."""

    def problems(self) -> Iterator[str]:
        """Yields every limit that would let nothing through."""
        for limit in fields(self):
            value = getattr(self, limit.name)
            least = 0 if limit.name in ("queue", "max_prompt", "grace") else 1
            if value < least:
                yield f"{limit.name} {value}: at least {least}"


COMMON = {"model", "temperature", "top_p", "top_k", "n", "stop", "stream", "stream_options", "seed", "max_tokens"}
FIELDS = {"prompt": COMMON | {"prompt", "echo"}, "messages": COMMON | {"messages", "max_completion_tokens"}}
"""The fields of each endpoint, by the one that it needs."""
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that do not change the text."""
NEUTRAL = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "best_of": (1, None),
    "suffix": ("", None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
}
"""Fields that are not supported, with the values that ask for nothing."""
MOST_STOPS, MOST_STOP_CHARACTERS = 4, 200
MOST_MESSAGES = 1000
DEFAULT_TOKENS = 16
"""New tokens of a completion that does not say how many, as OpenAI's. A chat's answer may fill the context."""


class ApiError(Exception):
    """A refusal, as OpenAI's API states it."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str = "", code: str = ""
    ):
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def body(self) -> dict[str, Any]:
        """Returns the body of the answer."""
        error = {"message": self.message, "type": self.kind, "param": self.param or None, "code": self.code or None}
        return {"error": error}


@dataclass(frozen=True)
class CompletionBody:
    """The fields that both endpoints share."""

    inputs: Sequence[Any]
    """Prompts, each a text or tokens; or one conversation, a list of messages."""
    max_tokens: int | None
    options: Mapping[str, Any]
    """Of Sampling: temperature, top_k, top_p and, if given, seed; otherwise it is random."""
    n: int
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    """Whether the last event of a stream states the tokens."""
    echo: bool
    fills_context: bool
    """Whether a text without max_tokens may fill the context."""


def read_body(content: bytes, wants: str, model: str) -> CompletionBody:
    """Returns the body of an endpoint that `wants` a "prompt" or "messages". Raises ApiError for the first thing that
    is wrong with it."""
    try:
        body = parse_json(content)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    known = FIELDS[wants]
    for name, value in body.items():
        if name in NEUTRAL:
            # False is none of the numbers: logprobs=0 asks for the probability of the chosen token.
            if not any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in NEUTRAL[name]):
                raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
        elif name not in known | IGNORED:
            hint = did_you_mean(name, sorted(known))
            raise ApiError(400, f"unknown field {name[:100]!r}{hint}", param=name[:100], code="unknown_parameter")
    if body.get("model", model) != model:
        message = f"no model {str(body['model'])[:100]!r} here, only {model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    inputs = _prompts(body.get("prompt")) if wants == "prompt" else [_messages(body.get("messages"))]
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    if limit != "max_tokens" and body.get("max_tokens") not in (None, body[limit]):
        raise ApiError(400, f"max_tokens and {limit} differ: give one of them", param=limit)
    stop = body.get("stop") or []
    options = {
        "temperature": _number(body, "temperature", 1.0, 0, 100),
        "top_p": _number(body, "top_p", 1.0, 0, 1),
        "top_k": _whole(body, "top_k", 0, 0, 1 << 30),
    }
    if body.get("seed") is not None:
        options["seed"] = _whole(body, "seed", 0, -(1 << 63), (1 << 63) - 1)
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise ApiError(400, "stream_options must be an object", param="stream_options")
    if stream_options and not body.get("stream"):
        raise ApiError(400, "stream_options are for stream: true", param="stream_options")
    for name in stream_options.keys() - {"include_usage"}:
        if stream_options[name]:
            raise ApiError(400, f"stream_options.{name[:100]} is not supported by this server", param="stream_options")
    return CompletionBody(
        inputs,
        _whole(body, limit, 0, 0, 1 << 30) if body.get(limit) is not None else None,
        options,
        _whole(body, "n", 1, 1, 128),
        _stops([stop] if isinstance(stop, str) else stop),
        _flag(body, "stream"),
        _flag(stream_options, "include_usage"),
        _flag(body, "echo"),
        wants == "messages",
    )


def sampling_of(body: CompletionBody, prompt: Sequence[int], seq_len: int, vocab: int, limits: ServeLimits) -> Sampling:
    """Returns how a prompt of a request is continued. Raises ApiError if it is longer than the model's context or the
    limits allow, or if an option makes no sense."""
    if problems := list(prompt_problems(prompt, vocab)):
        raise ApiError(400, problems[0], param="prompt")
    longest = limits.max_prompt or seq_len
    if len(prompt) > min(longest, seq_len):
        raise ApiError(
            400,
            f"the prompt has {len(prompt):,} tokens; at most {min(longest, seq_len):,} are taken here",
            param="prompt",
            code="context_length_exceeded",
        )
    room = min(seq_len - len(prompt), limits.max_tokens)
    wanted = body.max_tokens
    if wanted is None:
        wanted = room if body.fills_context else min(room, DEFAULT_TOKENS)
    if wanted > limits.max_tokens:
        raise ApiError(400, f"max_tokens {wanted:,}: at most {limits.max_tokens:,} here", param="max_tokens")
    if wanted > room:
        raise ApiError(
            400,
            f"prompt {len(prompt):,} + max_tokens {wanted:,} = {len(prompt) + wanted:,} tokens exceed the model's "
            f"context of {seq_len:,}; at most {room:,} new tokens fit",
            param="max_tokens",
            code="context_length_exceeded",
        )
    sampling = Sampling(wanted, **{"seed": secrets.randbits(63), **body.options})
    if problems := list(sampling.problems()):
        raise ApiError(400, "; ".join(problems))
    return sampling


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(_is_token(each) for each in prompt)):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(each, str) for each in prompt):
            return prompt
        if all(isinstance(each, list) and each and all(map(_is_token, each)) for each in prompt):
            return prompt
    raise ApiError(400, "prompt must be a text, a list of texts, of tokens, or of lists of tokens", param="prompt")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= MOST_MESSAGES:
        raise ApiError(400, f"messages must be a list of 1 to {MOST_MESSAGES} messages", param="messages")
    found = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"{where} must be an object with a role and a content", param=where)
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise ApiError(400, f"{where}.content must be a text or a list of parts", param=where)
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ApiError(400, f"{where}.content: only parts of type text are supported", param=where)
            if more := sorted(name for name in part.keys() - {"type", "text"} if part[name] is not None):
                raise ApiError(400, f"{where}.content: {more[0][:100]} of a part is not supported", param=where)
        found.append({**message, "content": "".join(part["text"] for part in parts)})
    return found


def _stops(stop: Any) -> tuple[str, ...]:
    texts = isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)
    if not texts or len(stop) > MOST_STOPS or any(len(text) > MOST_STOP_CHARACTERS for text in stop):
        limit = f"at most {MOST_STOPS} of at most {MOST_STOP_CHARACTERS} characters"
        raise ApiError(400, f"stop must be a text or a list of texts, {limit}", param="stop")
    return tuple(stop)


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = default if body.get(name) is None else body[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ApiError(400, f"{name} must be a number from {least:g} to {most:g}", param=name)
    return float(value)


def _whole(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = default if body.get(name) is None else body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ApiError(400, f"{name} must be a whole number from {least:,} to {most:,}", param=name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name) or False
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false", param=name)
    return value
