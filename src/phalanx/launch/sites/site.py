"""A site: the settings of one machine that a launch needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Site:
    """The settings of one machine. A file has these fields; all but name and scheduler may be left out."""

    name: str
    scheduler: Literal["slurm", "pbs"]
    about: str = ""
    """A description of the machine, in one line."""
    source: str = ""
    """Where these settings come from."""
    note: str = ""
    """A note for users, printed with every launch."""
    hosts: list[str] = field(default_factory=list)
    """Regular expressions of which one matches the whole name of a host of this site."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables by which the site is recognised, each with a regular expression for its whole value."""
    devices: int = 0
    """Accelerators of a node, one rank each."""
    launcher: Literal["srun", "pals", "openmpi", "mpich"] | None = None
    """What starts processes inside a job; by default srun on Slurm, and what mpiexec says on PBS."""
    cpu_bind: str = ""
    """The launcher's --cpu-bind if it starts every rank of a full node."""
    cpus_per_rank: int = 0
    """Processors of each rank, if the launcher starts every rank of a full node."""
    exclusive: bool = True
    """Slurm: whether a job that uses every accelerator of its nodes asks for the nodes alone, with all their cores and
    memory."""
    host_suffix: str = ""
    """What follows a node's name in its address on the fast network, such as .hsn.cm.polaris.alcf.anl.gov."""
    account_required: bool = False
    queue: str = ""
    """The queue or partition unless the user names one."""
    queue_option: Literal["partition", "qos"] = "partition"
    """Slurm: the option that takes the queue."""
    time: str = "1:00:00"
    """The time limit unless the user gives one."""
    filesystems: list[str] = field(default_factory=list)
    """PBS: file systems without which a job must not start."""
    directives: list[str] = field(default_factory=list)
    """Further options of sbatch or qsub, one line each; {nodes} stands for the number of nodes."""
    module_paths: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    """Environment modules to load, in this order."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables to set; a user's own values win."""
    prepend: dict[str, str] = field(default_factory=dict)
    """Folders to put first in variables such as LD_LIBRARY_PATH, in batch scripts."""


GENERIC: dict[str, Site] = {
    "slurm": Site("slurm", "slurm", "any cluster with Slurm"),
    "pbs": Site("pbs", "pbs", "any cluster with PBS"),
}
"""What holds where no file describes the machine."""
