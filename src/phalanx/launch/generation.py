"""The generation of a run directory: the attempt that may commit checkpoints to it.

Every attempt claims the next generation before its ranks start, and every commit checks that the directory still has
it. A rank of an earlier attempt that wakes up (from SIGSTOP, behind a cut link, on a node that was given up) finds
another generation there, and cannot move `latest` under the feet of its successor. Kleppmann calls this a fencing token
("How to do distributed locking", 2016).
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from phalanx.errors import SupersededError
from phalanx.launch.environment import GENERATION

FILE = ".generation"


def claim(directory: Path) -> str:
    """Makes a new generation the directory's, durably, and returns it: "3 9f86d081".

    The random part keeps the first generation of a directory from being that of another directory that was there before
    under the same name."""
    counted = re.match(r"[0-9]{1,9}", newest_of(directory))
    generation = f"{int(counted[0]) + 1 if counted else 1} {secrets.token_hex(4)}"
    temporary = directory / f"{FILE}.{os.getpid()}"
    with temporary.open("w", encoding="ascii") as file:
        file.write(generation)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / FILE)
    return generation


def check(directory: Path) -> None:
    """Raises SupersededError if this process belongs to an attempt whose generation is no longer the directory's.

    Call it right before a checkpoint becomes visible. Processes without a generation (tests) are not checked."""
    own = os.environ.get(GENERATION)
    if own is not None and (newest := newest_of(directory)) != own:
        raise SupersededError(
            f"this process belongs to generation {own.split()[0]} of {directory}, which is now at generation "
            f"{newest.split()[0] if newest else 'none'}: a later attempt has taken over, and this one must not write"
        )


def newest_of(directory: Path) -> str:
    """Returns the directory's generation, empty if none was claimed."""
    try:
        with (directory / FILE).open(encoding="ascii", errors="replace") as file:
            return file.read(100)
    except FileNotFoundError:
        return ""
