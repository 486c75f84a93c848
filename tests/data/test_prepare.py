"""Preparing and inspecting data: settings, exact counts, the same bytes however it was stopped, and reports."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.cli.main import main
from phalanx.config.job import Data
from phalanx.data import prepare as module
from phalanx.data.corpus import Segment
from phalanx.data.files import stderr_progress
from phalanx.data.index import open_shards, read_index
from phalanx.data.inspect import prepare_and_report
from phalanx.data.loader import TokenData
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare, split_segments
from phalanx.data.settings import overrides, prepared_path
from phalanx.data.tokenizer import Tokenizer, train_bpe
from phalanx.errors import DataError, JobError

# Preparing: exact counts, nothing done twice, the same bytes however often it was stopped and however many work.


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


def test_a_tokenizer_file_without_an_end_of_text_is_said(data: Data, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(40)))
    file = tmp_path / "own" / "tokenizer.json"
    file.parent.mkdir()
    file.write_text(train_bpe(["some text"], 300).definition().replace("<|endoftext|>", "<|done|>"))
    own = Data(corpus="text", path=str(rows), tokenizer=str(file), dir=data.dir)
    for named in (False, True):
        if named:
            (file.parent / "tokenizer_config.json").write_text('{"eos_token": "<|done|>"}')
        said: list[str] = []
        folder = prepare(own, progress=lambda text, *_, said=said: said.append(text))
        assert any("a newline separates its 40 documents" in each for each in said) != named
        ends = Tokenizer.load(folder).separator
        assert ("document 0<|done|>document 1" in stream(folder, "train")) == named == (ends == (0,))


@pytest.mark.parametrize("eos", ["<|done|>", "\n", ""])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_conversations_have_the_end_of_text_of_their_tokenizer(tmp_path: Path, name: str, eos: str) -> None:
    """The settings that a template leaves beside the tokenizer of the shards make it no other one."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"q{n}", "completion": "a"}) + "\n" for n in range(40)))
    file = tmp_path / "own" / "tokenizer.json"
    file.parent.mkdir()
    definition = json.loads(train_bpe(["some text"], 300).definition().replace("<|endoftext|>", "<|done|>"))
    definition["added_tokens"].append(definition["added_tokens"][0] | {"id": 999, "content": "\n", "special": False})
    file.write_text(json.dumps(definition))
    (file.parent / name).write_text(json.dumps({"eos_token": {"content": eos}} if eos else {}))
    own = Data(corpus="chat", path=str(rows), template="raw", tokenizer=str(file), dir=str(tmp_path / "data"))
    found = open_split(prepare(own), "train", 16, own).tokenizer
    assert found.fingerprint == Tokenizer.load(file).fingerprint
    assert (found.separator == (0,)) == (eos == "<|done|>")


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


# Settings: what is wrong is said all at once, and the folder's name follows what shapes the tokens.


def test_all_problems_at_once() -> None:
    wrong = Data(
        corpus="text",
        tokenizer="bpe",
        bpe_vocab=100,
        val_fraction=1.0,
        limit_mb=-1,
        random_tokens=0,
        random_vocab=0,
        workers=-1,
    )
    with pytest.raises(JobError) as caught:
        prepared_path(wrong)
    named = [
        "path",
        "val_fraction",
        "limit_mb",
        "bpe_vocab",
        "random_tokens",
        "random_vocab",
        "workers",
    ]
    assert len(caught.value.problems) == len(named)
    for name in named:
        assert f"data.{name}" in str(caught.value)


def test_unknown_names() -> None:
    with pytest.raises(
        JobError,
        match=r"data\.corpus: no corpus 'wiki' \(known: stdlib, shakespeare_char, text, mix, chat, preferences",
    ):
        prepared_path(Data(corpus="wiki"))
    with pytest.raises(DataError, match=r"data\.tokenizer=wordpiece: expected char, byte, bpe, or the path"):
        prepared_path(Data(tokenizer="wordpiece"))


