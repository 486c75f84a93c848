"""The rank of this process in its group, read from the environment variables of a launcher.

Each launcher has a set of variables. A set counts only if it is complete, and sets are never mixed: taking the rank of
one launcher and the world size of another is how N processes become N solo runs that write one directory.

Here are also the names of the variables between our own launcher and its ranks, and the errors that many ranks have
and one of them prints.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import JobError, RunError

LAUNCHER_PID = "PHALANX_LAUNCHER_PID"  # process id that the rank's parent must have
LOG_DIR = "PHALANX_LOG_DIR"  # directory of the rank's logs and of its outcome.json
STORE = "PHALANX_STORE"  # file through which the ranks of one attempt find each other
HEARTBEATS = "PHALANX_HEARTBEATS"  # folder of the heartbeat files of one attempt (launch/watchdog)
GENERATION = "PHALANX_GENERATION"
"""Generation of the run directory that the attempt has claimed (launch/logs.py)."""
MEMORY = "PHALANX_MEMORY"
"""JSON about the memory of the nodes for the newest state (launch/peers.py): this node's folder, all addresses."""
REPLICA = "PHALANX_REPLICA"
"""JSON about the replica of a rank that may come and go, and where its coordinator listens (launch/replicas.py)."""
RESTARTED = "PHALANX_RESTARTED"
"""JSON about the failure after which the attempt was started: {"attempt": 1, "reason": ..., "time": seconds since the
epoch at which it was noticed}."""


def first_replica() -> bool:
    """Returns whether this rank belongs to the first of the replicas that come and go, or there are none: of the ranks
    with number 0, its one has the terminal."""
    return json.loads(os.environ.get(REPLICA, "{}")).get("replica", 0) == 0


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Keeps all sockets of single-machine ranks on the loopback interface, overriding the user's multi-node settings."""


def threads_for(wanted: int, processes_on_node: int) -> int:
    """Returns the CPU threads per process: the job's number, or OMP_NUM_THREADS, or the node's usable cores divided
    among its processes."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if not wanted and stated.isdigit():
        return max(1, int(stated))
    return wanted or max(1, len(os.sched_getaffinity(0)) // processes_on_node)


def thread_environment(threads: int, env: Mapping[str, str]) -> dict[str, str]:
    """Returns OpenMP's and MKL's thread variables for one rank; a user's own setting in `env` wins."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: env.get(name, env.get("OMP_NUM_THREADS", str(threads))) for name in names}


_LAST_PORT = 65535


@dataclass(frozen=True)
class Ranks:
    """The place of one process in the group."""

    rank: int  # index among all processes, 0 … world - 1
    world: int
    local_rank: int | None
    """Index among the processes of this node; also the index of its device. None if the launcher does not report it:
    the ranks find it out when they meet (launch/meeting.py)."""
    local_world: int | None
    """Number of processes on this node; None if the launcher does not report it."""
    node_rank: int | None  # index of this node; None if the launcher does not report it
    source: str
    """The launcher: torchrun, pals, openmpi, mpich (also Intel MPI), mvapich2, jsrun, flux, slurm, or single."""

    @property
    def one_node(self) -> bool:
        """True if every process is known to be on this machine."""
        return self.local_world == self.world


class NoSuchRankError(JobError):
    """A process has a rank that its launcher's own number of ranks excludes: rank 0 does not find that."""


class LaunchersDisagreeError(JobError):
    def __init__(self, message: str, claimed: Ranks | None):
        super().__init__(message)
        self.claimed = claimed
        """The place according to a launcher that lives, if there is one; with it the ranks can say the error once."""


SINGLE = Ranks(rank=0, world=1, local_rank=0, local_world=1, node_rank=0, source="single")


