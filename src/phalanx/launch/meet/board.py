"""Tells all ranks what rank 0 says, through a file that they share: for launchers that offer nothing better.

The file lies in a folder that only this user can write, and its name comes from the launcher's own name of the job. It
may be left over from an earlier job of that name: whoever reads it asks what listens there for the token.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from phalanx.bounded import read_text
from phalanx.data.files import write_atomic
from phalanx.errors import RunError
from phalanx.launch.meet.offer import Offer

_IN_MEMORY = Path("/dev/shm")
_LONGEST = 4096
_LEFT_OVER_S = 7 * 86400.0


@dataclass(frozen=True)
class Board:
    """The file of one launch."""

    path: Path

    @classmethod
    def of(cls, key: str, env: Mapping[str, str], one_node: bool) -> Board:
        """Returns the board of the launch that is called `key`: in memory if its ranks are on one node, otherwise in
        the user's directory for state ($XDG_STATE_HOME, by default ~/.local/state), which nodes usually share."""
        folder = Path(env.get("XDG_STATE_HOME") or Path(env.get("HOME", "/"), ".local", "state"), "phalanx", "ranks")
        if one_node and os.access(_IN_MEMORY, os.W_OK | os.X_OK):
            folder = _IN_MEMORY / f"phalanx-ranks-{os.getuid()}"
        return cls(folder / sha256(key.encode()).hexdigest()[:24])

    def write(self, offer: Offer) -> None:
        """Writes rank 0's offer. Raises RunError if the folder cannot be made, or others can write to it."""
        folder = self.path.parent
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            _require_private(folder)
            _remove_left_over(folder)
            write_atomic(self.path, offer.encode().encode())
        except OSError as error:
            raise RunError(
                f"Rank 0 cannot tell the others where it listens: {error.filename or folder}: {error.strerror or error}"
                ". Set XDG_STATE_HOME to a folder that all nodes share, or set MASTER_ADDR and MASTER_PORT."
            ) from error

    def read(self) -> list[Offer]:
        """Returns the offer, if there is one yet."""
        with suppress(OSError, ValueError, RunError):
            os.listdir(self.path.parent)  # or NFS may remember for a while that there was no such file
            _require_private(self.path.parent)
            return [Offer.decode(read_text(self.path, _LONGEST).strip())]
        return []

    def remove(self) -> None:
        """Removes the file once all ranks have met."""
        with suppress(OSError):
            self.path.unlink()


def _require_private(folder: Path) -> None:
    """Raises RunError unless only this user can write to a folder, which may be in a place where others can."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise RunError(
            f"{folder}, where the ranks leave word for each other, belongs to another user or is writable by others: "
            "remove it, or set MASTER_ADDR and MASTER_PORT"
        )


def _remove_left_over(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LEFT_OVER_S:
                path.unlink()
