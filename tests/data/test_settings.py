"""Settings: what is wrong is said all at once, and the folder's name follows what shapes the tokens."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.config.job import Data
from phalanx.data.settings import overrides, prepared_path
from phalanx.data.tokenizer import train_bpe
from phalanx.errors import DataError, JobError


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
        match=r"data\.corpus: no corpus 'wiki' \(known: stdlib, shakespeare_char, text, mix, chat, preferences, random",
    ):
        prepared_path(Data(corpus="wiki"))
    with pytest.raises(DataError, match=r"data\.tokenizer=wordpiece: expected char, byte, bpe, or the path"):
        prepared_path(Data(tokenizer="wordpiece"))


def test_names_can_be_read(tmp_path: Path) -> None:
    def name(**settings: object) -> str:
        path = prepared_path(Data(dir="d", **settings))  # pyright: ignore[reportArgumentType]
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
    other = replace(base, **changed)  # pyright: ignore[reportArgumentType]
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
    assert prepared_path(base) == prepared_path(replace(base, **changed))  # pyright: ignore[reportArgumentType]


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
