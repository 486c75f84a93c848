"""The processes of this machine's ranks in one attempt: started afresh or forked by a standby process, and reaped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch.distributed.elastic.multiprocessing import LogsDest
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from phalanx.launch.standby import Standby


class RankProcesses:
    """Every rank leads a session and a process group of its own.

    Args:
        command: the words after `python -m`.
        environments: the variables of each local rank, beside those of this process.
        logs: where each one's output goes.
        standby: a process that has imported what ranks import, and is ready; None starts Python anew for every rank.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        logs: LogsDest,
        standby: Standby | None,
    ):
        self.pids: dict[int, int] = {}
        """Process ids by local rank; the processes are children of this one."""
        self._tails = [
            TailLog(
                name, files, stream, {local_rank: f"[rank {env['RANK']}] " for local_rank, env in environments.items()}
            )
            for name, files, stream in (
                ("stdout", logs.tee_stdouts, sys.stdout),
                ("stderr", logs.tee_stderrs, sys.stderr),
            )
        ]
        try:
            for local_rank, variables in environments.items():
                start = standby.start if standby else _start
                env = {**os.environ, **variables}
                self.pids[local_rank] = start(command, env, logs.stdouts[local_rank], logs.stderrs[local_rank])
        except OSError:
            self.end()
            raise
        for tail in self._tails:
            tail.start()

    def end(self) -> None:
        """Kills what is left of the ranks, with their children, and reaps them."""
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self.pids.values():
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.pids = {}
        for tail in self._tails:
            tail.stop()
        self._tails = []


def _start(command: Sequence[str], environment: Mapping[str, str], stdout: str, stderr: str) -> int:
    """Starts Python for a rank, as Standby.start does."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    files = [(descriptor, name) for descriptor, name in ((1, stdout), (2, stderr)) if name]
    return os.posix_spawn(
        sys.executable,
        # -P keeps the ranks from importing a torch.py of the current directory
        [sys.executable, "-P", "-m", *command],
        environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, descriptor, name, flags, 0o666) for descriptor, name in files],
        setsid=True,
    )
