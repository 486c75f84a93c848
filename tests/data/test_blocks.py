"""Blocks of shards: checked when first read, whatever the shard's size, and named with what they hold when damaged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

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
    open_shards,
    read_index,
    write_index,
    write_shard,
)
from phalanx.data.inspect import prepare_and_report
from phalanx.data.loader import Batches, SplitReader, TokenData, evaluation_batches, split_blocks
from phalanx.data.tokenizer import NumberTokenizer
from phalanx.errors import DataError

BLOCK = 64
"""Bytes: 32 tokens of two bytes."""
SHARDS = {"train": [np.arange(0, 100), np.arange(100, 200), np.arange(200, 250)], "val": [np.arange(500, 600)]}
SEQ_LEN = 8


def write_folder(folder: Path) -> Path:
    """Four shards: 0 to 249 for training, 500 to 599 for validation."""
    NumberTokenizer(1000).save(folder)
    splits = {
        split: tuple(
            write_shard(folder, f"{split}-{number:05d}.bin", tokens, "uint16", BLOCK)
            for number, tokens in enumerate(SHARDS[split])
        )
        for split in SPLITS
    }
    corpus = CorpusRecord("random", "random tokens", 0, 0, 0, "", "")
    fingerprint = NumberTokenizer(1000).fingerprint
    write_index(folder, Index(("data.corpus=x",), corpus, fingerprint, 1000, "uint16", splits, True, BLOCK))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def reader(folder: Path) -> SplitReader:
    return SplitReader(folder, open_shards(folder), "train", SEQ_LEN)


def test_every_block_has_the_digest_of_its_bytes(folder: Path) -> None:
    index = open_shards(folder, verify=True)
    assert split_blocks(index.splits["train"], BLOCK) == [(s, b) for s, n in ((0, 4), (1, 4), (2, 2)) for b in range(n)]
    content = (folder / "train-00000.bin").read_bytes()
    digests = (folder / "train-00000.blocks").read_bytes()
    assert digests == b"".join(hashlib.sha256(content[at : at + BLOCK]).digest() for at in range(0, 200, BLOCK))
    assert index.splits["train"][0].blocks == hashlib.sha256(digests).hexdigest()


@given(
    damage=st.tuples(st.integers(0, 2), st.integers(0, 99)),
    reads=st.lists(st.tuples(st.integers(0, 249), st.integers(1, 250)), max_size=6),
)
def test_a_flipped_bit_is_found_by_the_reads_of_its_block_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, damage: tuple[int, int], reads: list[tuple[int, int]]
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("shards"))
    shard, place = damage
    flip(folder / f"train-{shard:05d}.bin", place)
    block = place // BLOCK
    start = shard * 100 + block * 32
    damaged = range(start, min(start + 32, 250))
    tokens = reader(folder)
    for first, most in reads:
        count = min(most, 250 - first)
        if first < damaged.stop and damaged.start < first + count:
            with pytest.raises(
                DataError, match=rf"train-0000{shard}\.bin: block {block} \(from byte {block * BLOCK} on"
            ):
                tokens.read(first, count)
        else:
            assert tokens.read(first, count).tolist() == list(range(first, first + count))


def test_the_message_names_file_block_offset_tokens_samples_and_the_repair(folder: Path) -> None:
    flip(folder / "train-00001.bin", 70)
    with pytest.raises(DataError) as caught:
        TokenData(folder, "train", SEQ_LEN).samples(np.array([0, 17]))
    shown = str(caught.value)
    assert shown.startswith(f"{folder}/train-00001.bin: block 1 (from byte 64 on) is damaged: expected sha256 ")
    # The block has tokens 132 to 163. Sample 16 ends with token 136, sample 20 begins with token 160.
    assert "It holds tokens 132 to 163 of split train, in samples 16 to 20. Restore the file, or make it" in shown
    assert "phalanx data prepare --force data.corpus=x" in shown
    assert caught.value.exit_code == 4


def test_a_damaged_block_stops_the_background_reader_too(folder: Path) -> None:
    flip(folder / "train-00000.bin", 0)
    with (
        Batches(
            TokenData(folder, "train", SEQ_LEN), global_batch=31, micro_batch=1, rank=0, ranks=1, seed=0
        ) as batches,
        pytest.raises(DataError, match=r"train-00000\.bin: block 0 "),
    ):
        next(batches)


def test_a_block_is_checked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hashed = reader(folder), []
    real = hashlib.sha256
    monkeypatch.setattr(loader.hashlib, "sha256", lambda content: hashed.append(len(content)) or real(content))
    for _ in range(3):
        tokens.read(10, 40)
    assert hashed == [128, 64, 64]  # the digests of the shard's blocks, then two blocks


def test_a_block_is_checked_again_after_the_file_has_changed(folder: Path) -> None:
    read = reader(folder)
    read.read(0, 8)
    flip(folder / "train-00000.bin", 3)
    with pytest.raises(DataError, match=r"train-00000\.bin: block 0 .* is damaged"):
        read.read(0, 8)


def test_exchanged_shards_are_recognized(folder: Path) -> None:
    (folder / "train-00000.bin").rename(folder / "other")
    (folder / "train-00001.bin").rename(folder / "train-00000.bin")
    (folder / "other").rename(folder / "train-00001.bin")
    with pytest.raises(DataError, match=r"train-00000\.bin: block 1 .*, which is this block of train-00001\.bin\."):
        reader(folder).read(40, 3)
    for name in ("00000", "00001"):  # together with their digests
        (folder / f"train-{name}.blocks").write_bytes((folder / "train-00001.blocks").read_bytes())
    with pytest.raises(
        DataError, match=r"train-00000\.blocks: the digests of the blocks of train-00000\.bin: expected "
    ):
        reader(folder).read(40, 3)


def test_a_shard_that_shrinks_or_goes_away_during_a_run_is_named(folder: Path) -> None:
    """A mapped file would kill the process here (SIGBUS)."""
    tokens = reader(folder)
    tokens.read(0, 10)
    with (folder / "train-00000.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(
        DataError, match=r"train-00000\.bin: the shard ends after 100 bytes, expected 200\. Make it again"
    ):
        tokens.read(60, 10)
    (folder / "train-00001.bin").unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin: cannot read 64 bytes from byte 0 on: No such file"):
        tokens.read(100, 10)


@pytest.mark.parametrize("content", [None, b"", b"x" * 128, b"x" * 129])
def test_digests_that_are_missing_or_not_those_of_the_index_are_refused(folder: Path, content: bytes | None) -> None:
    tokens, path = reader(folder), folder / "train-00000.blocks"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000\.blocks: .*phalanx data prepare --force"):
        tokens.read(0, 1)
    with pytest.raises(DataError, match=r"train-00000\.blocks: "):
        open_shards(folder, verify=True)


def test_shards_outnumber_the_files_that_are_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "MAX_OPEN_FILES", 1)
    tokens = reader(folder)
    for first in (0, 150, 220, 90, 10):
        assert tokens.read(first, 20).tolist() == list(range(first, first + 20))


def without_block_digests(folder: Path) -> None:
    """As version 1 wrote them."""
    stored = json.loads((folder / "index.json").read_text())
    del stored["block_bytes"]
    stored["version"] = 1
    for shard in (shard for shards in stored["splits"].values() for shard in shards):
        del shard["blocks"]
        (folder / shard["file"]).with_suffix(".blocks").unlink()
    (folder / "index.json").write_text(json.dumps(stored))


def test_shards_of_version_1_are_read_unchecked_until_they_get_digests(folder: Path) -> None:
    now = open_shards(folder)
    without_block_digests(folder)
    flip(folder / "train-00000.bin", 0)
    old = open_shards(folder)
    assert (old.block_bytes, old.fingerprint) == (0, now.fingerprint)
    assert reader(folder).read(0, 3).tolist() == [1, 1, 2]
    with pytest.raises(DataError, match=r"train-00000\.bin: expected sha256"):
        add_block_digests(folder, old)
    flip(folder / "train-00000.bin", 0)
    assert add_block_digests(folder, old) == read_index(folder) == open_shards(folder, verify=True)
    flip(folder / "train-00000.bin", 0)
    with pytest.raises(DataError, match="block 0 "):
        reader(folder).read(0, 3)


def test_prepare_verify_adds_digests_to_shards_of_version_1(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_and_report(data, 16, force=False, verify=False, as_json=True)
    folder = Path(json.loads(capsys.readouterr().out)["path"])
    without_block_digests(folder)
    prepare_and_report(data, 16, force=False, verify=False, as_json=True)
    assert not read_index(folder).block_bytes
    prepare_and_report(data, 16, force=False, verify=True, as_json=True)
    assert open_shards(folder, verify=True).block_bytes == BLOCK_BYTES


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
def test_damaged_samples_are_replaced_by_the_next_whole_one(folder: Path, ranks: int) -> None:
    flip(folder / "train-00001.bin", 70)
    data = TokenData(folder, "train", SEQ_LEN, damaged=range(16, 21))
    assert data.readable(np.array([3, 16, 20, 30])).tolist() == [3, 21, 21, 30]
    read = []
    for rank in range(ranks):
        with Batches(data, global_batch=30, micro_batch=1, rank=rank, ranks=ranks, seed=0) as batches:
            read += [int(batch.tokens[0, 0]) // SEQ_LEN for batch in next(batches)]
    whole = [sample for sample in range(31) if not 16 <= sample < 21]
    assert set(read) <= set(whole)
    validated = evaluation_batches(data, samples=31, micro_batch=1, rank=0, ranks=1)
    assert {int(batch.tokens[0, 0]) // SEQ_LEN for batch in validated} == set(whole)
    assert TokenData(folder, "train", SEQ_LEN, damaged={30}).readable(np.array([30])).tolist() == [0]
    with pytest.raises(DataError, match="all 31 samples are damaged"):
        TokenData(folder, "train", SEQ_LEN, damaged=range(31))
