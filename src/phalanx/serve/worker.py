"""Runs the engine in a thread of its own, and brings its texts to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from phalanx.data.tokenizer import Tokenizer
from phalanx.generate.engine import Engine
from phalanx.generate.request import GenerationRequest
from phalanx.generate.sampling import Sampling
from phalanx.generate.text import TextStream

log = logging.getLogger(__name__)


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


class ServedText:
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
        self.index = index
        self._loop, self._queue = asyncio.get_running_loop(), queue
        self._stream = TextStream(tokenizer, prompt, stop)
        self.request = GenerationRequest(
            prompt, sampling, ends=tokenizer.end_ids, on_token=self._on_token, on_end=self._on_end
        )

    @property
    def finish_reason(self) -> str:
        """Why the text ended, in OpenAI's words."""
        return "stop" if self.request.finish == "stop" else "length"

    def _on_token(self, token: int) -> bool:
        self._give(self._stream.push(token))
        return self._stream.stopped

    def _on_end(self) -> None:
        self._give(self._stream.finish())
        self._give(None)

    def _give(self, piece: str | None) -> None:
        if piece == "":
            return
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (self.index, piece))
        except RuntimeError:  # the loop has ended, and nobody reads
            self.request.cancel()
