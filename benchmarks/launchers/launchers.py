"""The launchers: how each starts the job here, and what it needs for that."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.launchers.rig import MPI_ENV, PHALANX, MissingError, Rig

BATCH_WAIT = (sys.executable, str(Path(__file__).with_name("batch.py")))
"""A command that waits for the end of the job that the rest of the words submit."""
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_PORT = 29400


@dataclass(frozen=True)
class Command:
    """How a launcher starts `phalanx train WORDS`: one command per node, or one for all."""

    argv: Callable[[Sequence[str]], list[str]]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    others: Sequence[Callable[[Sequence[str]], list[str]]] = ()
    """The commands of further nodes."""
    program: Callable[[Sequence[str]], list[str]] | None = None
    """The command that starts a program, with its options, in place of the job; None if there is none."""


@dataclass(frozen=True)
class Launcher:
    """A row of the table."""

    key: str
    """For --only."""
    what: str
    """The command that a user types, shortened."""
    nodes: int
    starts: str
    """Who starts the ranks of a node."""
    command: Callable[[Rig], Command]
    """Raises MissingError if something is not here."""
    label: str = ""
    """A regular expression for what the launcher puts in front of a rank's line, with the rank as its group."""
    note: str = ""


def _train(*words: str) -> list[str]:
    return [*PHALANX, "train", "job.yaml", *words]


def launch(*options: str, extra: Sequence[str] = ()) -> Callable[[Sequence[str]], list[str]]:
    """Returns how the words of a `phalanx launch` follow from those of the job; `extra` are the launcher's own."""
    return lambda words: [*PHALANX, "launch", "job.yaml", *words, *options, *(["--", *extra] if extra else [])]


def launch_program(per_node: int, *options: str) -> Callable[[Sequence[str]], list[str]]:
    """Returns how the words of a `phalanx launch` follow from those of a program."""
    return lambda words: [*PHALANX, "launch", *options, "--nproc-per-node", str(per_node), "--", *words]


def _alone(_: Rig) -> Command:
    return Command(lambda words: _train(*words))


def _here(rig: Rig) -> Command:
    return Command(launch("--launcher", "local"), program=launch_program(rig.ranks, "--launcher", "local"))


def _torchrun(rig: Rig) -> Command:
    options = ["--standalone", "--nproc-per-node", str(rig.ranks)]
    return Command(lambda words: [*_TORCHRUN, *options, "-m", "phalanx", *_train(*words)[4:]])


def _torchrun_on_two(rig: Rig) -> Command:
    def on(node: int) -> Callable[[Sequence[str]], list[str]]:
        where = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(rig.per_node)]
        where += ["--master-addr", rig.nodes.hosts[0], "--master-port", str(_PORT)]
        return lambda words: [*rig.nodes.prefix(node), *_TORCHRUN, *where, "-m", "phalanx", *_train(*words)[4:]]

    return Command(on(0), others=[on(1)])


def _hostfile(rig: Rig) -> Command:
    options = ["--hostfile", str(rig.hostfile), "--remote-shell", str(rig.remote_shell)]
    prefix, job, program = rig.nodes.prefix(0), launch(*options), launch_program(rig.per_node, *options)
    return Command(lambda words: [*prefix, *job(words)], program=lambda words: [*prefix, *program(words)])


def _openmpi(rig: Rig) -> Command:
    mpiexec = str(rig.mpiexec("openmpi"))
    options = ["--oversubscribe", "--tag-output", "-n", str(rig.ranks)]
    return Command(lambda words: [mpiexec, *options, *_train(*words)], MPI_ENV)


def _openmpi_on_two(rig: Rig) -> Command:
    mpiexec = str(rig.mpiexec("openmpi"))
    hosts = ",".join(f"{host}:{rig.per_node}" for host in rig.nodes.hosts)
    options = ["--mca", "plm_rsh_agent", str(rig.remote_shell), "--host", hosts, "--tag-output", "-n", str(rig.ranks)]
    prefix = rig.nodes.prefix(0)
    return Command(lambda words: [*prefix, mpiexec, *options, *_train(*words)], MPI_ENV)


def _launch_openmpi(rig: Rig) -> Command:
    rig.mpiexec("openmpi")
    agent = ["--mca", "plm_rsh_agent", str(rig.remote_shell)]
    return _launch_mpi(rig, "openmpi", agent, {**MPI_ENV, "OMPI_MCA_plm_rsh_agent": str(rig.remote_shell)})


def _launch_mpi(rig: Rig, launcher: str, agent: Sequence[str], env: Mapping[str, str]) -> Command:
    """A job takes the remote shell as an option of mpiexec, a program from the environment."""
    options = ["--launcher", launcher, "--hostfile", str(rig.hostfile)]
    job, program = launch(*options, extra=agent), launch_program(rig.per_node, *options)
    prefix = rig.nodes.prefix(0)
    return Command(lambda words: [*prefix, *job(words)], env, program=lambda words: [*prefix, *program(words)])


def _mpich(rig: Rig) -> Command:
    mpiexec = str(rig.mpiexec("mpich"))
    return Command(lambda words: [mpiexec, "-prepend-rank", "-n", str(rig.ranks), *_train(*words)])


