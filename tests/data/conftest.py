"""Fixtures for the data tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.config.job import Data
from phalanx.data import corpus, prepare


@pytest.fixture
def shakespeare() -> Path:
    """The real tiny Shakespeare."""
    shared = os.environ.get("PHALANX_SHARED")
    path = Path(shared or "") / "data" / "tinyshakespeare.txt"
    if not shared or not path.is_file():
        pytest.skip("needs PHALANX_SHARED: a folder with data/tinyshakespeare.txt")
    return path


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 400 characters, so that a small corpus gives several."""
    monkeypatch.setattr(prepare, "SHARD_CHARACTERS", 400)
    for module in (prepare, corpus):
        monkeypatch.setattr(module, "TOKEN_SHARD_TOKENS", 300)


@pytest.fixture
def poems(tmp_path: Path) -> Path:
    """A folder of ten text files, 2,570 characters in all with the separators."""
    folder = tmp_path / "poems"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"poem {number}\n" + "the sea, the sea; " * 13 + f"end {number}.\n")
    return folder


@pytest.fixture
def data(poems: Path, tmp_path: Path, small_shards: None) -> Data:
    """Settings for the folder of text files."""
    return Data(corpus="text", path=str(poems), dir=str(tmp_path / "out"))
