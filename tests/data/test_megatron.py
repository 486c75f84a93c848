"""Megatron's indexed data sets: read where they lie, as they are, and refused where they are not whole."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.cli.main import main
from phalanx.config.job import Data, MixSource
from phalanx.data.formats import pair_of
from phalanx.data.index import open_shards, read_index
from phalanx.data.megatron import open_megatron
from phalanx.data.mixture import MixedData, open_split
from phalanx.data.prepare import prepare
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.errors import DataError, JobError
from phalanx.evaluate.text import ScoredText, read_text

LENGTHS = np.arange(5, 45)
TOKENS = (np.arange(LENGTHS.sum()) * 7 % 256).astype(np.int64)


def write(folder: Path, *, version: int = 1, code: int = 8, dtype: str = "<u2", tokens: np.ndarray = TOKENS) -> Path:
    content = tokens.astype(dtype)
    (folder / "set.bin").write_bytes(content.tobytes())
    starts = LENGTHS.cumsum() - LENGTHS
    parts = [LENGTHS.astype("<i4"), (starts * content.itemsize).astype("<i8"), np.arange(41, dtype="<i8")]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, LENGTHS.size, 41)
    (folder / "set.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    return folder / "set"


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(corpus="text", path=str(write(tmp_path)), tokenizer="byte", dir=str(tmp_path / "data"))


@pytest.mark.parametrize(("version", "code", "dtype"), [(1, 8, "<u2"), (2, 4, "<i4"), (1, 5, "<i8"), (1, 1, "u1")])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_tokens_are_read_where_they_lie(tmp_path, data, version, code, dtype, ending):
    write(tmp_path, version=version, code=code, dtype=dtype)
    data = replace(data, path=data.path + ending)
    folder = prepare(data)
    assert not list(folder.glob("*.bin"))
    index = open_shards(folder, verify=True)
    cut = int(len(TOKENS) * 0.9)
    assert (index.tokens("train"), index.tokens("val")) == (cut, len(TOKENS) - cut)
    for split, expected in (("train", TOKENS[:cut]), ("val", TOKENS[cut:])):
        found = open_split(folder, split, 8, data)
        assert (found.read(0, found.tokens) == expected).all()
        micro = found.micro_batch(np.array([1]), np.array([0]))
        assert micro.tokens.tolist() == [expected[8:16].tolist()]
        assert micro.targets.tolist() == [expected[9:17].tolist()]
        assert (read_text(data, ByteTokenizer(), split, 8).tokens == expected).all()


def test_documents_are_those_of_the_index(data):
    data = replace(data, document_mask=True)
    folder = prepare(data)
    of_token = np.repeat(np.arange(LENGTHS.size), LENGTHS)
    for split, first in (("train", 0), ("val", int(len(TOKENS) * 0.9))):
        found = open_split(folder, split, 16, data)
        ids = np.arange(found.sample_count)
        expected = np.array([of_token[first + i * 16 : first + (i + 1) * 16] for i in ids])
        micro = found.micro_batch(ids, ids)
        assert micro.documents is not None
        assert (micro.documents == expected - expected[:, :1]).all()
        scored = read_text(data, ByteTokenizer(), split, 16)
        assert isinstance(scored, ScoredText)
        assert scored.documents is not None
        assert (np.diff(scored.documents) == np.diff(of_token[first : first + len(scored.tokens)])).all()


def test_a_data_set_is_a_source_of_a_mixture(tmp_path, data):
    (tmp_path / "a.txt").write_text("plain text. " * 100)
    sources = (MixSource(str(tmp_path / "a.txt"), 1), MixSource(data.path, 3))
    mixed = Data(corpus="mix", mix=sources, tokenizer="byte", dir=data.dir)
    found = open_split(prepare(mixed), "train", 8, mixed)
    assert isinstance(found, MixedData)
    assert list(found.source_tokens(400, 0).values()) == [800, 2400]
    assert found.sources[1].tokens == int(len(TOKENS) * 0.9)
    with pytest.raises(JobError, match="data.tokenizer=char is made of a text, and .*set holds tokens of another"):
        prepare(replace(mixed, tokenizer="char"))


def test_what_does_not_fit_the_tokenizer_or_the_settings_is_refused(tmp_path, data):
    with pytest.raises(JobError, match="set data.tokenizer to its tokenizer.json"):
        prepare(replace(data, tokenizer="bpe"))
    with pytest.raises(JobError, match="limits text"):
        prepare(replace(data, limit_mb=1.0))
    write(tmp_path, tokens=TOKENS + 1)
    with pytest.raises(DataError, match=r"holds token 256, expected 0 to 255 \(the vocabulary of data.tokenizer\)"):
        prepare(data)
    write(tmp_path, code=3, dtype="<i2", tokens=TOKENS - 1)
    with pytest.raises(DataError, match="holds token 65535, expected"):
        prepare(data)


def test_what_is_damaged_is_refused(tmp_path, data):
    stem = write(tmp_path)
    (tmp_path / "set.bin").write_bytes(b"\0" * 12)
    with pytest.raises(DataError, match="by its index, found 12: the file is truncated"):
        open_megatron(str(stem))
    for options, message in (({"version": 3}, "version 3"), ({"code": 6}, "dtype code 6")):
        with pytest.raises(DataError, match=message):
            open_megatron(str(write(tmp_path, **options)))
    index = tmp_path / "set.idx"
    write(tmp_path)
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(DataError, match="for 40 sequences, found"):
        open_megatron(str(stem))
    index.unlink()
    assert pair_of(str(stem)) is None
    (tmp_path / "set.idx").write_text("no index")
    with pytest.raises(DataError, match="begins with MMIDIDX"):
        open_megatron(str(stem))


def test_a_change_after_indexing_is_found(tmp_path, data):
    folder = prepare(data)
    assert prepare(data) == folder
    content = bytearray((tmp_path / "set.bin").read_bytes())
    content[20] ^= 1
    (tmp_path / "set.bin").write_bytes(content)
    with pytest.raises(DataError, match="it changed since it was indexed"):
        prepare(data)
    found = open_split(folder, "train", 8, data)
    with pytest.raises(DataError, match=r"set.bin: block 0 \(from byte 0 on\) is damaged"):
        found.read(0, 20)
    before = read_index(folder).fingerprint
    assert read_index(prepare(data, force=True)).fingerprint != before


def test_inspect_says_what_it_is(tmp_path, data, capsys):
    assert main(["data", "inspect", data.path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["form"] == "Megatron indexed data set, version 1, uint16"
    assert (found["tokens"], found["documents"], found["corpus"]) == ("980", "40", "text")
    assert found["largest_id"].startswith("255 of")