def _mpich_on_two(rig: Rig) -> Command:
    options = ["-launcher", "rsh", "-launcher-exec", str(rig.remote_shell), "-hosts", ",".join(rig.nodes.hosts)]
    options += ["-ppn", str(rig.per_node), "-prepend-rank", "-n", str(rig.ranks)]
    prefix, mpiexec = rig.nodes.prefix(0), str(rig.mpiexec("mpich"))
    return Command(lambda words: [*prefix, mpiexec, *options, *_train(*words)])


def _launch_mpich(rig: Rig) -> Command:
    rig.mpiexec("mpich")
    agent = ["-launcher", "rsh", "-launcher-exec", str(rig.remote_shell)]
    return _launch_mpi(rig, "mpich", agent, {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": str(rig.remote_shell)})


def _srun(rig: Rig) -> Command:
    slurm = rig.slurm
    options = ["--nodes=2", f"--ntasks={rig.ranks}", f"--ntasks-per-node={rig.per_node}", "--label"]
    return Command(lambda words: slurm.command("srun", *options, *_train(*words)), slurm.env)


def _salloc(*options: str) -> Callable[[Rig], Command]:
    def command(rig: Rig) -> Command:
        slurm = rig.slurm
        salloc = ["salloc", "--quiet", "--nodes=2", f"--ntasks-per-node={rig.per_node if options else 1}"]
        job, program = launch(*options), launch_program(rig.per_node)
        return Command(
            lambda words: slurm.command(*salloc, *job(words)),
            slurm.env,
            program=None if options else lambda words: slurm.command(*salloc, *program(words)),
        )

    return command


def _submit_slurm(rig: Rig) -> Command:
    slurm = rig.slurm
    options, wait = ("--submit", "slurm", "--nnodes", "2", "--time", "10m"), [*BATCH_WAIT, "slurm"]
    job, program = launch(*options), launch_program(rig.per_node, *options)
    return Command(
        lambda words: slurm.command(*wait, *job(words)),
        slurm.env,
        program=lambda words: slurm.command(*wait, *program(words)),
    )


def _pals(rig: Rig) -> Command:
    mpiexec, prefix = str(rig.pbs / "mpiexec"), rig.nodes.prefix(0)
    options = ["-n", str(rig.ranks), "--ppn", str(rig.per_node), "--hostfile", str(rig.hostfile)]
    env = {"PBS_JOBID": "1.stand-in", "PBS_NODEFILE": str(rig.hostfile)}
    return Command(lambda words: [*prefix, mpiexec, *options, *_train(*words)], env)


def _submit_pbs(rig: Rig) -> Command:
    words_of = launch("--submit", "pbs", "--site", "pbs", "--launcher", "pals", "--nnodes", "2", "--time", "10m")
    wait, prefix = [*BATCH_WAIT, "pbs"], rig.nodes.prefix(0)
    env = {"PATH": f"{rig.pbs}:{os.environ['PATH']}"}
    return Command(lambda words: [*prefix, *wait, *words_of(words)], env)


_TAG, _RANK = r"\[\d+,(\d+)\]<\w+>: ?", r"(\d+): "
_STAND_IN = "stand-in: no PBS server and no PALS was there"
LAUNCHERS = (
    Launcher("train", "phalanx train", 1, "phalanx", _alone),
    Launcher("launch", "phalanx launch", 1, "phalanx", _here),
    Launcher("torchrun", "torchrun", 1, "torchrun", _torchrun),
    Launcher("torchrun-2", "torchrun, two namespaces", 2, "torchrun", _torchrun_on_two),
    Launcher("hostfile", "phalanx launch --hostfile, two namespaces", 2, "phalanx", _hostfile),
    Launcher("openmpi", "mpiexec of Open MPI", 1, "mpiexec", _openmpi, _TAG),
    Launcher("openmpi-2", "mpiexec of Open MPI, two namespaces", 2, "mpiexec", _openmpi_on_two, _TAG),
    Launcher("launch-openmpi", "phalanx launch --launcher openmpi, two namespaces", 2, "phalanx", _launch_openmpi),
    Launcher("mpich", "mpiexec of MPICH", 1, "mpiexec", _mpich, r"\[(\d+)\] "),
    Launcher("mpich-2", "mpiexec of MPICH, two namespaces", 2, "mpiexec", _mpich_on_two, r"\[(\d+)\] "),
    Launcher("launch-mpich", "phalanx launch --launcher mpich, two namespaces", 2, "phalanx", _launch_mpich),
    Launcher("srun", "srun", 2, "srun", _srun, _RANK),
    Launcher("salloc", "phalanx launch in salloc", 2, "phalanx", _salloc()),
    Launcher(
        "salloc-ranks", "phalanx launch --ranks-by launcher in salloc", 2, "srun", _salloc("--ranks-by", "launcher")
    ),
    Launcher("submit-slurm", "phalanx launch --submit slurm", 2, "phalanx", _submit_slurm),
    Launcher("pals", "mpiexec of PALS", 2, "mpiexec", _pals, note=_STAND_IN),
    Launcher("submit-pbs", "phalanx launch --submit pbs", 2, "phalanx", _submit_pbs, note=_STAND_IN),
)

__all__ = ["LAUNCHERS", "Command", "Launcher", "MissingError"]
