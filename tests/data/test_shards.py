"""Shards and their blocks: what is written is read, and what is damaged is named or refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job import Data
from phalanx.data import loader
from phalanx.data.files import SPLITS
from phalanx.data.index import (
    BLOCK_BYTES,
    CorpusRecord,
    Index,
    add_block_digests,
    dtype_for,
    map_shard,
    open_shards,
    read_index,
    write_index,
    write_shard,
)
from phalanx.data.inspect import prepare_and_report
from phalanx.data.loader import Batches, SplitReader, TokenData, evaluation_batches, split_blocks
from phalanx.data.tokenizer import ByteTokenizer, NumberTokenizer
from phalanx.errors import DataError

# Shards: what is written is read, and what is damaged or foreign is refused with what to do about it.


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


# Blocks of shards: checked when first read, whatever the shard's size, and named with what they hold when damaged.

BLOCK = 64
"""Bytes: 32 tokens of two bytes."""
SHARDS = {"train": [np.arange(0, 100), np.arange(100, 200), np.arange(200, 250)], "val": [np.arange(500, 600)]}
SEQ_LEN = 8


def write_folder(blocks: Path) -> Path:
    """Four shards: 0 to 249 for training, 500 to 599 for validation."""
    NumberTokenizer(1000).save(blocks)
    splits = {
        split: tuple(
            write_shard(blocks, f"{split}-{number:05d}.bin", tokens, "uint16", BLOCK)
            for number, tokens in enumerate(SHARDS[split])
        )
        for split in SPLITS
    }
    corpus = CorpusRecord("random", "random tokens", 0, 0, 0, "", "")
    fingerprint = NumberTokenizer(1000).fingerprint
    write_index(blocks, Index(("data.corpus=x",), corpus, fingerprint, 1000, "uint16", splits, True, BLOCK))
    return blocks


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def reader(blocks: Path) -> SplitReader:
    return SplitReader(blocks, open_shards(blocks), "train", SEQ_LEN)


def test_every_block_has_the_digest_of_its_bytes(blocks: Path) -> None:
    index = open_shards(blocks, verify=True)
    assert split_blocks(index.splits["train"], BLOCK) == [(s, b) for s, n in ((0, 4), (1, 4), (2, 2)) for b in range(n)]
    content = (blocks / "train-00000.bin").read_bytes()
    digests = (blocks / "train-00000.blocks").read_bytes()
    assert digests == b"".join(hashlib.sha256(content[at : at + BLOCK]).digest() for at in range(0, 200, BLOCK))
    assert index.splits["train"][0].blocks == hashlib.sha256(digests).hexdigest()


@given(
    damage=st.tuples(st.integers(0, 2), st.integers(0, 99)),
    reads=st.lists(st.tuples(st.integers(0, 249), st.integers(1, 250)), max_size=6),
)
def test_a_flipped_bit_is_found_by_the_reads_of_its_block_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, damage: tuple[int, int], reads: list[tuple[int, int]]
) -> None:
    blocks = write_folder(tmp_path_factory.mktemp("shards"))
    shard, place = damage
    flip(blocks / f"train-{shard:05d}.bin", place)
    block = place // BLOCK
    start = shard * 100 + block * 32
    damaged = range(start, min(start + 32, 250))
    tokens = reader(blocks)
    for first, most in reads:
        count = min(most, 250 - first)
        if first < damaged.stop and damaged.start < first + count:
            with pytest.raises(
                DataError, match=rf"train-0000{shard}\.bin: block {block} \(from byte {block * BLOCK} on"
            ):
                tokens.read(first, count)
        else:
            assert tokens.read(first, count).tolist() == list(range(first, first + count))


def test_the_message_names_file_block_offset_tokens_samples_and_the_repair(blocks: Path) -> None:
    flip(blocks / "train-00001.bin", 70)
    with pytest.raises(DataError) as caught:
        TokenData(blocks, "train", SEQ_LEN).samples(np.array([0, 17]))
    shown = str(caught.value)
    assert shown.startswith(f"{blocks}/train-00001.bin: block 1 (from byte 64 on) is damaged: expected sha256 ")
    # The block has tokens 132 to 163. Sample 16 ends with token 136, sample 20 begins with token 160.
    assert "It holds tokens 132 to 163 of split train, in samples 16 to 20. Restore the file, or make it" in shown
    assert "phalanx data prepare --force data.corpus=x" in shown
    assert caught.value.exit_code == 4


def test_a_damaged_block_stops_the_background_reader_too(blocks: Path) -> None:
    flip(blocks / "train-00000.bin", 0)
    with (
        Batches(
            TokenData(blocks, "train", SEQ_LEN), global_batch=31, micro_batch=1, rank=0, ranks=1, seed=0
        ) as batches,
        pytest.raises(DataError, match=r"train-00000\.bin: block 0 "),
    ):
        next(batches)


def test_a_block_is_checked_once(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hashed = reader(blocks), []
    real = hashlib.sha256
    monkeypatch.setattr(loader.hashlib, "sha256", lambda content: hashed.append(len(content)) or real(content))
    for _ in range(3):
        tokens.read(10, 40)
    assert hashed == [128, 64, 64]  # the digests of the shard's blocks, then two blocks


def test_a_block_is_checked_again_after_the_file_has_changed(blocks: Path) -> None:
    read = reader(blocks)
    read.read(0, 8)
    flip(blocks / "train-00000.bin", 3)
    with pytest.raises(DataError, match=r"train-00000\.bin: block 0 .* is damaged"):
        read.read(0, 8)


def test_exchanged_shards_are_recognized(blocks: Path) -> None:
    (blocks / "train-00000.bin").rename(blocks / "other")
    (blocks / "train-00001.bin").rename(blocks / "train-00000.bin")
    (blocks / "other").rename(blocks / "train-00001.bin")
    with pytest.raises(DataError, match=r"train-00000\.bin: block 1 .*, which is this block of train-00001\.bin\."):
        reader(blocks).read(40, 3)
    for name in ("00000", "00001"):  # together with their digests
        (blocks / f"train-{name}.blocks").write_bytes((blocks / "train-00001.blocks").read_bytes())
    with pytest.raises(
        DataError, match=r"train-00000\.blocks: the digests of the blocks of train-00000\.bin: expected "
    ):
        reader(blocks).read(40, 3)


def test_a_shard_that_shrinks_or_goes_away_during_a_run_is_named(blocks: Path) -> None:
    """A mapped file would kill the process here (SIGBUS)."""
    tokens = reader(blocks)
    tokens.read(0, 10)
    with (blocks / "train-00000.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(
        DataError, match=r"train-00000\.bin: the shard ends after 100 bytes, expected 200\. Make it again"
    ):
        tokens.read(60, 10)
    (blocks / "train-00001.bin").unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin: cannot read 64 bytes from byte 0 on: No such file"):
        tokens.read(100, 10)


@pytest.mark.parametrize("content", [None, b"", b"x" * 128, b"x" * 129])
def test_digests_that_are_missing_or_not_those_of_the_index_are_refused(blocks: Path, content: bytes | None) -> None:
    tokens, path = reader(blocks), blocks / "train-00000.blocks"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000\.blocks: .*phalanx data prepare --force"):
        tokens.read(0, 1)
    with pytest.raises(DataError, match=r"train-00000\.blocks: "):
        open_shards(blocks, verify=True)


def test_shards_outnumber_the_files_that_are_open(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "MAX_OPEN_FILES", 1)
    tokens = reader(blocks)
    for first in (0, 150, 220, 90, 10):
        assert tokens.read(first, 20).tolist() == list(range(first, first + 20))


def without_block_digests(blocks: Path) -> None:
    """As version 1 wrote them."""
    stored = json.loads((blocks / "index.json").read_text())
    del stored["block_bytes"]
    stored["version"] = 1
    for shard in (shard for shards in stored["splits"].values() for shard in shards):
        del shard["blocks"]
        (blocks / shard["file"]).with_suffix(".blocks").unlink()
    (blocks / "index.json").write_text(json.dumps(stored))


def test_shards_of_version_1_are_read_unchecked_until_they_get_digests(blocks: Path) -> None:
    now = open_shards(blocks)
    without_block_digests(blocks)
    flip(blocks / "train-00000.bin", 0)
    old = open_shards(blocks)
    assert (old.block_bytes, old.fingerprint) == (0, now.fingerprint)
    assert reader(blocks).read(0, 3).tolist() == [1, 1, 2]
    with pytest.raises(DataError, match=r"train-00000\.bin: expected sha256"):
        add_block_digests(blocks, old)
    flip(blocks / "train-00000.bin", 0)
    assert add_block_digests(blocks, old) == read_index(blocks) == open_shards(blocks, verify=True)
    flip(blocks / "train-00000.bin", 0)
    with pytest.raises(DataError, match="block 0 "):
        reader(blocks).read(0, 3)


def test_prepare_verify_adds_digests_to_shards_of_version_1(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_and_report(data, 16, force=False, verify=False, as_json=True)
    blocks = Path(json.loads(capsys.readouterr().out)["path"])
    without_block_digests(blocks)
    prepare_and_report(data, 16, force=False, verify=False, as_json=True)
    assert not read_index(blocks).block_bytes
    prepare_and_report(data, 16, force=False, verify=True, as_json=True)
    assert open_shards(blocks, verify=True).block_bytes == BLOCK_BYTES


@given(shard=st.integers(0, 2), block=st.integers(0, 1), before=st.integers(0, 3), seq_len=st.integers(1, 60))
def test_the_samples_of_a_block_are_those_that_read_it(
    folder_of_all: Path, shard: int, block: int, before: int, seq_len: int
) -> None:
    tokens = SplitReader(folder_of_all, open_shards(folder_of_all), "train", seq_len)
    start = shard * 100 + block * 32
    held = range(start, min(start + 32, 250))
    reads = [range(i * seq_len - before, (i + 1) * seq_len + 1) for i in range(249 // seq_len)]
    expected = [i for i, read in enumerate(reads) if read.start < held.stop and held.start < read.stop]
    assert list(tokens.samples_of(shard, block, before)) == expected


@pytest.fixture(scope="module")
def folder_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_samples_are_replaced_by_the_next_whole_one(blocks: Path, ranks: int) -> None:
    flip(blocks / "train-00001.bin", 70)
    data = TokenData(blocks, "train", SEQ_LEN, damaged=range(16, 21))
    assert data.readable(np.array([3, 16, 20, 30])).tolist() == [3, 21, 21, 30]
    read = []
    for rank in range(ranks):
        with Batches(data, global_batch=30, micro_batch=1, rank=rank, ranks=ranks, seed=0) as batches:
            read += [int(batch.tokens[0, 0]) // SEQ_LEN for batch in next(batches)]
    whole = [sample for sample in range(31) if not 16 <= sample < 21]
    assert set(read) <= set(whole)
    validated = evaluation_batches(data, samples=31, micro_batch=1, rank=0, ranks=1)
    assert {int(batch.tokens[0, 0]) // SEQ_LEN for batch in validated} == set(whole)
    assert TokenData(blocks, "train", SEQ_LEN, damaged={30}).readable(np.array([30])).tolist() == [0]
    with pytest.raises(DataError, match="all 31 samples are damaged"):
        TokenData(blocks, "train", SEQ_LEN, damaged=range(31))
