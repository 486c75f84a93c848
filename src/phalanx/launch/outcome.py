"""The outcome of a rank as reported by itself: outcome.json in the rank's log directory, read by the launcher."""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.errors import PhalanxError

_FILE = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """The end of one rank."""

    rank: int
    code: int
    """Exit code; phalanx.errors has the table."""
    message: str
    """Message for the user; empty on success."""
    traceback: str | None
    """Set only for a bug: a user's mistake is shown as a message."""
    time: float
    """Seconds since the epoch; the earliest failure is the cause."""

    def write(self, directory: Path) -> None:
        """Writes directory/outcome.json atomically."""
        temporary = directory / f".{_FILE}.{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / _FILE)

    @classmethod
    def read(cls, directory: Path) -> Outcome | None:
        """Returns the outcome in `directory`, or None if the rank ended without writing one."""
        try:
            return cls(**json.loads((directory / _FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None


def describe(error: BaseException) -> tuple[int, str, str | None]:
    """Returns exit code, message and traceback of an exception that ended a run."""
    if isinstance(error, PhalanxError):
        return error.exit_code, str(error), None
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted", None
    if isinstance(error, SystemExit):
        code = error.code or 0
        return (code & 0xFF, "", None) if isinstance(code, int) else (1, str(code), None)
    return 1, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)).rstrip()
