"""Corpus megatron: indexed data sets are prepared as they are, and what is damaged is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from phalanx.config.data import Data
from phalanx.data.inspect import inspected
from phalanx.data.loader import TokenData
from phalanx.data.megatron import is_megatron, open_megatron
from phalanx.data.prepare import prepare
from phalanx.errors import DataError, JobError


def write(folder: Path, *, version: int = 1, code: int = 8, dtype: str = "<u2", tokens: int = 7) -> Path:
    ids = np.arange(tokens, dtype=dtype)
    (folder / "set.bin").write_bytes(ids.tobytes())
    lengths = np.array([3, tokens - 3], "<i4")
    parts = [lengths, np.array([0, 3 * ids.itemsize], "<i8"), np.array([0, 1, 2], "<i8")]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, 2, 3)
    (folder / "set.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    return folder / "set"


@pytest.mark.parametrize(("version", "code", "dtype"), [(1, 8, "<u2"), (2, 4, "<i4"), (1, 5, "<i8"), (1, 1, "u1")])
@pytest.mark.parametrize("name", ["set", "set.bin", "set.idx"])
def test_reads_tokens_and_index(tmp_path: Path, version: int, code: int, dtype: str, name: str):
    write(tmp_path, version=version, code=code, dtype=dtype)
    assert is_megatron(tmp_path / name)
    found = open_megatron(tmp_path / name)
    assert isinstance(found.tokens, np.memmap)
    assert found.tokens.tolist() == list(range(7))
    assert (found.sequences, found.documents) == (2, 2)


def test_its_tokens_become_shards_of_two_splits(tmp_path: Path):
    path = write(tmp_path, tokens=200)
    data = Data(corpus="megatron", path=str(path), megatron_vocab=200, val_fraction=0.25, dir=str(tmp_path / "data"))
    folder = prepare(data)
    for split, expected in (("train", range(150)), ("val", range(150, 200))):
        samples = TokenData(folder, split, 7)
        assert samples.read(0, samples.tokens).tolist() == list(expected)
        assert samples.vocab_size == 200
    assert prepare(data) == folder
    with pytest.raises(DataError, match="gave ids from 0 to 149; its vocabulary has 100"):
        prepare(Data(corpus="megatron", path=str(path), megatron_vocab=100, val_fraction=0.25, dir=str(tmp_path / "d")))
    write(tmp_path, tokens=100)
    assert prepare(data) != folder, "other files"


def test_what_is_damaged_is_refused(tmp_path: Path):
    path = write(tmp_path)
    (tmp_path / "set.bin").write_bytes(b"\0" * 12)
    with pytest.raises(DataError, match="expected 14 bytes by its index, found 12"):
        open_megatron(path)
    (tmp_path / "set.idx").write_bytes((tmp_path / "set.idx").read_bytes()[:-1])
    with pytest.raises(DataError, match="for 2 sequences, found"):
        open_megatron(path)
    with pytest.raises(DataError, match="version 3"):
        open_megatron(write(tmp_path, version=3))
    with pytest.raises(DataError, match="dtype code 6"):
        open_megatron(write(tmp_path, code=6))
    (tmp_path / "set.idx").write_bytes(b"PK\3\4")
    with pytest.raises(DataError, match="begins with MMIDIDX"):
        open_megatron(path)
    with pytest.raises(DataError, match=r"cannot read .*other.idx.*expected .*other.bin and .*other.idx"):
        open_megatron(tmp_path / "other")


def test_the_corpus_says_what_it_needs_and_is_named_where_it_is_taken_for_text(tmp_path: Path):
    with pytest.raises(JobError) as caught:
        prepare(Data(corpus="megatron", dir=str(tmp_path)))
    assert "data.path: corpus megatron needs" in str(caught.value)
    assert "data.megatron_vocab: corpus megatron needs" in str(caught.value)
    with pytest.raises(DataError, match="read it with data.corpus=megatron"):
        prepare(Data(corpus="text", path=str(write(tmp_path)) + ".bin", dir=str(tmp_path)))
    found = inspected(tmp_path / "set")
    assert (found["corpus"], found["tokens"], found["largest_token"]) == ("megatron", 7, 6)