@dataclass(frozen=True)
class _LauncherVariables:
    """The variables of one launcher; of several names in a text the first that is set counts."""

    source: str
    rank: str
    world: str
    local_rank: str
    local_world: str = ""
    node_rank: str = ""
    needs: str = ""  # further variables that must be present for the set to count
    proves: str = ""
    """Variables that nobody exports by hand: one of them proves that the launcher has started this process. The set
    then counts also without a local rank."""

    @property
    def names(self) -> list[str]:
        texts = (self.rank, self.world, self.local_rank, self.local_world, self.node_rank, self.needs)
        return " ".join(texts).split()


# `phalanx train` starts its ranks with torchrun's variables. RANK alone proves nothing: a Kubernetes
# PyTorchJob sets RANK and WORLD_SIZE to the index and the number of pods, hence LOCAL_RANK and MASTER_*.
_TORCHRUN = _LauncherVariables(
    *("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    needs="MASTER_ADDR MASTER_PORT",
)
_SLURM = _LauncherVariables(
    *("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NODEID"),
    needs="SLURM_STEP_ID",  # a batch shell also has SLURM_PROCID=0, but is not a task of a step
    proves="SLURM_STEP_ID",
)
_SCHEDULERS = (
    _LauncherVariables(
        *("pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE PALS_LOCAL_SIZE", "PALS_NODEID"),
        proves="PALS_APID",
    ),
    # OMPI_COMM_WORLD_NODE_RANK is the rank on the node over all jobs, not the index of the node.
    _LauncherVariables(
        *("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        proves="PMIX_NAMESPACE",
    ),
    _LauncherVariables(
        *("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE"),
        proves="PMI_FD PMI_PORT",
    ),
    _LauncherVariables(
        *("mvapich2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        proves="MPIRUN_ID PMI_FD",
    ),
    _LauncherVariables(
        *("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        *("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
        proves="PMIX_NAMESPACE",
    ),
    _LauncherVariables("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", proves="FLUX_JOB_ID"),
    _SLURM,
)


def detect(env: Mapping[str, str]) -> Ranks | None:
    """Returns the place of this process according to `env`, or None if no launcher started it.

    torchrun's variables are explicit and win; of the others all complete sets have to agree. A Slurm step with one task
    per node does not count beside an MPI launcher: those tasks are the launcher's daemons.

    Raises:
        JobError: two launchers disagree; a launcher says that this is one process of several but not which;
            or this is a Slurm batch shell with several tasks and no `srun`.
    """
    explicit = _read(_TORCHRUN, env)
    found = [ranks for row in _SCHEDULERS if (ranks := _read(row, env))]
    if explicit:
        _refuse_lone_torchruns(found, env)
        return explicit
    if len(found) > 1 and found[-1].source == "slurm" and found[-1].local_world == 1:
        found = found[:-1] if _differ(found[0], found[-1]) else found
    for other in found[1:]:
        if _differ(found[0], other):
            living = [ranks for ranks in (found[0], other) if ranks.source in _living(env)]
            raise LaunchersDisagreeError(_conflict(found[0], other, env), living[0] if living else None)
    if found:
        return next((ranks for ranks in found if ranks.local_rank is not None), found[0])
    _refuse_incomplete_variables(env)
    _refuse_batch_shell(env)
    return None


def rendezvous_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Returns where the user says that the ranks meet: MASTER_ADDR and MASTER_PORT; None if neither is set.

    Raises JobError if only one of them is set, or the port is no port number.
    """
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not host and not port:
        return None
    if not host or not port:
        there, missing = ("MASTER_ADDR", "MASTER_PORT") if host else ("MASTER_PORT", "MASTER_ADDR")
        raise JobError(
            f"{there}={env[there]} is set, but {missing} is not: set both MASTER_ADDR, a host name of rank 0's node, "
            "and MASTER_PORT, a free port there, the same for every rank; or unset both, and the ranks find each other"
        )
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= _LAST_PORT:
        raise JobError(f"MASTER_PORT={port} is no port number; set it to a free port of rank 0's node, such as 29500")
    return host, int(port)


def lowest_evidence(env: Mapping[str, str]) -> int | None:
    """Returns the lowest rank that the variables of living launchers give this process, however incomplete they are, or
    else the lowest rank on this node; None if there is no sign of one."""
    living = [row for row in _SCHEDULERS if row.source in _living(env)]
    for names in ([row.rank for row in living], [row.local_rank for row in living]):
        if numbers := [number for each in names if (number := _number(env, each)) is not None]:
            return min(numbers)
    return None


def _living(env: Mapping[str, str]) -> set[str]:
    """Returns the launchers of which a variable proves that they have started this process."""
    return {row.source for row in _SCHEDULERS if _first_set(env, row.proves)}


def _read(row: _LauncherVariables, env: Mapping[str, str]) -> Ranks | None:
    rank, world, local_rank = (_number(env, names) for names in (row.rank, row.world, row.local_rank))
    if rank is None or world is None or any(name not in env for name in row.needs.split()):
        return None
    if local_rank is None and (_first_set(env, row.local_rank) or not _first_set(env, row.proves)):
        return None
    node_rank = _number(env, row.node_rank)
    local_world = _slurm_local_world(env, node_rank) if row is _SLURM else _number(env, row.local_world)
    if local_world == world:
        node_rank = 0
    on_node = world if local_world is None else local_world
    if not (rank < world and (local_rank or 0) < on_node <= world):
        return None
    if row is _SLURM and world == 1:
        return None  # `srun --pty bash`: the shell is the step's only task; commands in it were not launched
    return Ranks(rank, world, local_rank, local_world, node_rank, row.source)


def _number(env: Mapping[str, str], names: str) -> int | None:
    name = _first_set(env, names)
    return int(env[name]) if name and re.fullmatch(r"[0-9]{1,9}", env[name]) else None


def _first_set(env: Mapping[str, str], names: str) -> str | None:
    return next((name for name in names.split() if name in env), None)


def slurm_tasks(env: Mapping[str, str]) -> list[tuple[int, int]]:
    """Returns the tasks on each node of a Slurm step as run lengths: "4(x2),1" is 4 on 2 nodes, 1 on one; empty if they
    are unknown."""
    name = _first_set(env, "SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE")
    parts = env[name].split(",") if name else []
    found = [re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part) for part in parts]
    return [(int(match[1]), int(match[2] or 1)) for match in found if match] if all(found) else []


def _slurm_local_world(env: Mapping[str, str], node_rank: int | None) -> int | None:
    ahead = 0
    for tasks, nodes in slurm_tasks(env):
        ahead += nodes
        if node_rank is not None and node_rank < ahead:
            return tasks
    return None


def _differ(one: Ranks, other: Ranks) -> bool:
    locals_differ = None not in (one.local_rank, other.local_rank) and one.local_rank != other.local_rank
    return locals_differ or (one.rank, one.world) != (other.rank, other.world)


def _shown(row: _LauncherVariables, env: Mapping[str, str]) -> str:
    """Returns the set's variables with their values; only these, because an environment also holds secrets."""
    return " ".join(f"{name}={env[name]}" for name in row.names if name in env)


def _conflict(one: Ranks, other: Ranks, env: Mapping[str, str]) -> str:
    rows = {row.source: row for row in _SCHEDULERS}
    lines = ["Two launchers claim this process, and they disagree:"]
    lines += [
        f"  {ranks.source}: rank {ranks.rank} of {ranks.world}, local rank {ranks.local_rank} "
        f"({_shown(rows[ranks.source], env)})"
        for ranks in (one, other)
    ]
    remove = {
        ranks.source: " ".join(f"-u {name}" for name in rows[ranks.source].rank.split()) for ranks in (one, other)
    }
    lines.append(
        f"Unset the one that did not start it: `env {remove[other.source]} phalanx …` keeps {one.source}, "
        f"`env {remove[one.source]} phalanx …` keeps {other.source}."
    )
    return "\n".join(lines)


def _refuse_lone_torchruns(launched: list[Ranks], env: Mapping[str, str]) -> None:
    """Raises JobError for one of N torchruns that do not know of each other: each would train alone."""
    several = next((ranks for ranks in launched if ranks.world > 1), None)
    if several and env.get("GROUP_WORLD_SIZE") == "1" and LAUNCHER_PID not in env:
        raise JobError(
            f"Two launchers at once: {several.source} started torchrun {several.world} times, and each torchrun is a "
            f"run of its own (--nnodes 1).\nRun `phalanx train` under {several.source} itself, or give torchrun "
            f"`--nnodes {several.world} --rdzv-backend c10d --rdzv-endpoint HOST:PORT`."
        )


def _refuse_incomplete_variables(env: Mapping[str, str]) -> None:
    """Raises JobError for one of N processes without a known rank: each would train alone into one directory."""
    # A world size alone may be that of two launchers; the rank tells which.
    rows = sorted(
        (_TORCHRUN, *_SCHEDULERS),
        key=lambda row: (
            _first_set(env, row.rank) is None,
            -sum(name in env for name in (*row.names, *row.proves.split())),
        ),
    )
    for row in rows:
        rank, world = _first_set(env, row.rank), _first_set(env, row.world)
        if (rank is None and world is None) or _number(env, row.world) == 1:
            continue
        if row is _SLURM and "SLURM_STEP_ID" not in env:
            continue  # a batch shell: see _refuse_batch_shell
        missing = [name for name in row.needs.split() if name not in env]
        missing += [
            " or ".join(names.split()) for names in (row.rank, row.world, row.local_rank) if not _first_set(env, names)
        ]
        reason = f"{', '.join(missing)} not set" if missing else "the numbers are inconsistent"
        unset = " and ".join(name for name in (rank, world) if name)
        hint = (
            f"Start it with torchrun (in Kubernetes: one torchrun in each pod), or unset {unset}."
            if row is _TORCHRUN
            else f"Start it with the launcher's own command, or unset {unset}."
        )
        excluded = not missing and (_number(env, row.rank) or 0) >= (_number(env, row.world) or 1)
        raise (NoSuchRankError if excluded else JobError)(
            f"The environment describes one of several processes, but incompletely: {reason}.\n"
            f"  {row.source}: {_shown(row, env)}\n{hint}"
        )
    if "PMIX_RANK" in env and "PMIX_NAMESPACE" in env:
        raise JobError(
            f"A PMIx launcher started this process as PMIX_RANK={env['PMIX_RANK']}, but does not say of how many: "
            "start it with mpiexec, srun or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
        )


def _refuse_batch_shell(env: Mapping[str, str]) -> None:
    tasks = _number(env, "SLURM_NTASKS") or 1
    if tasks > 1 and "SLURM_STEP_ID" not in env:
        raise JobError(
            f"This is a Slurm allocation of {tasks} tasks (SLURM_NTASKS={tasks}), but the command was not "
            "started with srun, so it would run once, alone.\n"
            "Run `srun phalanx …`, or ask for one task (`--ntasks=1`): phalanx then starts its own processes."
        )


class _SaidOnceError(RunError):
    def __init__(self, message: str, code: int = RunError.exit_code):
        super().__init__(message)
        self.exit_code = code


class ToldError(_SaidOnceError):
    """This rank ends because of an error that another rank prints; `exit_code` is that rank's."""


class GroupError(_SaidOnceError):
    """An error of several ranks, or of another one, which this rank prints; `exit_code` is theirs."""


def seen_by_rank_0(ranks: Ranks, message: str) -> RunError:
    """Returns the error for something that rank 0 finds, too: only rank 0 prints it."""
    return RunError(message) if ranks.rank == 0 else ToldError(message)


def without_rank_0(ranks: Ranks, message: str) -> RunError:
    """Returns the error of a rank that cannot reach rank 0, and so cannot ask who prints: one rank of every node does,
    and rank 1 on the node of rank 0."""
    return RunError(message) if ranks.rank < 2 or not ranks.local_rank else ToldError(message)
