"""The HTTP application: OpenAI's /v1/models, /v1/completions and /v1/chat/completions, and /health."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import PhalanxError
from phalanx.serve.answers import CHAT, COMPLETION, Answer, Endpoint, EventStream, gone
from phalanx.serve.bodies import ApiError, CompletionBody, read_body, sampling_of
from phalanx.serve.limits import ServeLimits
from phalanx.serve.worker import EngineThread, ServedText

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|\[::1\]|localhost)(:\d+)?", re.IGNORECASE)
BODY_S = 30.0
"""Seconds in which a body must have come."""


class Chat(Protocol):
    """Makes prompts of conversations."""

    @property
    def end(self) -> str:
        """The text that ends an answer; may be empty. Raises ValueError as a call does."""
        ...

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation up to where the answer begins. Raises ValueError if its template
        refuses it."""
        ...


@dataclass
class Service:
    """The state that the endpoints share."""

    name: str
    """The model's name."""
    tokenizer: Tokenizer
    thread: EngineThread
    limits: ServeLimits
    chat: Chat | None = None
    api_key: str = ""
    """Clients must present it; empty: none."""
    loopback: bool = False
    """Whether only this machine reaches it. Without a key, requests must name it by a loopback name then: the page of
    another site could let its own name stand for this machine (DNS rebinding), and read answers."""
    created: int = 0
    texts: int = 0
    """Texts running or waiting."""

    def admit(self, count: int) -> None:
        """Counts the texts of a request. Raises ApiError if there is no room for them."""
        most = self.limits.batch + self.limits.queue
        if count > most:
            raise ApiError(400, f"{count} texts in one request; at most {most} here", param="n")
        if self.texts + count > most:
            raise ApiError(
                429,
                f"{self.texts} texts are running or waiting, at most {most} may: try again later",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
        self.texts += count

    def prompts(self, body: CompletionBody, endpoint: Endpoint) -> tuple[list[list[int]], tuple[str, ...]]:
        """Returns the tokens of each prompt, and the texts that end an answer. Raises ApiError if a prompt is none."""
        if endpoint.is_chat and self.chat is None:
            raise ApiError(
                400,
                "this model has no chat template, so messages cannot become a prompt: use /v1/completions, or serve a "
                "run whose tokenizer has one",
                code="no_chat_template",
            )
        try:
            if endpoint.is_chat and self.chat is not None:
                return [self.chat(body.inputs[0])], (*body.stop, *filter(None, (self.chat.end,)))
            texts = [self.tokenizer.encode(text).tolist() if isinstance(text, str) else text for text in body.inputs]
            return texts, body.stop
        except (PhalanxError, ValueError) as error:
            raise ApiError(400, str(error), param=endpoint.input_field) from error


def application(service: Service) -> Starlette:
    """Returns the application; it starts and stops the service's thread."""
    service.created = int(time.time())

    async def health(request: Request) -> Response:
        if service.thread.broken:
            return JSONResponse({"status": "failed"}, 500)
        return JSONResponse({"status": "ok", "texts": service.texts})

    async def models(request: Request) -> Response:
        _authorise(service, request)
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        _authorise(service, request)
        if request.path_params["name"] != service.name:
            raise ApiError(404, f"only the model {service.name!r} is here", param="model", code="model_not_found")
        return JSONResponse(_model(service))

    async def completions(request: Request) -> Response:
        return await _answer(service, request, COMPLETION)

    async def chat(request: Request) -> Response:
        return await _answer(service, request, CHAT)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.thread.start()
        yield
        await asyncio.to_thread(service.thread.stop)

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _refusal,
        HTTPException: _http_refusal,
        ClientDisconnect: _disconnected,
        Exception: _failure,
    }
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _answer(service: Service, request: Request, endpoint: Endpoint) -> Response:
    _authorise(service, request)
    body = read_body(await _content(request, service.limits.max_body), endpoint.input_field, service.name)
    count = len(body.inputs) * body.n
    service.admit(count)
    texts: list[ServedText] = []
    held = True

    def release() -> None:
        nonlocal held
        for text in texts:
            text.request.cancel()
        service.texts -= count * held
        held = False

    try:
        answer = await _begin(service, body, endpoint, texts)
        if body.stream:
            return EventStream(answer.events(body.usage), service.limits.timeout, release)
        whole = await _while_connected(request, answer.whole(), service.limits.timeout)
    except BaseException:
        release()
        raise
    release()
    return JSONResponse(whole)


async def _begin(service: Service, body: CompletionBody, endpoint: Endpoint, texts: list[ServedText]) -> Answer:
    """Puts the texts of a request in the engine's queue, and appends them to `texts`."""
    # Encoding and templates may take long; other requests go on meanwhile.
    prompts, stop = await asyncio.to_thread(service.prompts, body, endpoint)
    decoder, queue = service.thread.engine.decoder, asyncio.Queue[tuple[int, str | None]]()
    for prompt in prompts:
        sampling = sampling_of(body, prompt, decoder.config.seq_len, decoder.vocab, service.limits)
        for sample in range(body.n):
            numbered = replace(sampling, sample=sample)
            texts.append(ServedText(len(texts), service.tokenizer, prompt, numbered, stop, queue))
    if service.thread.broken:
        raise ApiError(500, "the model has failed; this server is ending", kind="server_error")
    beginnings = [service.tokenizer.decode(prompt) if body.echo else "" for prompt in prompts for _ in range(body.n)]
    service.thread.submit([text.request for text in texts])
    return Answer(endpoint, service.name, texts, beginnings, queue, sum(map(len, prompts)))


async def _while_connected(request: Request, work: Any, timeout: float) -> Any:
    """Returns the result of `work`. Raises ApiError if it takes too long, and ClientDisconnect if nobody waits."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone(request.receive))
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] in done:
            return tasks[0].result()
        if tasks[1] in done:
            raise ClientDisconnect
        raise ApiError(504, f"not done after {timeout:g} s", kind="timeout_error", code="timeout")
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError, ClientDisconnect):
                await task


async def _content(request: Request, most: int) -> bytes:
    """Returns a request's body. Raises ApiError if it is too large, too slow or not JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # A web page of another site can send other types without being asked, also to loopback.
        raise ApiError(415, "the body must have the content type application/json")
    too_large = ApiError(413, f"the body has more than {most:,} bytes", code="request_too_large")
    if request.headers.get("content-length", "0").isdigit() and int(request.headers.get("content-length", "0")) > most:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body has not come within {BODY_S:g} s") from None
    return bytes(content)


def _authorise(service: Service, request: Request) -> None:
    if not service.api_key:
        host = request.headers.get("host", "")
        if service.loopback and not _LOOPBACK_HOST.fullmatch(host):
            raise ApiError(403, f"the Host {host[:100]!r} is not this machine's loopback, and no API key is set")
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), service.api_key.encode()):
        raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "phalanx"}


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers)


async def _http_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = ApiError(error.status_code, f"{request.method[:20]} {request.url.path[:100]}: {error.detail}")
    return JSONResponse(refusal.body(), error.status_code, dict(error.headers or {}))


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _failure(request: Request, error: Exception) -> Response:
    log.error("%s %s failed: %s", request.method, request.url.path, error, exc_info=error)
    return JSONResponse(ApiError(500, "the server failed; its log says why", kind="server_error").body(), 500)
