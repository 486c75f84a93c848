"""What ranks tell rank 0 through a directory that they share: that their work is done, or why it failed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.data.files import TEMPORARY
from phalanx.errors import NotFiniteError, PhalanxError, RunError

_FAILED = "failed-"


class Reports:
    """The reports of `ranks` ranks in a directory. Methods raise OSError unless they say otherwise."""

    def __init__(self, directory: Path, ranks: int):
        self.directory, self.ranks = directory, ranks

    def write(self, rank: int, content: Mapping[str, Any]) -> None:
        """Tells rank 0 that a rank has done its work."""
        _write_visibly(self.path(rank), json.dumps(content).encode())

    def read(self, rank: int) -> Mapping[str, Any]:
        """Returns what a rank has told."""
        return json.loads(self.path(rank).read_text(encoding="utf-8"))

    def missing(self) -> list[int]:
        """Returns the ranks that have not finished, as far as this machine sees."""
        return [rank for rank in range(self.ranks) if not self.path(rank).is_file()]

    def fail(self, rank: int, error: PhalanxError) -> None:
        """Tells rank 0 why a rank failed, as far as the file system allows. Raises nothing."""
        with contextlib.suppress(OSError):
            content = json.dumps({"error": type(error).__name__, "message": str(error)})
            _write_visibly(self.directory / f"{_FAILED}{rank:05d}", content.encode())

    def failure(self) -> PhalanxError | None:
        """Returns the error of the first rank that failed."""
        failed = min(self.directory.glob(f"{_FAILED}*"), default=None)
        if failed is None:
            return None
        found = json.loads(failed.read_text(encoding="utf-8"))
        kind = NotFiniteError if found["error"] == "NotFiniteError" else RunError
        return kind(found["message"])

    def path(self, rank: int) -> Path:
        """Returns the file of a rank's report."""
        return self.directory / f"rank-{rank:05d}.json"


def _write_visibly(path: Path, content: bytes) -> None:
    """Writes a message to rank 0, whole or not at all. It need not survive a power cut: then there is no rank 0."""
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    temporary.write_bytes(content)
    temporary.replace(path)
