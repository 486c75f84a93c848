"""The launchers of MPI: mpiexec of Cray PALS, mpirun of Open MPI, mpiexec of MPICH and Intel MPI (Hydra).

Sources: PALS, `man mpiexec` as ALCF's user guides quote it (https://docs.alcf.anl.gov/aurora/running-jobs-aurora/);
Open MPI, https://docs.open-mpi.org/en/v5.0.x/man-openmpi/man1/mpirun.1.html; Hydra,
https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
"""

from __future__ import annotations

import re
from collections.abc import Callable

from phalanx.errors import JobError
from phalanx.launch.start.command import HostCommand, Launcher, StartRequest, node_words, processes_per_node

BASE = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER", "VIRTUAL_ENV")
"""Names that a process needs, wherever it starts."""

_FLAVORS: dict[Launcher, str] = {
    "openmpi": r"open ?mpi|openrte|prrte|prte",
    "pals": r"\bpals\b",
    "mpich": r"hydra|mpich|intel\(r\) mpi",
}
OTHER_NAMES: dict[Launcher, tuple[str, ...]] = {
    "openmpi": ("mpirun.openmpi", "mpiexec.openmpi"),
    "mpich": ("mpiexec.mpich", "mpiexec.hydra"),
}
"""Other names of each launcher's mpiexec, where several MPIs are installed."""


def flavor_of(version: str) -> Launcher:
    """Returns whose mpiexec it is, by what `mpiexec --version` prints. Raises JobError if it is none that is known."""
    for launcher, pattern in _FLAVORS.items():
        if re.search(pattern, version, re.IGNORECASE):
            return launcher
    first = version.strip().partition("\n")[0][:200]
    raise JobError(f"mpiexec --version says {first!r}: give --launcher pals, openmpi or mpich")


def pals(request: StartRequest, hostfile: str) -> HostCommand:
    """Returns the mpiexec of PALS. It takes the nodes of the job, or those of the host file."""
    grid, per_node = request.grid, processes_per_node(request)
    options = ["-n", str(grid.nodes * per_node), "--ppn", str(per_node), "--envall", "--line-buffer"]
    options += ["--hostfile", hostfile] if hostfile else []
    options += ["--cpu-bind", request.cpu_bind or "none"]
    if request.ranks_by == "launcher" and request.cpus_per_rank:
        options += ["--depth", str(request.cpus_per_rank)]
    return HostCommand(("mpiexec", *options, *request.extra, *node_words(request)), request.hosts)


def openmpi(request: StartRequest, hostfile: str) -> HostCommand:
    """Returns the mpirun of Open MPI. Values of variables are not on the command line, which everybody can read."""
    grid, per_node = request.grid, processes_per_node(request)
    options = ["-n", str(grid.nodes * per_node)]
    # A slot for each process: host files of schedulers have one per processor, or none.
    slots = ",".join(f"{host}:{per_node}" for host in request.hosts)
    options += ["--host", slots] if slots else ["--hostfile", hostfile] if hostfile else []
    options += ["--map-by", f"ppr:{per_node}:node", "--bind-to", request.cpu_bind or "none"]
    for name in sorted({*request.exported.values, *request.exported.secrets}):
        options += ["-x", name]
    return HostCommand(("mpirun", *options, *request.extra, *node_words(request)), request.hosts)


def mpich(request: StartRequest, hostfile: str) -> HostCommand:
    """Returns the mpiexec of MPICH or Intel MPI."""
    grid, per_node = request.grid, processes_per_node(request)
    options = ["-n", str(grid.nodes * per_node), "-ppn", str(per_node)]
    options += ["-hosts", ",".join(request.hosts)] if request.hosts else ["-f", hostfile] if hostfile else []
    options += ["-bind-to", request.cpu_bind or "none"]
    options += ["-genvlist", ",".join(sorted({*BASE, *request.exported.values, *request.exported.secrets}))]
    return HostCommand(("mpiexec", *options, *request.extra, *node_words(request)), request.hosts)


BUILDERS: dict[Launcher, Callable[[StartRequest, str], HostCommand]] = {
    "pals": pals,
    "openmpi": openmpi,
    "mpich": mpich,
}
