"""The log files of the ranks of one attempt: attempt_<k>/rank_<r>/{stdout,stderr}.log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from phalanx.launch.environment import HEARTBEATS, LOG_DIR, STORE
from phalanx.launch.outcome import Outcome, spare_name

_TERMINAL = ""  # means "inherit the launcher's stream" to the agent


class AttemptLogs(LogsSpecs):
    """Creates the directories of an attempt when the agent starts one, and sets the ranks' environment.

    Rank 0 keeps the terminal for its live view; the others write to files.

    Args:
        log_dir: parent of the attempts; a resumed run finds the next number, so older logs stay.
        store_dir: private directory for the file through which the ranks of an attempt find each other.
        environment: further variables of every rank.
        all_ranks: show the lines of the other ranks too.
    """

    def __init__(self, log_dir: Path, store_dir: Path, environment: Mapping[str, str], all_ranks: bool):
        super().__init__(str(log_dir))
        self._store_dir = store_dir
        self.environment = environment
        """Further variables of every rank."""
        self._all_ranks = all_ranks
        self.attempt_dir = log_dir
        """Directory of the latest attempt."""
        self.shared_attempt = ""
        """Name of the next attempt's directory if all nodes share it, whose ranks do not meet through a file; empty for
        the next that is free."""

    @property
    def root_log_dir(self) -> str:
        """The parent directory of the attempts."""
        return str(self._root_log_dir)

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

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Creates an attempt's directories. The agent passes the variables of each local rank, to which it may add."""
        shared = self.shared_attempt
        self.attempt_dir = Path(self.root_log_dir, shared) if shared else next_attempt(Path(self.root_log_dir))
        self.heartbeats.mkdir()
        destination = LogsDest()
        for local_rank, env in envs.items():
            directory = self.rank_dir(int(env["RANK"]))
            directory.mkdir(parents=True)
            env.update(self.environment)
            env[LOG_DIR] = str(directory)
            env[HEARTBEATS] = str(self.heartbeats)
            if not shared:
                env[STORE] = str(self._store_dir / self.attempt_dir.name)
            to_file = int(env["RANK"]) > 0
            destination.stdouts[local_rank] = str(directory / "stdout.log") if to_file else _TERMINAL
            destination.stderrs[local_rank] = str(directory / "stderr.log") if to_file else _TERMINAL
            destination.error_files[local_rank] = str(directory / "error.json")
            if to_file and self._all_ranks:
                destination.tee_stdouts[local_rank] = destination.stdouts[local_rank]
                destination.tee_stderrs[local_rank] = destination.stderrs[local_rank]
        return destination


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
