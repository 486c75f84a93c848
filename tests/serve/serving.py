"""A small server of this process, and a client of it. Without httpx or uvicorn the tests that import it are skipped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from model.kinds import KINDS, build
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.generate.decoder import Decoder
from phalanx.generate.engine import Engine
from phalanx.serve.bodies import ServeLimits

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from phalanx.serve import app as servers  # noqa: E402 (without uvicorn these tests are skipped)
from phalanx.serve.app import (  # noqa: E402
    Chat,
    EngineThread,
    Service,
)

MODEL = replace(KINDS["llama"], vocab_size=256, seq_len=64)
LIMITS = ServeLimits(batch=4, queue=2, max_tokens=50, max_body=5000, grace=5)


class SlowDecoder(Decoder):
    """A decoder that can be slowed down, or made to fail."""

    pause = 0.0
    fails = False

    def step(self, batch: str, tokens: Any) -> Any:
        time.sleep(self.pause)
        if self.fails:
            raise MemoryError("no memory is left")
        return super().step(batch, tokens)


@dataclass
class Running:
    client: Any
    service: Service
    decoder: SlowDecoder
    server: Any
    codes: list[int]
    thread: threading.Thread


class PlainChat:
    """A template that writes each role before its words."""

    end = "\nuser:"

    def __call__(self, messages: Any) -> list[int]:
        if messages[0]["role"] == "tool":
            raise ValueError("the template takes no tools")
        return list("".join(f"{m['role']}: {m['content']}\n" for m in messages).encode()) + list(b"assistant: ")


CHAT = PlainChat()


@contextmanager
def running(limits: ServeLimits = LIMITS, chat: Chat | None = CHAT, key: str = "") -> Iterator[Running]:
    decoder = SlowDecoder.whole(build(MODEL))
    assert isinstance(decoder, SlowDecoder)
    engine = Engine(decoder, max_batch=limits.batch)
    service = Service("tiny", ByteTokenizer(), EngineThread(engine), limits, chat, key)
    listener, started = servers.listen("127.0.0.1", 0), threading.Event()
    found: list[Any] = []
    codes: list[int] = []

    def ready(server: Any) -> None:
        found.append(server)
        started.set()

    thread = threading.Thread(target=lambda: codes.append(servers.serve(service, listener, ready)))
    thread.start()
    started.wait(30)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    port = listener.getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
        try:
            yield Running(client, service, decoder, found[0], codes, thread)
        finally:
            found[0].should_exit = True
            thread.join(30)
    assert not thread.is_alive()
