"""Encoding in child processes gives what encoding here gives; a child that dies is reported; none is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from phalanx.data.corpus import Segment
from phalanx.data.encode import Encoder, encode_segments
from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from phalanx.errors import RunError

GROUPS = [[Segment("ab\n", False), Segment("é", True)], [Segment("b", False)], [], [Segment("", True)]]


def pids(encoder: Encoder) -> list[int]:
    return [process._child.pid for process in encoder._processes]


def test_separators_go_between_documents() -> None:
    assert encode_segments(ByteTokenizer(), GROUPS[0]).tolist() == [97, 98, 10, 10, 0xC3, 0xA9]
    assert encode_segments(CharTokenizer("abé", unknown=True), GROUPS[0]).tolist() == [
        0,
        1,
        3,
        2,
    ]  # no "\n", no separator
    assert encode_segments(ByteTokenizer(), []).shape == (0,)


@pytest.mark.parametrize("processes", [0, 2])
def test_encoder(processes: int, tmp_path: Path) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    tokenizer.save(tmp_path)
    with Encoder(tokenizer, tmp_path, processes) as encoder:
        started = pids(encoder)
        results = [encoder.submit(group) for group in GROUPS]
        for group, result in zip(GROUPS, results, strict=True):
            assert np.array_equal(result.result(30), encode_segments(tokenizer, group))
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_child_that_dies_is_reported(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    with Encoder(ByteTokenizer(), tmp_path, 1) as encoder:
        encoder.submit(GROUPS[0]).result(30)
        os.kill(pids(encoder)[0], signal.SIGKILL)
        with pytest.raises(RunError, match="a tokenizing process ended with exit code -9; run the same command again"):
            encoder.submit([Segment("x" * 1_000_000, False)]).result(30)
