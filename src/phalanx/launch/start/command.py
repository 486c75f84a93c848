"""What every way to start a job needs to know, and the words that it starts."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.launch.exported import Exported
from phalanx.launch.grid import ProcessGrid

RanksBy = Literal["phalanx", "launcher", "torchrun"]
Launcher = Literal["local", "srun", "pals", "openmpi", "mpich", "ssh"]

PORTS = range(10_000, 32_000)
"""Ports for a rendezvous: above those of services, below those that Linux gives to clients by default."""
_NO_EPHEMERAL = range(0)


@dataclass(frozen=True)
class StartRequest:
    """A job, and where and how its processes start."""

    words: tuple[str, ...]
    """The words after `phalanx train`."""
    grid: ProcessGrid
    hosts: tuple[str, ...]
    """The hosts to use, the first of which is the host of the rendezvous; empty if only the launcher knows them."""
    endpoint: tuple[str, int] | None
    """Where the nodes meet; None on one node."""
    ranks_by: RanksBy
    exported: Exported
    python: str
    """Path of the interpreter, the same on every host."""
    folder: str
    """The working directory, the same on every host."""
    job_id: str = ""
    cpu_bind: str = ""
    """The launcher's own binding of processes to processors; empty leaves them unbound."""
    cpus_per_rank: int = 0
    """Processors of a rank for launchers that ask; 0 leaves it to them."""
    devices: int = 0
    """Accelerators of a node."""
    in_step: bool = False
    """True inside a step of Slurm."""
    stop_after_s: int = 0
    """Seconds after which the run is asked to stop with a checkpoint; 0 is never."""
    await_host_s: int = 0
    """Seconds for which a node waits until the endpoint's host has an address."""
    extra: tuple[str, ...] = ()
    """The user's own options of the launcher."""
    remote_shell: tuple[str, ...] = ()
    grace_s: float = 30.0
    """Seconds that the nodes need from the first end to the last."""


@dataclass(frozen=True)
class HostCommand:
    """A command that runs here, and the hosts on which its processes run."""

    argv: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    stdin: str = ""
    """What is written to its standard input, in words; empty if nothing is."""

    @property
    def shell(self) -> str:
        """The command as it may be pasted into a shell."""
        return shlex.join(self.argv)


def processes_per_node(request: StartRequest) -> int:
    """Returns the processes that the launcher starts on each node: every rank, or one that starts them."""
    return request.grid.per_node if request.ranks_by == "launcher" else 1


def node_words(request: StartRequest) -> tuple[str, ...]:
    """Returns what the launcher starts on each node, or for each rank if it starts them all."""
    python = (request.python, "-P", "-m")
    if request.ranks_by == "launcher":
        return (*python, "phalanx", "train", *request.words)
    if request.ranks_by == "torchrun":
        return (*python, "torch.distributed.run", *_torchrun_words(request), "-m", "phalanx", "train", *request.words)
    flags = [f"--stop-after={request.stop_after_s}"] if request.stop_after_s else []
    flags += [f"--await-host={request.await_host_s}"] if request.await_host_s else []
    return (*python, "phalanx.cli.node", *flags, *request.words, *rendezvous_words(request))


def rendezvous_words(request: StartRequest) -> tuple[str, ...]:
    """Returns the overrides by which node launchers of ours meet."""
    if request.endpoint is None:
        return ()
    return (f"run.nnodes={request.grid.nnodes}", f"run.rdzv_endpoint={shown(request.endpoint)}")


def _torchrun_words(request: StartRequest) -> tuple[str, ...]:
    # By default SIGUSR1, by which Slurm announces the end of the time, ends torchrun, and its ranks with it.
    signals = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    patience = ("--shutdown-timeout", str(round(request.grace_s)))
    per_node = ("--nproc-per-node", str(request.grid.per_node), *signals, *patience)
    if request.endpoint is None:
        return ("--standalone", *per_node)
    meets = ("--rdzv-backend", "c10d", "--rdzv-endpoint", shown(request.endpoint))
    run_id = re.sub(r"[^\w.-]", "-", request.job_id) or "phalanx"
    return ("--nnodes", request.grid.nnodes, *per_node, *meets, "--rdzv-id", run_id)


def shown(endpoint: tuple[str, int]) -> str:
    """Returns HOST:PORT."""
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_for(key: str, ephemeral: range = _NO_EPHEMERAL) -> int:
    """Returns the port of a rendezvous: a hash of `key` (the job's id and its restarts, or the run's directory) into
    PORTS, outside the `ephemeral` ports. So two jobs on one node hardly collide, and every node finds the same."""
    legal = [port for port in PORTS if port not in ephemeral] or list(PORTS)
    return legal[int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % len(legal)]


def ephemeral_ports(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> range:
    """Returns the ports that this kernel gives to clients; none if it does not say."""
    try:
        first, last = map(int, path.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return _NO_EPHEMERAL
    return range(first, last + 1)


def environment(request: StartRequest, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the command: this process's, with the variables that are exported."""
    return {**env, **request.exported.values}