def test_names_can_be_read(tmp_path: Path) -> None:
    def name(**settings: object) -> str:
        path = prepared_path(Data(dir="d", **settings))
        assert path.parent == Path("d")
        return path.name.rsplit("-", 1)[0]

    train_bpe(["some words"], 257).save(tmp_path)
    assert name() == "stdlib-char"
    assert name(tokenizer="bpe", bpe_vocab=512) == "stdlib-bpe512"
    assert name(corpus="random", random_vocab=99) == "random-99"
    assert name(corpus="text", path="x", tokenizer=str(tmp_path / "tokenizer.json")) == "text-tokenizer"


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        (Data(), {"val_fraction": 0.2}),
        (Data(), {"limit_mb": 1.0}),
        (Data(), {"tokenizer": "byte"}),
        (Data(tokenizer="bpe"), {"bpe_vocab": 512}),
        (Data(corpus="text", path="a"), {"path": "b"}),
        (Data(corpus="text", path="a"), {"text_field": "story"}),
        (Data(corpus="random"), {"random_tokens": 5}),
        (Data(corpus="random"), {"random_vocab": 5}),
    ],
)
def test_what_shapes_the_tokens_changes_the_folder(base: Data, changed: dict[str, object]) -> None:
    other = replace(base, **changed)
    assert prepared_path(base) != prepared_path(other)


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        (Data(), {"workers": 3, "prefetch": 9, "path": "x", "bpe_vocab": 999, "random_tokens": 3, "text_field": "x"}),
        (Data(corpus="shakespeare_char"), {"path": "x"}),
        (Data(corpus="random"), {"tokenizer": "byte", "limit_mb": 3.0, "path": "x"}),
    ],
)
def test_what_does_not_shape_them_does_not(base: Data, changed: dict[str, object]) -> None:
    assert prepared_path(base) == prepared_path(replace(base, **changed))


def test_another_python_has_another_stdlib(monkeypatch: pytest.MonkeyPatch) -> None:
    before, random = prepared_path(Data()), prepared_path(Data(corpus="random"))
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    assert prepared_path(Data()) != before
    assert prepared_path(Data(corpus="random")) == random


def test_another_tokenizer_under_the_same_name(tmp_path: Path) -> None:
    data = Data(tokenizer=str(tmp_path / "tokenizer.json"))
    train_bpe(["some words"], 260).save(tmp_path)
    before = prepared_path(data)
    train_bpe(["other things"], 260).save(tmp_path)
    assert prepared_path(data) != before


def test_overrides_make_the_same_shards(tmp_path: Path) -> None:
    assert overrides(Data(corpus="text", path="my text", workers=3)) == [
        "data.corpus=text",
        "data.path=my text",
        "data.text_field=text",
        "data.tokenizer=char",
        "data.val_fraction=0.1",
        "data.limit_mb=0.0",
    ]
    assert "data.path=copy.txt" in overrides(Data(corpus="shakespeare_char", path="copy.txt"))


# Progress: plain lines where there is no terminal, and none too often.


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with stderr_progress() as progress:
        progress("only told", 0, 0)
        for done in range(101):
            progress("working", done, 100)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["only told", "working: 100%"]


def test_plain_lines_become_rarer_and_say_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr("phalanx.data.files.time.monotonic", lambda: clock[0])
    with stderr_progress() as progress:
        for done in range(1001):
            progress("working", done, 1000)
            clock[0] += 0.5
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["working: 0.4%", "working: 0.8%"]
    assert lines[-1] == "working: 100%"
    assert lines[2:4] == ["working: 1% (8m14s left)", "working: 1% (8m12s left)"]
    assert 15 < len(lines) < 40


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with stderr_progress() as progress:
        progress("only [told]", 0, 0)
        progress("working", 1, 2)
        progress("working", 2, 2)
    assert "only [told]" in terminal.getvalue()
    assert "working" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


# `phalanx data prepare` says what it made, to people and to programs.


