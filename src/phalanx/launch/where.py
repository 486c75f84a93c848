"""Where this process is: inside an allocation of Slurm or PBS, on a login node of one, in a pod, or on a lone host.

A pure function of the environment, of the programs that are installed, and of the node file that PBS names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.errors import JobError
from phalanx.launch.hosts import HostSlots, expand, read_hosts
from phalanx.launch.meet.detected import detected
from phalanx.launch.meet.told import ToldError

Kind = Literal["slurm job", "pbs job", "slurm login node", "pbs login node", "pod", "host"]

IN_WORDS: dict[Kind, str] = {
    "slurm job": "inside an allocation of Slurm",
    "pbs job": "inside a job of PBS",
    "slurm login node": "on a login node of Slurm (sbatch is installed, and there is no allocation)",
    "pbs login node": "on a login node of PBS (qsub is installed, and there is no job)",
    "pod": "in a Kubernetes pod",
    "host": "on a host without a scheduler",
}


@dataclass(frozen=True)
class LaunchPlace:
    """Where a launch begins."""

    kind: Kind
    job_id: str = ""
    """The scheduler's id of the allocation."""
    hosts: tuple[HostSlots, ...] = ()
    """The allocation's nodes, in its order."""
    in_step: bool = False
    """True in a shell that srun started: a further step must share its processors."""
    restarts: int = 0
    """Times that the scheduler has requeued the job."""

    @property
    def is_allocation(self) -> bool:
        """True if the hosts are this job's to use."""
        return self.kind in ("slurm job", "pbs job")


def where(
    env: Mapping[str, str],
    which: Callable[[str], str | None],
    read: Callable[[Path], list[HostSlots]] = read_hosts,
) -> LaunchPlace:
    """Returns the place that `env` describes.

    Args:
        env: the environment of the process.
        which: returns the path of a program, or None if it is not installed.
        read: returns the hosts of a node file.

    Raises:
        JobError: this process is one of several that a launcher started (on all but rank 0 ToldError); an allocation's
            list of nodes is missing or cannot be read.
    """
    _refuse_copies(env)
    if env.get("SLURM_JOB_ID"):
        nodelist = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "")
        return LaunchPlace(
            "slurm job",
            env["SLURM_JOB_ID"],
            tuple(map(HostSlots, _slurm_nodes(nodelist))),
            "SLURM_STEP_ID" in env,
            _count(env.get("SLURM_RESTART_COUNT", "")),
        )
    if env.get("PBS_JOBID"):
        if not env.get("PBS_NODEFILE"):
            raise JobError("PBS_JOBID is set, but PBS_NODEFILE is not: start this inside the job's own shell")
        return LaunchPlace("pbs job", env["PBS_JOBID"], tuple(read(Path(env["PBS_NODEFILE"]))))
    if env.get("KUBERNETES_SERVICE_HOST"):
        return LaunchPlace("pod")
    if which("sbatch"):
        return LaunchPlace("slurm login node")
    if which("qsub"):
        return LaunchPlace("pbs login node")
    return LaunchPlace("host")


def _refuse_copies(env: Mapping[str, str]) -> None:
    # A batch shell has SLURM_NTASKS without a step: that is where a launch belongs.
    ranks = detected({name: value for name, value in env.items() if name != "SLURM_NTASKS" or "SLURM_STEP_ID" in env})
    if ranks is not None and ranks.world > 1:
        message = (
            f"{ranks.source} started {ranks.world} processes of `phalanx launch`, which is called once, in the "
            "allocation's shell, and starts the others itself; in place of this command, let "
            f"{ranks.source} start `phalanx train`"
        )
        raise ToldError(message, JobError.exit_code) if ranks.rank else JobError(message)


def _slurm_nodes(nodelist: str) -> list[str]:
    if not nodelist:
        raise JobError("SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: start this inside the allocation's shell")
    try:
        return expand(nodelist)
    except ValueError as error:
        raise JobError(f"SLURM_JOB_NODELIST: {error}") from None


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0
