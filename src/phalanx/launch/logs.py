"""Where the ranks of one attempt write: attempt_<k>/rank_<r>/{stdout,stderr}.log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from phalanx.launch.environment import LOG_DIR, STORE

_TERMINAL = ""  # the agent's word for "inherit the launcher's stream"


class AttemptLogs(LogsSpecs):
    """Makes the directories of an attempt when the agent starts one, and hands the ranks their environment.

    Local rank 0 keeps the terminal, so that it can draw on it; the others write to files.

    Args:
        log_dir: parent of the attempts; a resumed run finds the next number, so older logs stay.
        store_dir: private directory for the file through which the ranks of an attempt find each other.
        environment: further variables of every rank.
        all_ranks: show the lines of the other ranks too.
    """

    def __init__(self, log_dir: Path, store_dir: Path, environment: Mapping[str, str], all_ranks: bool):
        super().__init__(str(log_dir))
        self._store_dir = store_dir
        self._environment = environment
        self._all_ranks = all_ranks
        self.attempt_dir = log_dir
        """Directory of the latest attempt."""

    @property
    def root_log_dir(self) -> str:
        """Parent of the attempts."""
        return str(self._root_log_dir)

    def rank_dir(self, rank: int) -> Path:
        """Directory of one rank in the latest attempt."""
        return self.attempt_dir / f"rank_{rank}"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent for every attempt, with the variables of each local rank, which it may extend."""
        self.attempt_dir = next_attempt(Path(self.root_log_dir))
        destination = LogsDest()
        for local_rank, env in envs.items():
            directory = self.rank_dir(int(env["RANK"]))
            directory.mkdir()
            env.update(self._environment)
            env[LOG_DIR] = str(directory)
            env[STORE] = str(self._store_dir / self.attempt_dir.name)
            to_file = local_rank > 0
            destination.stdouts[local_rank] = str(directory / "stdout.log") if to_file else _TERMINAL
            destination.stderrs[local_rank] = str(directory / "stderr.log") if to_file else _TERMINAL
            destination.error_files[local_rank] = str(directory / "error.json")
            if to_file and self._all_ranks:
                destination.tee_stdouts[local_rank] = destination.stdouts[local_rank]
                destination.tee_stderrs[local_rank] = destination.stderrs[local_rank]
        return destination


def next_attempt(log_dir: Path) -> Path:
    """Makes log_dir/attempt_<k> for the first k that is not taken, also against others who look for one now."""
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
