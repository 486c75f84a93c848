"""Chooses the launcher for a place, and builds its commands."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from phalanx.errors import JobError
from phalanx.launch.sites.site import Site
from phalanx.launch.start import mpi, shell, srun
from phalanx.launch.start.command import HostCommand, Launcher, StartRequest
from phalanx.launch.where import IN_WORDS, LaunchPlace

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
        return mpi.flavor_of(text) if text else _without_mpi(nodes)
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
    if not program:
        return ""
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
    return [mpi.BUILDERS[launcher](request, hostfile)]
