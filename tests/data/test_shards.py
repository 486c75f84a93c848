"""Shards: what is written is read, and what is damaged or foreign is refused with what to do about it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.data.index import (
    CorpusRecord,
    Index,
    dtype_for,
    map_shard,
    open_shards,
    read_index,
    write_index,
    write_shard,
)
from phalanx.data.tokenizer import ByteTokenizer, NumberTokenizer
from phalanx.errors import DataError

TRAIN = [np.arange(0, 256), np.arange(255, -1, -1)]
REPAIR = r"phalanx data prepare --force data\.corpus=text 'data\.path=my text' data\.dir="


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished folder: two train shards, one of val, byte tokenizer."""
    folder = tmp_path / "text-byte-01234567"
    folder.mkdir()
    ByteTokenizer().save(folder)
    index = Index(
        settings=("data.corpus=text", "data.path=my text"),
        corpus=CorpusRecord("text", "my text", 3, 600, 600, "0" * 64, ""),
        tokenizer=ByteTokenizer().fingerprint,
        vocab_size=256,
        dtype="uint16",
        splits={
            "train": tuple(write_shard(folder, f"train-{i:05d}.bin", t, "uint16") for i, t in enumerate(TRAIN)),
            "val": (write_shard(folder, "val-00000.bin", np.arange(88), "uint16"),),
        },
        complete=True,
    )
    write_index(folder, index)
    return folder


def change(folder: Path, **fields: Any) -> None:
    stored = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**stored, **fields}))


def change_shard(folder: Path, **fields: Any) -> None:
    stored = json.loads((folder / "index.json").read_text())
    stored["splits"]["train"][1].update(fields)
    (folder / "index.json").write_text(json.dumps(stored))


def test_written_and_read(folder: Path) -> None:
    index = open_shards(folder, verify=True)
    assert index.tokens("train") == 512
    assert index.tokens("val") == 88
    for shard, tokens in zip(index.splits["train"], TRAIN, strict=True):
        mapped = map_shard(folder, index, shard)
        assert np.array_equal(mapped, tokens)
        assert not mapped.flags.writeable
    assert (folder / "train-00000.bin").read_bytes()[:6] == b"\0\0\1\0\2\0"  # little-endian uint16, no header
    assert read_index(folder) == index


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_dtype(vocab_size: int, dtype: str, tmp_path: Path) -> None:
    assert dtype_for(vocab_size) == dtype
    tokens = np.array([0, vocab_size - 1])
    shard = write_shard(tmp_path, "train-00000.bin", tokens, dtype)
    assert shard.bytes == 2 * np.dtype(dtype).itemsize
    written = np.fromfile(tmp_path / "train-00000.bin", dtype=np.dtype(dtype).newbyteorder("<"))
    assert written.tolist() == tokens.tolist()


def test_missing_truncated_and_grown_shards_are_refused_at_opening(folder: Path) -> None:
    shard = folder / "train-00001.bin"
    content = shard.read_bytes()
    for size in (510, 514, 0):
        shard.write_bytes(content[:size] + b"\0" * (size - 512))
        with pytest.raises(DataError, match=rf"train-00001\.bin: expected 512 bytes, found {size}\. .*{REPAIR}"):
            open_shards(folder)
    shard.unlink()
    with pytest.raises(DataError, match=rf"train-00001\.bin: the shard is missing \(expected 512 bytes\).*{REPAIR}"):
        open_shards(folder)


def test_one_flipped_bit_is_found_by_verify(folder: Path) -> None:
    content = bytearray((folder / "val-00000.bin").read_bytes())
    content[33] ^= 1
    (folder / "val-00000.bin").write_bytes(content)
    open_shards(folder)
    with pytest.raises(DataError, match=rf"val-00000\.bin: expected sha256 [0-9a-f]*, found [0-9a-f]*\. .*{REPAIR}"):
        open_shards(folder, verify=True)


def test_tokens_beyond_the_vocabulary_are_found_by_verify(folder: Path) -> None:
    change(folder, vocab_size=200)
    with pytest.raises(DataError, match="expected tokens below the vocabulary size 200, found 255"):
        open_shards(folder, verify=True)


def test_another_tokenizer_is_found_by_verify(folder: Path) -> None:
    NumberTokenizer(256).save(folder)
    with pytest.raises(DataError, match=rf"tokenizer\.json is not the one that made the shards: expected .*{REPAIR}"):
        open_shards(folder, verify=True)


def test_unfinished_shards_are_not_opened(folder: Path) -> None:
    change(folder, complete=False)
    with pytest.raises(DataError, match=r"not finished\. Resume with: phalanx data prepare data\.corpus=text"):
        open_shards(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "MMIDIDX"}, "expected format 'phalanx-tokens' version 2, found 'MMIDIDX' version 2"),
        ({"version": 6}, "expected format 'phalanx-tokens' version 2, found 'phalanx-tokens' version 6"),
        ({"block_bytes": 24}, "block_bytes 24: expected a multiple of 16"),
        ({"block_bytes": 0}, "block_bytes 0"),
        ({"block_bytes": 2**30}, "block_bytes 1073741824"),
        ({"dtype": "int64"}, "dtype 'int64'"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"vocab_size": True}, "vocab_size: expected a whole number, found true"),
        ({"splits": {"train": []}}, "splits: val is missing"),
        ({"splits": {"train": [3], "val": []}}, r"splits\.train\.item 1: expected an object, found 3"),
        ({"corpus": None}, "corpus: expected an object, found null"),
    ],
)
def test_foreign_indices_are_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    change(folder, **fields)
    with pytest.raises(DataError, match=message) as caught:
        open_shards(folder)
    assert "index.json" in str(caught.value)
    assert "phalanx data prepare --force JOB.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"file": "../../secrets-00000.bin"}, r"called '../../secrets-00000\.bin', expected 'train-00001\.bin'"),
        ({"file": "/etc/passwd"}, "called '/etc/passwd'"),
        ({"file": "train-00000.bin"}, "expected 'train-00001"),
        ({"tokens": 255}, "512 bytes are not 255 tokens of 2 bytes"),
        ({"tokens": -1, "bytes": -2}, "-2 bytes are not -1 tokens"),
        ({"sha256": "x"}, "'x' is not a sha256"),
        ({"blocks": "y"}, "'y' is not a sha256"),
        ({"blocks": None}, "blocks: expected text, found null"),
    ],
)
def test_shard_entries_are_checked(folder: Path, fields: dict[str, Any], message: str) -> None:
    change_shard(folder, **fields)
    with pytest.raises(DataError, match=message):
        open_shards(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_an_index_that_is_no_json_object_is_refused(folder: Path, content: bytes) -> None:
    (folder / "index.json").write_bytes(content)
    with pytest.raises(DataError, match=r"index\.json.* again with: phalanx data prepare --force JOB\.yaml"):
        open_shards(folder)


def test_a_folder_without_index(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*index\.json: No such file .* phalanx data prepare"):
        open_shards(tmp_path)


def test_fingerprint_follows_tokens_and_tokenizer(folder: Path) -> None:
    index = open_shards(folder)
    assert replace(index, settings=()).fingerprint == index.fingerprint
    assert replace(index, tokenizer="0" * 64).fingerprint != index.fingerprint
    swapped = {**index.splits, "train": index.splits["train"][::-1]}
    assert replace(index, splits=swapped).fingerprint != index.fingerprint
