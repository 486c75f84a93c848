"""The processes of this machine's ranks in one attempt: started afresh or forked by a standby process, and reaped."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from phalanx.launch.environment import LOG_DIR
from phalanx.launch.logs import AttemptLogs
from phalanx.launch.standby import Standby

_POLL_S = 0.1
_STREAMS = ("stdout", "stderr")


class NodePart(NamedTuple):
    """This node's part in an attempt, and where rank 0 is."""

    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    """The port of the ranks' store. It is 0 for a lone node, whose ranks meet through a file."""

    def variables(self, processes: int, restarts: int, most: int) -> dict[int, dict[str, str]]:
        """Returns the variables of this node's ranks by rank, as torchrun has them; nodes have equally many ranks."""
        world, first = self.nodes * processes, self.node * processes
        common = {
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
            "WORLD_SIZE": world,
            "ROLE_WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": processes,
            "ROLE_NAME": "rank",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "TORCHELASTIC_MAX_RESTARTS": most,
            "TORCHELASTIC_RUN_ID": "phalanx",
            "TORCHELASTIC_USE_AGENT_STORE": False,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        of_each = {first + i: {"RANK": first + i, "ROLE_RANK": first + i, "LOCAL_RANK": i} for i in range(processes)}
        return {rank: {name: str(v) for name, v in (common | own).items()} for rank, own in of_each.items()}


@contextmanager
def ranks(
    command: Sequence[str], environments: Mapping[int, Mapping[str, str]], logs: AttemptLogs, standby: Standby | None
) -> Iterator[dict[int, int]]:
    """Runs `python -m COMMAND` once per rank inside the `with` block; gives the process ids by rank, which are children
    of this process. Every rank leads a session and a process group of its own. What is left is killed at the end.

    Rank 0 keeps the terminal for its live view; the others write to files."""
    pids: dict[int, int] = {}
    over, tails = threading.Event(), []
    start = standby.start if standby else _start
    try:
        for rank, variables in environments.items():
            directory = logs.rank_dir(rank)
            files = [str(directory / f"{stream}.log") if rank else "" for stream in _STREAMS]
            pids[rank] = start(command, {**os.environ, **variables, LOG_DIR: str(directory)}, *files)
            if rank and logs.all_ranks:
                shown = zip(files, _STREAMS, strict=True)
                tails += [threading.Thread(target=_tail, args=(rank, *each, over)) for each in shown]
        for tail in tails:
            tail.start()
        yield pids
    finally:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in pids.values():
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        over.set()
        for tail in tails:
            if tail.ident:
                tail.join()


def _tail(rank: int, name: str, stream: str, over: threading.Event) -> None:
    """Shows the lines that a rank writes to a file, until it has ended."""
    begun = ""
    with open(name, "a+", errors="replace") as file:
        file.seek(0)
        while True:
            last = over.is_set()  # read first: what is written until then is shown
            while more := file.readline():
                begun += more
                if begun.endswith("\n"):
                    getattr(sys, stream).write(f"[rank {rank}] {begun}")
                    begun = ""
            if last:
                if begun:
                    getattr(sys, stream).write(f"[rank {rank}] {begun}\n")
                return
            over.wait(_POLL_S)


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
