"""The outcome of a rank as reported by itself: outcome.json in the rank's log directory, read by the launcher."""

from __future__ import annotations

import json
import os
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.bounded import field, parse_json, read_bytes
from phalanx.echo import shortened
from phalanx.errors import PhalanxError
from phalanx.registry import blamed

_FILE = "outcome.json"
_MOST_BYTES = 2**22
_MOST_CHARACTERS = 100_000  # of a message or a traceback; a character may take 12 bytes in JSON
_ROOM = ".outcome.room"
_ROOM_BYTES = 1 << 15


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
        """Writes directory/outcome.json atomically, in the room that `reserve_room` has kept for it."""
        (directory / _ROOM).unlink(missing_ok=True)
        temporary = directory / f".{_FILE}.{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / _FILE)

    @classmethod
    def read(cls, directory: Path) -> Outcome | None:
        """Returns the outcome in `directory`, or None if the rank ended without writing one. A file that no rank has
        written is none: its exit code and its standard error are known anyway."""
        try:
            stored = parse_json(read_bytes(directory / _FILE, _MOST_BYTES), lenient=True)
            return cls(
                rank=field(stored, "rank", int),
                code=field(stored, "code", int),
                message=field(stored, "message", str),
                traceback=None if stored.get("traceback") is None else field(stored, "traceback", str),
                time=field(stored, "time", float),
            )
        except (OSError, ValueError):
            return None


def spare_name(rank: int) -> str:
    """Returns the name of the directory, beside the heartbeats in memory, for an outcome for which a disk has no
    room."""
    return f"rank_{rank}.outcome"


def reserve_room(directory: Path) -> None:
    """Keeps space for an outcome, so that a rank that ends because the disk is full can say so."""
    with suppress(OSError), (directory / _ROOM).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)


def describe(error: BaseException) -> tuple[int, str, str | None]:
    """Returns exit code, message and traceback of an exception that ended a run."""
    if isinstance(error, PhalanxError):
        return error.exit_code, shortened(f"{blamed(error)}{error}", _MOST_CHARACTERS), None
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted", None
    if isinstance(error, SystemExit):
        code = error.code or 0
        return (code & 0xFF, "", None) if isinstance(code, int) else (1, str(code), None)
    trace = "".join(traceback.format_exception(error)).rstrip()
    message = f"{blamed(error)}{type(error).__name__}: {error}"
    return 1, shortened(message, _MOST_CHARACTERS), shortened(trace, _MOST_CHARACTERS)
