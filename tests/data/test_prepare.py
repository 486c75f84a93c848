"""Preparing: exact counts, nothing done twice, the same bytes however often it was stopped and however many work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.config.job import Data
from phalanx.data import prepare as module
from phalanx.data.corpus import Segment
from phalanx.data.index import open_shards, read_index
from phalanx.data.loader import TokenData
from phalanx.data.prepare import prepare, split_segments
from phalanx.data.tokenizer import Tokenizer, train_bpe
from phalanx.errors import DataError

PROGRAM = Path(__file__).with_name("prepare_program.py")


def program(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in (".lock", "index.json")}


def stream(folder: Path, split: str) -> str:
    data = TokenData(folder, split, 1)
    return data.tokenizer.decode(data.read(0, data.tokens))


def not_called(*arguments: object) -> None:
    raise AssertionError("this should not have been made again")


def test_shakespeare_has_the_published_counts(shakespeare: Path, tmp_path: Path) -> None:
    folder = prepare(Data(corpus="shakespeare_char", path=str(shakespeare), dir=str(tmp_path)))
    index = open_shards(folder, verify=True)
    assert (index.tokens("train"), index.tokens("val"), index.vocab_size) == (1_003_854, 111_540, 65)
    assert stream(folder, "train") + stream(folder, "val") == shakespeare.read_text()
    assert prepare(Data(corpus="shakespeare_char", dir=str(tmp_path))) == folder  # needs no file and no network now


def test_another_tokenizer_than_last_time_is_said(data: Data) -> None:
    said: list[str] = []
    first = prepare(replace(data, tokenizer="byte"), progress=lambda text, *_: said.append(text))
    assert not [text for text in said if "is prepared in" in text]
    second = prepare(replace(data, tokenizer="char"), progress=lambda text, *_: said.append(text))
    assert (
        f"the corpus is prepared in {first} with data.tokenizer=byte; this job has data.tokenizer=char, and prepares "
        f"{second}"
    ) in said


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_the_stream_is_the_corpus(data: Data, poems: Path, tokenizer: str) -> None:
    folder = prepare(replace(data, tokenizer=tokenizer, bpe_vocab=300))
    index = open_shards(folder, verify=True)
    assert len(index.splits["train"]) > 3
    separator = "<|endoftext|>" if tokenizer == "bpe" else "\n"
    texts = [file.read_text() for file in sorted(poems.iterdir())]
    assert (index.corpus.documents, index.corpus.characters) == (10, sum(map(len, texts)) + 9)
    assert stream(folder, "train") + stream(folder, "val") == separator.join(texts)
    if tokenizer != "bpe":
        assert index.tokens("train") == int(index.corpus.characters * 0.9)


@pytest.mark.parametrize("cut", range(12))
def test_split_cuts_at_the_character(cut: int) -> None:
    parts = [Segment("abc", False), Segment("de", False), Segment("fghi", True)]
    whole = "abcde\nfghi"
    texts = {"train": "", "val": ""}
    for split, segment in split_segments(parts, cut):
        texts[split] += "\n" * segment.separated + segment.text
    assert (texts["train"], texts["val"]) == (whole[:cut], whole[cut:])


def test_a_second_call_makes_nothing(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(data)
    monkeypatch.setattr(module, "_build", not_called)
    monkeypatch.setattr("phalanx.data.corpus.scan", not_called)
    assert prepare(data) == folder


def test_force_makes_all_again(data: Data) -> None:
    folder = prepare(data)
    before = content(folder)
    (folder / "train-00001.bin").write_bytes(b"damaged")
    (folder / "index.json").write_text("{}")
    with pytest.raises(DataError, match="expected format"):
        prepare(data)
    assert prepare(data, force=True) == folder
    assert content(folder) == before
    open_shards(folder, verify=True)


def test_a_missing_or_short_shard_is_made_again_and_the_others_kept(data: Data) -> None:
    folder = prepare(data)
    before = content(folder)
    kept = (folder / "train-00000.bin").stat().st_ino
    (folder / "train-00001.bin").unlink()
    (folder / "train-00002.bin").write_bytes(b"")
    prepare(data)
    assert content(folder) == before
    assert (folder / "train-00000.bin").stat().st_ino == kept
    open_shards(folder, verify=True)


def test_worker_count_does_not_change_a_byte(data: Data, tmp_path: Path) -> None:
    made = []
    for workers in (1, 2, 3):
        settings = replace(data, tokenizer="bpe", bpe_vocab=300, workers=workers, dir=str(tmp_path / str(workers)))
        made.append(content(prepare(settings)))
    assert made[0] == made[1] == made[2]
    assert len(made[0]) > 5


@pytest.mark.parametrize(("tokenizer", "workers"), [("char", 1), ("bpe", 2)])
def test_killed_and_started_again_gives_the_same_bytes(
    poems: Path, tmp_path: Path, small_shards: None, tokenizer: str, workers: int
) -> None:
    data = Data(corpus="text", path=str(poems), tokenizer=tokenizer, bpe_vocab=300, workers=workers)
    whole = content(prepare(replace(data, dir=str(tmp_path / "whole"))))
    with program(poems, tmp_path / "killed", tokenizer, workers, 3) as victim:
        assert victim.stdout is not None
        lines = iter(victim.stdout.readline, "")
        assert any(line == "3 shards\n" for line in lines)
        victim.send_signal(signal.SIGKILL)
    data = replace(data, dir=str(tmp_path / "killed"))
    folder = module.prepared_path(data)
    with pytest.raises(DataError, match="not finished"):
        open_shards(folder)
    finished = [shard.file for shard in read_index(folder).splits["train"]]
    assert len(finished) == 3
    inodes = [(folder / file).stat().st_ino for file in finished]
    (folder / ".train-00003.bin.1.tmp").write_bytes(b"half a shard")
    assert prepare(data) == folder
    assert [(folder / file).stat().st_ino for file in finished] == inodes
    assert content(folder) == whole
    open_shards(folder, verify=True)


def test_a_finished_shard_that_rotted_is_made_again(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "tokenizing" and done > total / 2:
            raise KeyboardInterrupt

    whole = content(prepare(replace(data, dir=data.dir + "2")))
    with pytest.raises(KeyboardInterrupt):
        prepare(data, progress=stop)
    folder = module.prepared_path(data)
    shard = folder / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[::-1])
    prepare(data)
    assert content(folder) == whole


@pytest.mark.cold
def test_two_at_once_do_not_disturb_each_other(poems: Path, tmp_path: Path) -> None:
    both = [program(poems, tmp_path / "out", "bpe", 2) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][-2:] == outputs[1][-2:]
    folder, torch_was_imported = outputs[0][-2:]
    assert torch_was_imported == "False"
    open_shards(Path(folder), verify=True)
    assert sum("1 shards" in output for output in outputs) == 1  # only one of them did the work


def test_a_changed_corpus_is_not_taken_for_the_old_one(data: Data, poems: Path) -> None:
    folder = prepare(data)
    os.utime(poems / "3.txt", (1, 1))
    assert prepare(data) == folder  # touched, but the same text
    (poems / "3.txt").write_text("another poem")
    with pytest.raises(DataError, match=r"changed since these shards were made: .*phalanx data prepare --force"):
        prepare(data)
    prepare(data, force=True)
    assert "another poem" in stream(folder, "train")
    open_shards(folder, verify=True)


def test_shards_alone_are_enough(data: Data, poems: Path) -> None:
    folder = prepare(data)
    for file in poems.iterdir():
        file.unlink()
    poems.rmdir()
    assert prepare(data) == folder


def test_a_corpus_changed_between_stop_and_start_is_begun_anew(data: Data, poems: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "tokenizing" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(data, progress=stop)
    for number in range(2, 10):
        (poems / f"{number}.txt").unlink()
    folder = prepare(data)
    open_shards(folder, verify=True)
    assert stream(folder, "train") + stream(folder, "val") == "\n".join(f.read_text() for f in sorted(poems.iterdir()))
    assert len(list(folder.glob("*.bin"))) == sum(len(shards) for shards in read_index(folder).splits.values())


def test_bpe_is_trained_on_the_training_part_alone(data: Data, poems: Path) -> None:
    folder = prepare(replace(data, tokenizer="bpe", bpe_vocab=300, val_fraction=0.5))
    texts = [text.text for split, text in split_segments(read_segments(poems), half(poems)) if split == "train"]
    assert Tokenizer.load(folder).fingerprint == train_bpe(texts, 300).fingerprint


def read_segments(poems: Path) -> list[Segment]:
    return [Segment(file.read_text(), i > 0) for i, file in enumerate(sorted(poems.iterdir()))]


def half(poems: Path) -> int:
    return int(sum(map(len, read_segments(poems))) * 0.5)


def test_a_tokenizer_file(data: Data, tmp_path: Path) -> None:
    trained = train_bpe(["the sea, the sea"] * 9, 280)
    trained.save(tmp_path)
    folder = prepare(replace(data, tokenizer=str(tmp_path / "tokenizer.json")))
    assert Tokenizer.load(folder).fingerprint == trained.fingerprint
    assert open_shards(folder, verify=True).vocab_size == trained.vocab_size


def test_random_tokens(tmp_path: Path, small_shards: None) -> None:
    data = Data(corpus="random", random_tokens=1000, random_vocab=70_000, dir=str(tmp_path))
    folder = prepare(data)
    index = open_shards(folder, verify=True)
    assert (index.tokens("train"), index.tokens("val"), index.dtype) == (900, 100, "uint32")
    tokens = TokenData(folder, "train", 1).read(0, 900)
    assert tokens.max() > 65_536
    assert len(np.unique(tokens)) > 850
    before = content(folder)
    (folder / "train-00001.bin").unlink()
    prepare(data)
    assert content(folder) == before
    assert content(prepare(replace(data, dir=str(tmp_path / "2")))) == before


def test_no_validation_part(data: Data) -> None:
    folder = prepare(replace(data, val_fraction=0.0))
    assert open_shards(folder).tokens("val") == 0
    with pytest.raises(
        DataError,
        match="split val of the corpus has 0 tokens, and a sample needs seq_len . 1 = 5: use a longer corpus, or",
    ):
        TokenData(folder, "val", 4)


def test_an_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(DataError, match=r"the corpus is empty: 1 files of .*x\.txt hold no text"):
        prepare(Data(corpus="text", path=str(tmp_path / "x.txt"), dir=str(tmp_path / "out")))


def test_a_full_disk_says_so(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"stopped: writing: No space left on device\. Finished shards are kept"):
        prepare(data)


def test_stdlib_gives_several_shards(tmp_path: Path) -> None:
    folder = prepare(Data(dir=str(tmp_path)))
    index = open_shards(folder)
    assert len(index.splits["train"]) > 2
    assert index.tokens("train") + index.tokens("val") == index.corpus.characters
    assert index.vocab_size <= 256
