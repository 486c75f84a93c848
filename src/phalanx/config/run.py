"""The run itself: its name and directory, its processes and what it prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.config.constraints import Above, AtLeast, FolderName, Matches, Printable

_NODES = Matches("[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?", "a number of nodes, such as 2, or a range of it, such as 1:2")
_ENDPOINT = Matches(r"[^\s:]+:[0-9]{1,5}|\[[0-9a-fA-F:.]+\]:[0-9]{1,5}", "HOST:PORT, such as node-a:29400")


@dataclass(frozen=True)
class RunOptions:
    """The run's name, place and processes."""

    name: Annotated[str, FolderName(longest=200)] = ""
    """Name of the run; empty means the job file's name. Its directory is dir/name."""
    dir: Annotated[str, Printable()] = "runs"
    """Folder of the run directories."""
    threads: Annotated[int, AtLeast(0)] = 0
    """CPU threads of each process; 0 divides the cores among the processes of a node."""
    device_budget_mib: Annotated[float, AtLeast(0)] = 0.0
    """On a CPU: MiB of tensors that each rank may have as on a device of that size; what layout.offload keeps on the
    host does not count. Every tensor is counted, which takes time. 0: no limit."""
    timeout_s: Annotated[float, Above(0)] = 600.0
    """Seconds that a collective may wait before the run is declared broken."""
    hang_s: Annotated[float, AtLeast(0)] = 0.0
    """Seconds without a sign of life after which the watchdog names a rank and ends the run. 0 follows the run: 5 of
    its longest steps, 2 of its longest saves, validations and first steps, at least 20, at most half of timeout_s.
    Until the first step is done, and after the last one, timeout_s counts."""
    grace_s: Annotated[float, Above(0)] = 30.0
    """Seconds from a signal to stop until the ranks are killed: as long as a step and a checkpoint take. Ask the
    scheduler for a little more."""
    max_restarts: Annotated[int, AtLeast(0)] = 3
    """Restarts, within restart_window_s, of ranks that were killed, crashed or hang. They resume from the newest valid
    checkpoint. A run of one process has no launcher and is restarted only if this is set."""
    restart_window_s: Annotated[float, Above(0)] = 3600.0
    """Seconds after which a restart no longer counts against max_restarts."""
    nnodes: Annotated[str, _NODES] = ""
    """Nodes of a run whose nodes each have a launcher of ours: 2, or 1:2 for between one and two. Give every node the
    same command. Empty: this machine alone, or the processes of another launcher."""
    rdzv_endpoint: Annotated[str, _ENDPOINT] = ""
    """HOST:PORT where the nodes meet, with nnodes. The node to which HOST belongs is the host, without which there is
    no run. Its port asks for the key in the run directory; nothing is encrypted: use a private network."""
    node_lost_s: Annotated[float, Above(0)] = 10.0
    """Seconds without a sign of life after which a node is lost, and the others go on without it."""
    trackers: tuple[str, ...] = ()
    """Where metrics go besides metrics.jsonl: a list of tensorboard, wandb, mlflow, and what packages add."""
    trackers_wait_s: Annotated[float, AtLeast(0)] = 30.0
    """Most seconds that a finished run waits until its trackers have sent everything; a stopped one waits 3 at most."""
    report: bool = True
    """Write report.html and loss.svg into the run's directory, and renew them while it trains."""
    live: bool = True
    """On a terminal, show the run as a screen that is renewed in place; false shows plain lines, as elsewhere."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Log level of rank 0 on the terminal; other ranks write to their own log files."""
    all_ranks: bool = False
    """Show the log lines of every rank, with the rank in front."""
    sample_tokens: Annotated[int, AtLeast(0)] = 200
    """Tokens of text to generate when training ends; 0 generates none."""
    sample_prompt: str = "\n"
    """Prompt of that text."""

    @property
    def least_nodes(self) -> int:
        """Nodes without which the run waits; 1 without nnodes."""
        return int(self.nnodes.partition(":")[0] or 1)

    @property
    def most_nodes(self) -> int:
        """Nodes that the layout is for; 1 without nnodes."""
        return int(self.nnodes.rpartition(":")[2] or 1)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of rdzv_endpoint."""
        host, _, port = self.rdzv_endpoint.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def hang_limit_s(self) -> float:
        """Most seconds without a sign of life after which a rank hangs."""
        return self.hang_s or self.timeout_s / 2
