"""Child processes that work for this one: they answer requests, in the order in which these are submitted.

They are plain `python -c` children, with requests on standard input and answers on standard output. `multiprocessing`
would either fork, which is not safe with the threads of torch and tokenizers, or import the caller's main module again.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import IO, Self

from phalanx import errors
from phalanx.registry import noting_package

CHILD = "import sys; sys.path[:] = sys.argv[2:]; from phalanx.data.workers import serve; serve(sys.argv[1])"
_SIZE_BYTES = 8


def cores(wanted: int) -> int:
    """Returns the number of processes of `data.workers`: `wanted`, or one per core."""
    return wanted or len(os.sched_getaffinity(0))


class Workers:
    """So many child processes. Each answers requests by the function that `work`, "module:function", makes of
    `setting`. A context manager."""

    def __init__(self, work: str, setting: str, processes: int):
        self.processes = [Worker(work, setting) for _ in range(processes)]
        self.threads = ThreadPoolExecutor(max(1, processes))
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for process in self.processes:
            self._idle.put(process)

    def ask(self, request: bytes) -> bytes:
        """Returns the answer of a process that is idle, or will be. Raises the PhalanxError that the function has
        raised, and RunError if the process has died."""
        process = self._idle.get()
        try:
            return process.ask(request)
        finally:
            self._idle.put(process)

    def map(self, requests: Iterable[bytes]) -> Iterator[bytes]:
        """Yields the answers in the order of the requests, which are read no further ahead than keeps all busy."""
        begun = deque[Future[bytes]]()
        for request in requests:
            begun.append(self.threads.submit(self.ask, request))
            if len(begun) > 2 * len(self.processes):
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for process in self.processes:
            process.child.kill()  # nothing is lost: its current work has not been written, and will not be
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.close()


class WorkerEndedError(errors.RunError):
    """A child process has ended."""

    def __init__(self, code: int):
        super().__init__(f"a process that prepares data ended with exit code {code}; run the same command again")
        self.code = code


class Worker:
    """A child process. A message is its size, 8 bytes, and its content; the first one is the setting. An answer begins
    with 0, or with 1 if it is the class and the message of an error. The child ends when its standard input closes."""

    def __init__(self, work: str, setting: str):
        # Without -P a file in the working directory could stand for a module.
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, work, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._send(setting.encode())

    def ask(self, request: bytes) -> bytes:
        """Returns the answer. Raises the PhalanxError that the function has raised, or WorkerEndedError."""
        self._send(request)
        assert self.child.stdout is not None
        answer = _read(self.child.stdout)
        if not answer:
            raise WorkerEndedError(self.child.wait())
        if answer[0]:
            kind, message = json.loads(answer[1:])
            raise getattr(errors, kind)(message)
        return answer[1:]

    def close(self) -> None:
        """Ends the process."""
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a request that the killed child never read
                pipe.close()

    def _send(self, message: bytes) -> None:
        assert self.child.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            _write(self.child.stdin, message)


def _write(stream: IO[bytes], content: bytes) -> None:
    stream.write(len(content).to_bytes(_SIZE_BYTES, "little"))
    stream.write(content)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    """Returns the next message; nothing if the other side has ended."""
    size = int.from_bytes(stream.read(_SIZE_BYTES), "little")
    content = stream.read(size)
    return content if len(content) == size else b""


def serve(work: str) -> None:
    """Answers requests until standard input ends: the main function of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its children
    module, _, name = work.partition(":")
    with noting_package():
        answer: Callable[[bytes], bytes] = getattr(import_module(module), name)(_read(sys.stdin.buffer).decode())
        while request := _read(sys.stdin.buffer):
            try:
                _write(sys.stdout.buffer, b"\0" + answer(request))
            except errors.PhalanxError as error:
                _write(sys.stdout.buffer, b"\1" + json.dumps([type(error).__name__, str(error)]).encode())
