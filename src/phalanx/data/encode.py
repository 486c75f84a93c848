"""Encodes text segments to tokens, in this process or in several.

The processes are plain `python -c` children that read text on standard input and write tokens to standard output.
`multiprocessing` would either fork, which is not safe with the threads of torch and tokenizers, or import the caller's
main module again.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from phalanx.data.corpus import Segment
from phalanx.data.tokenizer import Tokenizer, require_in_vocabulary
from phalanx.errors import RunError
from phalanx.registry import noting_package

CHILD = "import sys; sys.path[:] = sys.argv[2:]; from phalanx.data.encode import serve; serve(sys.argv[1])"


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> np.ndarray:
    """Returns the tokens of consecutive segments, with their separators: (tokens,) int64."""
    separator = np.array(tokenizer.separator, dtype=np.int64)
    parts = [np.empty(0, dtype=np.int64)]
    for segment in segments:
        if segment.separated:
            parts.append(separator)
        parts.append(tokenizer.encode(segment.text))
    tokens = np.concatenate(parts)
    require_in_vocabulary(tokens, tokenizer.vocab_size, "the tokenizer")
    return tokens


class Encoder:
    """Encodes lists of segments in the background: in `processes` children, which load the tokenizer from `folder`, or
    in a thread of this process if that is 0."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, processes: int):
        self._tokenizer = tokenizer
        self._idle: queue.SimpleQueue[_EncoderProcess] = queue.SimpleQueue()
        self._processes = [_EncoderProcess(folder) for _ in range(processes)]
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(max(1, processes))

    def submit(self, segments: Sequence[Segment]) -> Future[np.ndarray]:
        """Starts encoding; the result is (tokens,). A process that dies makes the future raise RunError."""
        return self._threads.submit(self._encode, segments)

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for process in self._processes:
            process.kill()  # nothing is lost: its current work has not been written, and will not be
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def _encode(self, segments: Sequence[Segment]) -> np.ndarray:
        if not self._processes:
            return encode_segments(self._tokenizer, segments)
        process = self._idle.get()
        try:
            return process.encode(segments)
        finally:
            self._idle.put(process)


class _EncoderProcess:
    """A child process that encodes. Request: a line of JSON, [[text, separated], …]. Reply: a line with the number of
    tokens, then the tokens as little-endian uint32. It exits when its standard input closes."""

    def __init__(self, folder: Path):
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, str(folder.absolute()), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )

    def encode(self, segments: Sequence[Segment]) -> np.ndarray:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        request = json.dumps([[segment.text, segment.separated] for segment in segments])
        try:
            stdin.write(request.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            header = b""
        else:
            header = stdout.readline()
        content = stdout.read(4 * int(header)) if header else b""
        if not header or len(content) < 4 * int(header):
            raise RunError(
                f"a tokenizing process ended with exit code {self._child.wait()}; run the same command again"
            )
        return np.frombuffer(content, dtype="<u4")

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a request that the killed child never read
                pipe.close()


def serve(folder: str) -> None:
    """Answers requests until standard input ends: the main function of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its children
    with noting_package():
        tokenizer = Tokenizer.load(Path(folder))
        for line in sys.stdin.buffer:
            tokens = encode_segments(tokenizer, [Segment(text, separated) for text, separated in json.loads(line)])
            sys.stdout.buffer.write(b"%d\n" % tokens.size + tokens.astype("<u4").tobytes())
            sys.stdout.buffer.flush()
