"""The two nodes, the Slurm cluster, the remote shell and the MPI commands of the bench, each made when first used."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from benchmarks.chaos.machine import missing as lacking
from benchmarks.chaos.nodes import Nodes
from benchmarks.launchers import cluster, standins
from benchmarks.launchers.cluster import Slurm
from benchmarks.launchers.job import NODES
from phalanx.errors import JobError
from phalanx.launch.start import flavor_of

PHALANX = (sys.executable, "-P", "-m", "phalanx")
MPI_ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI starts nothing for root without these."""
_VERSION_S = 30.0


class MissingError(Exception):
    """Something that a launcher needs is not here; the message says what."""


class RunningSlurm:
    """The cluster that sinfo shows here: its nodes are other machines."""

    env: dict[str, str] = {}  # noqa: RUF012 - the environment that this process has
    dies = False

    def command(self, *argv: str) -> list[str]:
        """Returns the words that run a command where jobs are submitted."""
        return list(argv)


class OwnSlurm:
    """A cluster of two namespaces, which may lose a node."""

    dies = True

    def __init__(self, slurm: Slurm):
        self.slurm, self.env = slurm, slurm.env

    def command(self, *argv: str) -> list[str]:
        """Returns the words that run a command where jobs are submitted: on the first node."""
        return [*self.slurm.nodes.prefix(0), *argv]


class Rig:
    """The means of the bench, in one folder, with `per_node` ranks on each of two nodes. A context manager; properties
    raise MissingError."""

    def __init__(self, folder: Path, per_node: int):
        self.folder, self.per_node, self.ranks = folder, per_node, NODES * per_node
        self._stack = ExitStack()

    def __enter__(self) -> Rig:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def nodes(self) -> Nodes:
        """Two network namespaces with hostnames of their own."""
        if reason := lacking("namespaces"):
            raise MissingError(f"two network namespaces: {reason}")
        return self._stack.enter_context(Nodes("node"))

    @cached_property
    def slurm(self) -> RunningSlurm | OwnSlurm:
        """The Slurm cluster that is here if its nodes are two machines, else one of two namespaces."""
        if _two_idle_machines():
            return RunningSlurm()
        if absent := cluster.missing():
            raise MissingError(f"not installed: {', '.join(absent)}")
        return OwnSlurm(self._stack.enter_context(Slurm(self.nodes, self.folder / "slurm")))

    @cached_property
    def hostfile(self) -> Path:
        """A file with the two nodes."""
        file = self.folder / "hosts"
        file.write_text("".join(f"{host}\n" for host in self.nodes.hosts), encoding="utf-8")
        return file

    @cached_property
    def remote_shell(self) -> Path:
        """A program like ssh: it takes a host and a command for its shell, and enters the host's namespace."""
        lines = ["#!/bin/sh", "host=$1; shift", "case $host in"]
        for number, host in enumerate(self.nodes.hosts):
            lines.append(f'{host}) exec {shlex.join(self.nodes.prefix(number))} /bin/sh -c "$*" ;;')
        lines += ['*) echo "no such host: $host" >&2; exit 255 ;;', "esac"]
        return _program(self.folder / "remote-shell", "\n".join(lines))

    def mpiexec(self, flavor: str) -> Path:
        """Returns the mpiexec of Open MPI or MPICH. Where both are installed, its name has the flavor's."""
        for name in (f"mpiexec.{flavor}", "mpiexec", "mpirun"):
            program = shutil.which(name)
            if program and _flavor(program) == flavor:
                return Path(program)
        raise MissingError("not installed")

    @cached_property
    def pbs(self) -> Path:
        """The folder with the stand-ins for qsub and mpiexec."""
        folder = self.folder / "bin-pbs"
        standins.write(folder, sys.executable, self.hostfile, self.remote_shell)
        return folder


def _program(file: Path, text: str) -> Path:
    file.write_text(f"{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def _flavor(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False)
        return flavor_of(done.stdout + done.stderr)
    except (OSError, subprocess.TimeoutExpired, JobError):
        return ""


def _two_idle_machines() -> bool:
    """Returns whether sinfo shows two idle nodes here, which are not two names of one machine."""
    if shutil.which("sinfo") is None:
        return False
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--Format=NodeHost:200"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return not done.returncode and len(set(done.stdout.split())) >= 2
