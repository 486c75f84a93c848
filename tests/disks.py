"""Filesystems of a test: small ones that become full, and ones that nobody can write."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mounts a tmpfs at a new folder, such as `size=64k`. Skips the test where that is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "phalanx-test", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a filesystem needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fills the filesystem of a folder, and returns the file that does."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast
