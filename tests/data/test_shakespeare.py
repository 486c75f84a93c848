"""Tiny Shakespeare is found or downloaded, and nothing else passes for it."""

from __future__ import annotations

import io
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from phalanx.data.corpus import find_shakespeare
from phalanx.errors import DataError


def test_a_local_copy_is_checked(shakespeare: Path, tmp_path: Path) -> None:
    assert find_shakespeare(str(shakespeare), tmp_path) == shakespeare
    other = tmp_path / "other.txt"
    other.write_bytes(shakespeare.read_bytes()[:-1] + b"!")
    with pytest.raises(DataError, match=r"other\.txt is not tiny Shakespeare: expected 1,115,394 bytes with sha256"):
        find_shakespeare(str(other), tmp_path)


def test_a_missing_copy_is_not_downloaded_instead(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=nowhere\.txt: there is no such file"):
        find_shakespeare("nowhere.txt", tmp_path)


def test_download_is_kept(shakespeare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append((url, timeout))
        return io.BytesIO(shakespeare.read_bytes())

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    first = find_shakespeare("", tmp_path)
    assert first == tmp_path / "downloads" / "tinyshakespeare.txt" == find_shakespeare("", tmp_path)
    assert first.read_bytes() == shakespeare.read_bytes()
    [(url, timeout)] = asked
    assert url.startswith("https://")
    assert timeout > 0


def test_a_wrong_download_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"<html>log in first</html>"))
    with pytest.raises(DataError, match="is not tiny Shakespeare"):
        find_shakespeare("", tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(url: str, timeout: float) -> io.BytesIO:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(DataError, match=r"Name or service not known.*set data\.path.*data\.corpus=stdlib"):
        find_shakespeare("", tmp_path)
