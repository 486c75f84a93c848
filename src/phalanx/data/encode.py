"""Encodes text segments to tokens, in this process or in several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from phalanx.data.corpus import Segment
from phalanx.data.tokenizer import Tokenizer, require_in_vocabulary
from phalanx.data.workers import Workers


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


class Encoder(Workers):
    """Encodes lists of segments in the background: in `processes` children, which load the tokenizer from `folder`, or
    in a thread of this process if that is 0."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, processes: int):
        super().__init__("phalanx.data.encode:encoder", str(folder.absolute()), processes)
        self._tokenizer = tokenizer

    def submit(self, segments: Sequence[Segment]) -> Future[np.ndarray]:
        """Starts encoding; the result is (tokens,). A process that dies makes the future raise RunError."""
        return self.threads.submit(self._encode, segments)

    def _encode(self, segments: Sequence[Segment]) -> np.ndarray:
        if not self.processes:
            return encode_segments(self._tokenizer, segments)
        request = json.dumps([[segment.text, segment.separated] for segment in segments])
        return np.frombuffer(self.ask(request.encode()), dtype="<u4")


def encoder(folder: str) -> Callable[[bytes], bytes]:
    """Returns the work of a child process: it makes little-endian uint32 of [[text, separated], …] in JSON."""
    tokenizer = Tokenizer.load(Path(folder))

    def encode(request: bytes) -> bytes:
        segments = [Segment(text, separated) for text, separated in json.loads(request)]
        return encode_segments(tokenizer, segments).astype("<u4").tobytes()

    return encode
