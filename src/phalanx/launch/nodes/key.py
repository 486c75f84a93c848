"""The key of a run on several nodes: a file in the run directory that only its user can read.

A node shows the key when it joins. A stranger who reaches the port cannot, and neither can a node whose run directory
is on a disk of its own. The key is not encrypted on its way.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from phalanx.data.files import open_regular

FILE = ".nodes_key"
_BYTES = 16


def make(directory: Path) -> str:
    """Returns the key of a run directory; makes it if there is none. Raises OSError, or RunError for a file that is not
    a regular one."""
    with suppress(FileExistsError):
        descriptor = os.open(directory / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_BYTES))
            file.flush()
            os.fsync(file.fileno())
    return known(directory)


def known(directory: Path) -> str:
    """Returns the key as this node sees it; empty if it sees none."""
    try:
        os.listdir(directory)  # or NFS may remember for a while that there was no such file
        with os.fdopen(open_regular(directory / FILE, os.O_RDONLY), encoding="ascii", errors="replace") as file:
            return file.read(4 * _BYTES)
    except OSError:
        return ""
