"""Tiny Shakespeare (karpathy/char-rnn), the corpus of nanoGPT's published results: found or downloaded, and checked."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from pathlib import Path

from phalanx.bounded import read_bytes
from phalanx.data.files import write_atomic
from phalanx.errors import DataError

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BYTES = 1_115_394
TIMEOUT_S = 30


def find_shakespeare(path: str, data_dir: Path) -> Path:
    """Returns the verified file: `path` if given, else `data_dir/downloads/tinyshakespeare.txt`, downloaded if absent.

    Raises DataError if it is not available or its text differs.
    """
    file = Path(path).expanduser() if path else data_dir / "downloads" / "tinyshakespeare.txt"
    if os.path.isfile(file):
        _check(_content(file), str(file))
    elif path:
        raise DataError(f"data.path={path}: there is no such file (corpus shakespeare_char)")
    else:
        content = _download()
        _check(content, URL)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, content)
    return file


def _content(file: Path) -> bytes:
    try:
        return read_bytes(file, 2 * BYTES)
    except OSError as error:
        raise DataError(f"cannot read {file} (corpus shakespeare_char): {error.strerror}") from None


def _download() -> bytes:
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT_S) as response:
            return response.read(BYTES + 1)
    except (OSError, urllib.error.URLError) as error:
        raise DataError(
            f"could not download tiny Shakespeare from {URL}: {error}. Fetch it on a machine with a network and set "
            "data.path to it, or use data.corpus=stdlib, which needs no network"
        ) from error


def _check(content: bytes, where: str) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise DataError(
            f"{where} is not tiny Shakespeare: expected {BYTES:,} bytes with sha256 {SHA256}, found {len(content):,} "
            f"with {digest}. For your own text set data.corpus=text; remove a damaged download to fetch it again"
        )
