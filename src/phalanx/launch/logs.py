"""Log files and generation of an attempt in a run directory: attempt_<k>/rank_<r>/{stdout,stderr}.log, .generation.

Every attempt claims the next generation before its ranks start, and every commit checks that the directory still has
it. A rank of an earlier attempt that wakes up (from SIGSTOP, behind a cut link, on a node that was given up) finds
another generation there, and cannot move `latest` under the feet of its successor. Kleppmann calls this a fencing token
("How to do distributed locking", 2016).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import SupersededError
from phalanx.launch.ranks import GENERATION, HEARTBEATS, STORE
from phalanx.launch.verdict import Outcome, spare_name

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


class AttemptLogs:
    """Creates the directories of an attempt when it starts, and sets the ranks' environment.

    Rank 0 keeps the terminal for its live view; the others write to files.

    A resumed run finds the next number, so older logs stay. `store_dir` is private: for the file through which the
    ranks of an attempt find each other, and for heartbeats. With `all_ranks` the lines of the other ranks are shown,
    too."""

    def __init__(self, log_dir: Path, store_dir: Path, environment: Mapping[str, str], all_ranks: bool):
        self._log_dir = log_dir
        self._store_dir = store_dir
        self.environment = environment
        self.all_ranks = all_ranks
        self.attempt_dir = log_dir
        self.owns_terminal = True
        """Whether rank 0 keeps the terminal; otherwise it writes to files, too."""
        self.shared_attempt = ""
        """Name of the next attempt's directory if all nodes share it, whose ranks do not meet through a file; empty for
        the next that is free."""

    def of_replica(self, replica: int) -> AttemptLogs:
        """Returns the logs of the ranks of one replica, the first of which keeps the terminal."""
        name = f"replica_{replica}"
        (self._store_dir / name).mkdir(exist_ok=True)
        own = AttemptLogs(self._log_dir / name, self._store_dir / name, self.environment, self.all_ranks)
        own.owns_terminal = replica == 0
        return own

    def rank_dir(self, rank: int) -> Path:
        return self.attempt_dir / f"rank_{rank}"

    def outcome(self, rank: int) -> Outcome | None:
        """Returns what a rank of the latest attempt has said about its end; None if it has said nothing."""
        return Outcome.read(self.rank_dir(rank)) or Outcome.read(self.heartbeats / spare_name(rank))

    @property
    def heartbeats(self) -> Path:
        """The folder of the heartbeat files of the latest attempt; private, in memory if it has room."""
        return self._store_dir / f"{self.attempt_dir.name}.heartbeats"

    def begin(self, ranks: Sequence[int]) -> dict[str, str]:
        """Creates the directories of an attempt with these ranks. Returns the variables of all of them."""
        shared = self.shared_attempt
        self.attempt_dir = self._log_dir / shared if shared else next_attempt(self._log_dir)
        self.heartbeats.mkdir()
        for rank in ranks:
            self.rank_dir(rank).mkdir(parents=True)
        meeting = {} if shared else {STORE: str(self._store_dir / self.attempt_dir.name)}
        return {**self.environment, HEARTBEATS: str(self.heartbeats), **meeting}


def next_attempt(log_dir: Path) -> Path:
    """Creates log_dir/attempt_<k> for the first free k, safely against concurrent callers."""
    log_dir.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        attempt = log_dir / f"attempt_{number}"
        try:
            attempt.mkdir()
        except FileExistsError:
            number += 1
        else:
            return attempt