def test_json_is_one_document(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_and_report(data, 16, force=False, verify=True, as_json=True) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["path"].startswith(data.dir + "/text-char-")
    assert told["splits"]["train"]["tokens"] + told["splits"]["val"]["tokens"] == told["characters"]
    assert told["splits"]["val"]["bytes"] == 2 * told["splits"]["val"]["tokens"]
    assert told["begins"] == ("poem 0\n" + "the sea, the sea; " * 13)[:60]
    assert told["verified"] is True
    assert "tokenizing: 100%" in err


def test_text(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_and_report(data, 16, force=False, verify=False, as_json=False)
    out = capsys.readouterr().out
    assert re.search(r"^train: [\d,]+ tokens  shards: \d+  bytes: [\d,]+$", out, re.MULTILINE)
    assert r"begins: 'poem 0\nthe sea" in out
    assert "dtype: uint16" in out


def test_verify_finds_a_flipped_bit_and_force_repairs_it(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_and_report(data, 16, force=False, verify=True, as_json=True)
    shard = Path(json.loads(capsys.readouterr().out)["path"]) / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[10] ^= 4
    shard.write_bytes(content)
    prepare_and_report(data, 16, force=False, verify=False, as_json=True)
    with pytest.raises(DataError, match=r"train-00000\.bin: expected sha256 .* phalanx data prepare --force"):
        prepare_and_report(data, 16, force=False, verify=True, as_json=True)
    prepare_and_report(data, 16, force=True, verify=True, as_json=True)


def test_stopping_says_how_to_go_on(
    data: Data, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object, **options: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.data.inspect.prepare", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepare_and_report(data, 16, force=False, verify=False, as_json=True)
    assert "finished shards are kept" in capsys.readouterr().err


def test_of_conversations_it_says_what_samples_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "q" * (n % 5 + 1), "completion": "a" * 4} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path, out = str(tmp_path / "rows.jsonl"), str(tmp_path / "out")
    data = Data(corpus="chat", path=path, template="raw", dir=out, packing=True, document_mask=True, val_fraction=0.25)
    prepare_and_report(data, 16, force=False, verify=True, as_json=False)
    printed = capsys.readouterr().out
    assert f"corpus: {path}  rows: 20  characters: 160" in printed
    # Fifteen prompts of 1 to 5, answers of 5 with the newline, the last token only a target.
    line = "conversations: 15  samples: 7  truncated: 0  dropped: 0  used: 93.8% of positions  counted: 71.4% of used"
    assert line in printed
    prepare_and_report(data, 16, force=False, verify=False, as_json=True)
    train = json.loads(capsys.readouterr().out)["splits"]["train"]
    assert (train["used"], train["counted"], train["positions"]) == (105, 75, 112)
    assert train["efficiency"] == 105 / 112


# `phalanx data inspect`: what a file is, how it would be read, and what of it is trained on.

CHAT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "id": 3}


@pytest.mark.parametrize(
    ("name", "content", "corpus", "form"),
    [
        ("a.json", json.dumps([CHAT]), "chat", "a JSON array"),
        ("a.jsonl", json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}), "preferences", "JSON lines"),
        ("a.csv", "text,id\nsome words,1\n", "text", "CSV"),
        ("a.txt", "some words", "text", "text"),
    ],
)
def test_a_file_is_known(tmp_path: Path, capsys, name: str, content: str, corpus: str, form: str) -> None:
    (tmp_path / name).write_text(content)
    assert main(["data", "inspect", str(tmp_path / name), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["corpus"], found["form"]) == (corpus, form)
    trained = "".join(part["text"] for part in found["sample"] if part["trained"])
    assert trained.startswith({"chat": "hello", "preferences": "a", "text": "some words"}[corpus])
    assert "hi" not in trained


def test_a_folder_shows_its_first_file_and_answers_are_marked(tmp_path: Path, capsys) -> None:
    (tmp_path / "b.jsonl").write_text("not read")
    (tmp_path / "a.jsonl").write_text(json.dumps(CHAT))
    assert main(["data", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "a.jsonl" in out
    assert "«hello<|im_end|>" in out


def test_rows_that_cannot_be_used_are_listed_with_the_exit_code_of_prepare(tmp_path: Path, capsys) -> None:
    kto = {"prompt": "q", "completion": "bad", "label": False}
    (tmp_path / "a.jsonl").write_text(json.dumps(kto) + "\n" + json.dumps({"question": "q"}) + "\n")
    assert main(["data", "inspect", str(tmp_path / "a.jsonl")]) == 4
    out = capsys.readouterr().out
    assert "2 rows cannot be used" in out
    assert "its prompt has only answers with label false" in out
    assert "ignore_keys" not in out  # it would train the answers that are marked as bad


def test_a_job_file_shows_what_it_draws_of_each_source(tmp_path: Path, capsys) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 300)
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{seq_len: 16}}\ndata:\n  dir: {tmp_path}/data\n  mix:\n    - {{path: {tmp_path}/a.txt, weight: 3}}\n"
        f"    - {{path: {tmp_path}/b.txt, weight: 1, epochs: 1}}\ntrain: {{steps: 40, global_batch: 20}}\n"
    )
    assert main(["data", "inspect", str(job)]) == 0
    assert "a.txt (text): 75.00% of the samples: 600, not prepared yet" in " ".join(capsys.readouterr().out.split())
    assert main(["data", "prepare", str(job)]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", str(job), "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert [source["samples"] for source in found["sources"]] == [600, 200]
    assert found["sources"][1]["epochs"] == pytest.approx(200 / 118)
    assert "epochs is 1" in found["problems"][0]


def test_a_job_says_how_its_rows_are_read(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"ask": "q", "say": "a", "why": "x"}))
    job = tmp_path / "job.yaml"
    chat = "corpus: chat, template: chatml, columns: [ask:prompt, say:completion], ignore_keys: [why]"
    for settings in (chat, "corpus: text, text_field: say"):
        job.write_text(f"data: {{path: {tmp_path}/a.jsonl, {settings}}}\n")
        assert main(["data", "inspect", str(job)]) == 0
        assert "«a" in capsys.readouterr().out


def test_a_template_that_is_not_there_is_bad_usage(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(CHAT))
    assert main(["data", "inspect", str(tmp_path / "a.jsonl"), "--template", "chatlm"]) == 2
    assert "did you mean chatml?" in capsys.readouterr().err
