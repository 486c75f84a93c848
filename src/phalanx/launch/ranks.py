"""The rank of this process in its group, read from the environment variables of a launcher.

Each launcher has a set of variables. A set counts only if it is complete, and sets are never mixed: taking the rank of
one launcher and the world size of another is how N processes become N solo runs that write one directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import JobError


@dataclass(frozen=True)
class Ranks:
    """The place of one process in the group."""

    rank: int
    """Index among all processes, 0 … world - 1."""
    world: int
    """Number of processes."""
    local_rank: int
    """Index among the processes of this node; also the index of its device."""
    local_world: int | None
    """Number of processes on this node; None if the launcher does not report it."""
    node_rank: int | None
    """Index of this node; None if the launcher does not report it."""
    source: str
    """The launcher: torchrun, pals, openmpi, mpich, slurm, or single."""

    @property
    def one_node(self) -> bool:
        """True if every process is known to be on this machine."""
        return self.local_world == self.world


SINGLE = Ranks(rank=0, world=1, local_rank=0, local_world=1, node_rank=0, source="single")
"""A process without a launcher."""


@dataclass(frozen=True)
class _LauncherVariables:
    """The variables of one launcher; of several names the first that is set counts."""

    source: str
    rank: tuple[str, ...]
    world: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Further variables that must be present for the set to count."""


# `phalanx train` starts its ranks with torchrun's variables. RANK alone proves nothing: a Kubernetes
# PyTorchJob sets RANK and WORLD_SIZE to the index and the number of pods, hence LOCAL_RANK and MASTER_*.
_TORCHRUN = _LauncherVariables(
    source="torchrun",
    rank=("RANK",),
    world=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK",),
    needs=("MASTER_ADDR", "MASTER_PORT"),
)
_SLURM = _LauncherVariables(
    source="slurm",
    rank=("SLURM_PROCID",),
    world=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=("SLURM_LOCALID",),
    node_rank=("SLURM_NODEID",),
    needs=("SLURM_STEP_ID",),  # a batch shell also has SLURM_PROCID=0, but is not a task of a step
)
_SCHEDULERS = (
    _LauncherVariables(
        source="pals",
        rank=("PALS_RANKID",),
        world=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID",),
        local_world=("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
    ),
    _LauncherVariables(
        source="openmpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        world=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        # OMPI_COMM_WORLD_NODE_RANK is the rank on the node over all jobs, not the index of the node
    ),
    _LauncherVariables(
        source="mpich",
        rank=("PMI_RANK",),
        world=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    _SLURM,
)


def detect(env: Mapping[str, str]) -> Ranks | None:
    """Returns the place of this process according to `env`, or None if no launcher started it.

    torchrun's variables are explicit and win; of the others all complete sets have to agree.

    Raises:
        JobError: two launchers disagree; a launcher says that this is one process of several but not which;
            or this is a Slurm batch shell with several tasks and no `srun`.
    """
    explicit = _read(_TORCHRUN, env)
    if explicit:
        return explicit
    found = [ranks for row in _SCHEDULERS if (ranks := _read(row, env))]
    for other in found[1:]:
        if _place(other) != _place(found[0]):
            raise JobError(_conflict(found[0], other, env))
    if found:
        return found[0]
    _refuse_incomplete_variables(env)
    _refuse_batch_shell(env)
    return None


def _read(row: _LauncherVariables, env: Mapping[str, str]) -> Ranks | None:
    rank, world, local_rank = (_number(env, names) for names in (row.rank, row.world, row.local_rank))
    if rank is None or world is None or local_rank is None or any(name not in env for name in row.needs):
        return None
    node_rank = _number(env, row.node_rank)
    local_world = _slurm_local_world(env, node_rank) if row is _SLURM else _number(env, row.local_world)
    if local_world == world:
        node_rank = 0
    if not (rank < world and local_rank < (world if local_world is None else local_world) <= world):
        return None
    if row is _SLURM and world == 1:
        return None  # `srun --pty bash`: the shell is the step's only task; commands in it were not launched
    return Ranks(rank, world, local_rank, local_world, node_rank, row.source)


def _number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    name = _first_set(env, names)
    return int(env[name]) if name and re.fullmatch(r"[0-9]{1,9}", env[name]) else None


def _first_set(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in env), None)


def _slurm_local_world(env: Mapping[str, str], node_rank: int | None) -> int | None:
    """Returns the tasks on this node, from Slurm's run lengths: "4(x2),1" is 4, 4, 1."""
    name = _first_set(env, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if name is None or node_rank is None:
        return None
    nodes = 0
    for part in env[name].split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if not match:
            return None
        nodes += int(match[2] or 1)
        if node_rank < nodes:
            return int(match[1])
    return None


def _place(ranks: Ranks) -> tuple[int, int, int]:
    return ranks.rank, ranks.world, ranks.local_rank


def _shown(row: _LauncherVariables, env: Mapping[str, str]) -> str:
    """Returns the set's variables with their values; only these, because an environment also holds secrets."""
    names = [*row.rank, *row.world, *row.local_rank, *row.local_world, *row.node_rank, *row.needs]
    return " ".join(f"{name}={env[name]}" for name in names if name in env)


def _conflict(one: Ranks, other: Ranks, env: Mapping[str, str]) -> str:
    rows = {row.source: row for row in _SCHEDULERS}
    lines = ["Two launchers claim this process, and they disagree:"]
    lines += [
        f"  {ranks.source}: rank {ranks.rank} of {ranks.world}, local rank {ranks.local_rank} "
        f"({_shown(rows[ranks.source], env)})"
        for ranks in (one, other)
    ]
    remove = {ranks.source: " ".join(f"-u {name}" for name in rows[ranks.source].rank) for ranks in (one, other)}
    lines.append(
        f"Unset the one that did not start it: `env {remove[other.source]} phalanx …` keeps {one.source}, "
        f"`env {remove[one.source]} phalanx …` keeps {other.source}."
    )
    return "\n".join(lines)


def _refuse_incomplete_variables(env: Mapping[str, str]) -> None:
    """Raises JobError for one of N processes without a known rank: each would train alone into one directory."""
    for row in (_TORCHRUN, *_SCHEDULERS):
        rank, world = _first_set(env, row.rank), _first_set(env, row.world)
        if rank is None or world is None or _number(env, row.world) == 1:
            continue
        if row is _SLURM and "SLURM_STEP_ID" not in env:
            continue  # a batch shell: see _refuse_batch_shell
        missing = [name for name in row.needs if name not in env]
        if _first_set(env, row.local_rank) is None:
            missing.append(" or ".join(row.local_rank))
        reason = f"{', '.join(missing)} not set" if missing else "the numbers are inconsistent"
        hint = (
            "Start it with torchrun (in Kubernetes: one torchrun in each pod), or unset RANK and WORLD_SIZE."
            if row is _TORCHRUN
            else f"Start it with the launcher's own command, or unset {rank}."
        )
        raise JobError(
            f"The environment describes one of several processes, but incompletely: {reason}.\n"
            f"  {row.source}: {_shown(row, env)}\n{hint}"
        )


def _refuse_batch_shell(env: Mapping[str, str]) -> None:
    tasks = _number(env, ("SLURM_NTASKS",)) or 1
    if tasks > 1 and "SLURM_STEP_ID" not in env:
        raise JobError(
            f"This is a Slurm allocation of {tasks} tasks (SLURM_NTASKS={tasks}), but the command was not "
            "started with srun, so it would run once, alone.\n"
            "Run `srun phalanx …`, or ask for one task (`--ntasks=1`): phalanx then starts its own processes."
        )
