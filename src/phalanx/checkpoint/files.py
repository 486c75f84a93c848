"""Durable changes to directories: what is written, renamed or removed survives a power cut. Imports no torch."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

REMOVED = ".removed-"
"""Prefix of directories that are being deleted."""


def sync(path: Path) -> None:
    """Waits until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, target: Path) -> None:
    """Renames a file or directory within its parent directory, durably."""
    path.rename(target)
    sync(target.parent)


def set_aside(path: Path, prefix: str) -> Path:
    """Renames `path` to PREFIX + NAME-1, or -2, ..., the first that is free. Returns the new path."""
    for number in itertools.count(1):
        target = path.with_name(f"{prefix}{path.name}-{number}")
        if not target.exists():
            rename(path, target)
            return target
    raise AssertionError("there is always a free number")


def remove(path: Path) -> None:
    """Deletes a directory. It is renamed first, so that an interrupted removal leaves no half of it under its name."""
    hidden = path if path.name.startswith(REMOVED) else set_aside(path, REMOVED)
    shutil.rmtree(hidden)
