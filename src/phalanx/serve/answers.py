"""The answers of OpenAI's endpoints: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.serve.bodies import ApiError
from phalanx.serve.worker import ServedText


@dataclass(frozen=True)
class Endpoint:
    """How an endpoint names what it takes and returns."""

    input_field: str
    """The field of the body with its input: "prompt" or "messages"."""
    id_prefix: str
    object: str
    """The type of a whole answer."""
    chunk_object: str
    """The type of a chunk of a stream."""

    @property
    def is_chat(self) -> bool:
        """Whether it takes messages, and answers with one."""
        return self.input_field == "messages"

    def text(self, text: str) -> dict[str, Any]:
        """Returns the part of a choice with its text."""
        return {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}

    def piece(self, text: str, first: bool) -> dict[str, Any]:
        """Returns the part of a choice with a piece of text, the first one or a later one."""
        if not self.is_chat:
            return {"text": text}
        return {"delta": ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})}


COMPLETION = Endpoint("prompt", "cmpl", "text_completion", "text_completion")
CHAT = Endpoint("messages", "chatcmpl", "chat.completion", "chat.completion.chunk")


@dataclass
class Answer:
    """The texts of one request, whose pieces come through a queue."""

    endpoint: Endpoint
    model: str
    texts: Sequence[ServedText]
    beginnings: Sequence[str]
    """The beginning of each text: the prompt, where it is to be echoed."""
    queue: asyncio.Queue[tuple[int, str | None]]
    prompt_tokens: int
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """Returns the whole answer. Raises ApiError if the model failed."""
        pieces = [[beginning] for beginning in self.beginnings]
        async for index, piece in self._pieces():
            pieces[index].append(piece or "")
        choices = [
            self._choice(text.index, self.endpoint.text("".join(pieces[text.index])), text.finish_reason)
            for text in self.texts
        ]
        return self._object(self.endpoint.object, choices) | {"usage": self._usage()}

    async def events(self, usage: bool) -> AsyncIterator[str]:
        """Yields the events of a stream: a chunk per piece, one with the reason of the end per text, and [DONE]."""
        for text, beginning in zip(self.texts, self.beginnings, strict=True):
            if beginning or self.endpoint.is_chat:
                yield self._event(self._choice(text.index, self.endpoint.piece(beginning, first=True)))
        async for index, piece in self._pieces():
            reason = self.texts[index].finish_reason if piece is None else None
            yield self._event(self._choice(index, self.endpoint.piece(piece or "", first=False), reason))
        if usage:
            yield _event(self._object(self.endpoint.chunk_object, []) | {"usage": self._usage()})
        yield "data: [DONE]\n\n"

    async def _pieces(self) -> AsyncIterator[tuple[int, str | None]]:
        """Yields pieces until all texts have ended. Raises ApiError if the model failed, or the server is ending."""
        left = len(self.texts)
        while left:
            index, piece = await self.queue.get()
            finish = self.texts[index].request.finish
            if piece is None and finish in ("failed", "cancelled"):
                said = "the model failed" if finish == "failed" else "the server is ending"
                raise ApiError(500 if finish == "failed" else 503, said, kind="server_error")
            left -= piece is None
            yield index, piece

    def _event(self, choice: dict[str, Any]) -> str:
        return _event(self._object(self.endpoint.chunk_object, [choice]))

    def _choice(self, index: int, text: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": index, **text, "logprobs": None, "finish_reason": reason}

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.endpoint.id_prefix}-{self.id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        new = sum(len(text.request.new_tokens) for text in self.texts)
        total = self.prompt_tokens + new
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": new, "total_tokens": total}


class EventStream(Response):
    """Server-sent events. It ends when the client leaves, after `timeout` seconds, and with an error event if there is
    one; `release` is called in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], timeout: float, release: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._timeout, self._release = events, timeout, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._release()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._timeout):
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        except (TimeoutError, ApiError) as error:
            late = ApiError(504, f"not done after {self._timeout:g} s", kind="timeout_error", code="timeout")
            event = _event((error if isinstance(error, ApiError) else late).body())
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Returns when the client has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
