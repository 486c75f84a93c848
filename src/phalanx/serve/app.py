"""The HTTP application: OpenAI's /v1/models, /v1/completions and /v1/chat/completions, and /health."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.data.tokenizer import Tokenizer
from phalanx.echo import echo
from phalanx.errors import PhalanxError, RunError
from phalanx.generate.engine import Engine, GenerationRequest, TextRequest
from phalanx.generate.sampling import Sampling
from phalanx.serve.bodies import ApiError, CompletionBody, ServeLimits, read_body, sampling_of


# The answers of OpenAI's endpoints: whole, or as a stream of server-sent events.
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
            finish = self.texts[index].finish
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
        new = sum(len(text.new_tokens) for text in self.texts)
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
            texts = [self.tokenizer.prompt(text) if isinstance(text, str) else text for text in body.inputs]
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
            text.cancel()
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
    beginnings = [service.tokenizer.shown(prompt) if body.echo else "" for prompt in prompts for _ in range(body.n)]
    service.thread.submit(texts)
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


class EngineThread:
    """A thread that runs an engine. Calls `failed` from there if the engine does, after all its requests have ended;
    nothing runs after that."""

    def __init__(self, engine: Engine, failed: Callable[[], None] = lambda: None):
        self.engine, self.broken = engine, False
        self._failed = failed
        self._work, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Puts requests in the engine's queue."""
        for request in requests:
            self.engine.submit(request)
            if self.broken:
                request.end("failed")
        self._work.set()

    def stop(self) -> None:
        """Ends all requests, and the thread after its current step."""
        self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._work.clear()
                if self.engine.step():
                    continue
                self._work.wait()
            self.engine.abort()
        except BaseException:  # whoever waits for a text must hear of it
            log.exception("the engine failed")
            self.broken = True
            self.engine.abort("failed")
            self._failed()


class ServedText(TextRequest):
    """One text of a request, whose pieces go to a queue of the event loop as (`index`, piece); the last is None."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: Sampling,
        stop: Sequence[str],
        queue: asyncio.Queue[tuple[int, str | None]],
    ):
        self.index, loop = index, asyncio.get_running_loop()

        def give(piece: str | None) -> None:
            if piece == "":
                return
            try:
                loop.call_soon_threadsafe(queue.put_nowait, (index, piece))
            except RuntimeError:  # the loop has ended, and nobody reads
                self.cancel()

        super().__init__(tokenizer, prompt, sampling, stop, give=give, on_end=partial(give, None))

    @property
    def finish_reason(self) -> str:
        """Why the text ended, in OpenAI's words."""
        return "stop" if self.finish == "stop" else "length"


MOST_CONNECTIONS = 256
IDLE_S = 30.0
"""Seconds after which a connection without a whole request head is closed."""


class TimedProtocol(H11Protocol):
    """HTTP/1.1 on a connection that must bring requests. uvicorn waits for ever for the rest of a request's head, so
    that clients which send nothing could take all connections."""

    def connection_made(self, transport: Any) -> None:
        """Begins to watch a new connection."""
        super().connection_made(transport)
        self.loop.call_later(IDLE_S, self._close_if_idle, None)

    def _close_if_idle(self, idle_since: Any) -> None:
        """Closes the connection if no request came after `idle_since`, the request that had been answered last; the
        connection itself stands for none."""
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self.cycle is idle_since:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(IDLE_S, self._close_if_idle, self.cycle if answered else self)


class SignalledServer(uvicorn.Server):
    """A server whose signals are handled by `serve`: uvicorn would end the process with the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises RunError if the address is taken or is none of this machine's."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise RunError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def serve(service: Service, listener: socket.socket, ready: Callable[[SignalledServer], None] = lambda _: None) -> int:
    """Serves until SIGTERM or SIGINT, after which running requests have `limits.grace` seconds to end, or until the
    engine fails. Returns the exit code: 0, or 1 if the engine failed. Called outside the main thread, it leaves the
    signals alone; `ready` gets the server, whose `should_exit` ends it."""
    config = uvicorn.Config(
        application(service),
        http=TimedProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(service.limits.grace),
    )
    server = SignalledServer(config)

    def stop(*_: object) -> None:
        server.should_exit = True

    service.thread = EngineThread(service.thread.engine, failed=stop)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if server.should_exit:
            server.force_exit = True
        else:
            name = signal.Signals(number).name
            echo(f"phalanx: {name}: ending; {service.texts} texts have {service.limits.grace:g} s", file=sys.stderr)
        stop()

    previous = _handle(on_signal)
    try:
        ready(server)
        server.run([listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 1 if service.thread.broken else 0


def _handle(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, signal._HANDLER]:
    """Sets the handlers of SIGTERM and SIGINT; returns those before. Only the main thread may."""
    try:
        return {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:
        return {}
