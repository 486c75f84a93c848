"""The log files of the ranks of one attempt: attempt_<k>/rank_<r>/{stdout,stderr}.log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.launch.environment import HEARTBEATS, STORE
from phalanx.launch.outcome import Outcome, spare_name


class AttemptLogs:
    """Creates the directories of an attempt when it starts, and sets the ranks' environment.

    Rank 0 keeps the terminal for its live view; the others write to files.

    Args:
        log_dir: parent of the attempts; a resumed run finds the next number, so older logs stay.
        store_dir: private directory for the file through which the ranks of an attempt find each other.
        environment: further variables of every rank.
        all_ranks: show the lines of the other ranks too.
    """

    def __init__(self, log_dir: Path, store_dir: Path, environment: Mapping[str, str], all_ranks: bool):
        self._log_dir = log_dir
        self._store_dir = store_dir
        self.environment = environment
        """Further variables of every rank."""
        self.all_ranks = all_ranks
        self.attempt_dir = log_dir
        """Directory of the latest attempt."""
        self.shared_attempt = ""
        """Name of the next attempt's directory if all nodes share it, whose ranks do not meet through a file; empty for
        the next that is free."""

    def rank_dir(self, rank: int) -> Path:
        """Returns the directory of one rank in the latest attempt."""
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
