"""Chooses the launcher for a place, and builds its commands."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace

from phalanx.errors import JobError
from phalanx.launch.sites.site import Site
from phalanx.launch.start import shell, srun
from phalanx.launch.start.command import HostCommand, Launcher, StartRequest, node_words, processes_per_node
from phalanx.launch.where import IN_WORDS, LaunchPlace

# The launchers of MPI: mpiexec of Cray PALS, mpirun of Open MPI, mpiexec of MPICH and Intel MPI (Hydra).
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


_VERSION_S = 20.0


def launcher_for(
    place: LaunchPlace,
    *,
    nodes: int,
    wanted: Launcher | None,
    hosts_given: bool,
    site: Site | None,
    version: Callable[[], str],
) -> Launcher:
    """Returns the launcher: the wanted one, or the one of the place.

    Args:
        place: where this is.
        nodes: nodes of the job.
        wanted: --launcher; None if the user leaves it open.
        hosts_given: whether there is a host file.
        site: the site's settings, if it is known.
        version: returns what `mpiexec --version` prints; empty if there is none.

    Raises JobError where nothing can start the job, with the ways to start it.
    """
    if wanted:
        return wanted
    if hosts_given:
        return "ssh"
    if place.kind == "slurm job":
        return "srun"
    if place.kind == "pbs job":
        if site and site.launcher:
            return site.launcher
        text = version()
        return flavor_of(text) if text else _without_mpi(nodes)
    if place.kind in ("slurm login node", "pbs login node"):
        scheduler, allocation = ("slurm", "salloc") if place.kind.startswith("slurm") else ("pbs", "qsub -I")
        raise JobError(
            f"this is {IN_WORDS[place.kind]}: submit the job (--submit {scheduler}), call this inside an allocation "
            f"({allocation}), or run it on this very host (--launcher local)"
        )
    if nodes > 1:
        raise JobError(
            f"the job has {nodes} nodes, but this is {IN_WORDS[place.kind]}: "
            + (
                "submit it (--submit k8s)"
                if place.kind == "pod"
                else "name the hosts (--hostfile FILE, one per line, reached over ssh), or run all ranks here "
                "(--nnodes 1)"
            )
        )
    return "local"


def _without_mpi(nodes: int) -> Launcher:
    if nodes > 1:
        raise JobError("this job of PBS has several nodes, but no mpiexec: load its module, or give --launcher ssh")
    return "local"


def mpiexec_version(which: Callable[[str], str | None]) -> str:
    """Returns what this host's mpiexec prints about itself; empty if there is none."""
    program = which("mpiexec") or which("mpirun")
    return _version(program) if program else ""


def with_own_mpiexec(
    launcher: Launcher, command: HostCommand, which: Callable[[str], str | None], *, starts: bool
) -> HostCommand:
    """Returns the command with the launcher's own mpiexec. Where several MPIs are installed without modules, as on
    Debian, they are called mpiexec.openmpi and mpiexec.mpich, and mpiexec is one of them.

    Args:
        launcher: the launcher.
        command: its command.
        which: returns the path of a program, or None if it is not installed.
        starts: whether the command is to be started here: then JobError is raised if its mpiexec is another's.
    """
    program = which(command.argv[0]) if launcher in BUILDERS else None
    if program is None:
        return command
    try:
        flavor = flavor_of(_version(program))
    except JobError:  # a site's own: the user knows what it is
        return command
    if flavor == launcher:
        return command
    for name in OTHER_NAMES.get(launcher, ()):
        if which(name):
            return replace(command, argv=(name, *command.argv[1:]))
    if starts:
        raise JobError(
            f"{command.argv[0]} is that of {flavor} here, not of {launcher}: load the module of {launcher}, or give "
            f"--launcher {flavor}"
        )
    return command


def _version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, errors="replace", timeout=_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def commands_of(launcher: Launcher, request: StartRequest, hostfile: str = "") -> list[HostCommand]:
    """Returns the commands that start the job: one, except over remote shells. Raises JobError for what the launcher
    cannot do."""
    if launcher in ("local", "ssh") and request.extra:
        raise JobError(f"words after -- are for srun or mpiexec, but the launcher is {launcher}: {request.extra[0]}")
    if launcher in ("local", "ssh") and request.ranks_by == "launcher":
        raise JobError(f"--ranks-by launcher needs srun or mpiexec, but the launcher is {launcher}")
    if launcher == "local" and request.grid.nodes > 1:
        raise JobError(f"--launcher local is one host, but the job has {request.grid.nodes} nodes")
    if request.stop_after_s and request.ranks_by != "phalanx":
        raise JobError(f"--stop-after needs launchers of ours (--ranks-by phalanx, not {request.ranks_by})")
    if launcher == "local":
        return [shell.local(request)]
    if launcher == "ssh":
        if not request.hosts:
            raise JobError("--launcher ssh needs hosts: --hostfile FILE, one per line")
        return shell.remote(request)
    if launcher == "srun":
        return [srun.command(request)]
    return [BUILDERS[launcher](request, hostfile)]
