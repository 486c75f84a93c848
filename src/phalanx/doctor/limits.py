"""Checks of what the machine, the container and the shell allow: processors, memory, shared memory, ulimits."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator

from phalanx.doctor.findings import CheckResult, DoctorCheck, error, ok, warn
from phalanx.doctor.machine import CheckedMachine
from phalanx.units import counted, gib

_FEW_FILES, _FEW_PROCESSES = 4096, 1024
_SMALL_SHM = 256 * 2**20
_SMALL_STACK = 4 * 2**20
_LOW_MEMORY = 2**30
GetLimit = Callable[[int], tuple[int, int]]


def checks(machine: CheckedMachine) -> list[DoctorCheck]:
    """Returns the checks of this group."""
    return [
        DoctorCheck("limits", "processors", lambda: processors(machine, len(os.sched_getaffinity(0)))),
        DoctorCheck("limits", "memory", lambda: memory(machine)),
        DoctorCheck("limits", "shared memory", lambda: shared_memory(machine)),
        DoctorCheck("limits", "ulimits", lambda: ulimits(machine, resource.getrlimit)),
    ]


def processors(machine: CheckedMachine, usable: int) -> Iterator[CheckResult]:
    """Yields the cores that this process may use (`usable`, by its affinity mask) against the threads of its ranks."""
    quota, ranks, every = cgroup_cores(machine), machine.local_ranks, os.cpu_count() or usable
    if machine.ranks is not None and usable < every:
        ranks = 1  # the launcher has bound each rank to cores of its own
    nodes = [name for name in machine.list("/sys/devices/system/node") if re.fullmatch(r"node[0-9]+", name)]
    text = f"{counted(usable, 'core')} of {every}"
    text += f" in {len(nodes)} NUMA nodes" if len(nodes) > 1 else ""
    stated = machine.env.get("OMP_NUM_THREADS", "")
    if stated and not re.fullmatch(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", stated):
        yield warn(f"OMP_NUM_THREADS={stated[:40]} is not a number of threads", "unset it, or set a number")
        stated = ""
    if quota and quota < usable:
        yield warn(
            f"{text}, but the cgroup allows {quota:.3g}: threads chosen by the number of cores wait for each other",
            f"set run.threads={max(1, int(quota / ranks))}, or ask the scheduler for more CPUs",
        )
    elif ranks > usable:
        yield warn(
            f"{text} for {counted(ranks, 'rank')}: they take turns",
            "ask for more cores per task (srun --cpus-per-task, mpiexec --cpu-bind), or start fewer ranks",
        )
    elif stated.isdigit() and int(stated) * ranks > usable:
        yield warn(
            f"{text}; OMP_NUM_THREADS={stated} × {counted(ranks, 'rank')} is more",
            f"set OMP_NUM_THREADS={max(1, usable // ranks)}, or unset it",
        )
    else:
        yield ok(text + (f", OMP_NUM_THREADS={stated}" if stated else ""))


def cgroup_cores(machine: CheckedMachine) -> float:
    """Returns the cores' worth of time that cgroups allow per unit of time; 0 if they do not limit it."""
    found = []
    for folder in _cgroups(machine, "cpu"):
        quota, _, period = machine.read(f"{folder}/cpu.max").strip().partition(" ")
        if not quota:  # version 1
            quota = machine.read(f"{folder}/cpu.cfs_quota_us").strip()
            period = machine.read(f"{folder}/cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=0.0)


def memory_bytes(machine: CheckedMachine) -> tuple[int, int]:
    """Returns the bytes that this process and its children may have at most, and those that are free now; 0 if
    unknown. The smallest limit of the machine and its cgroups counts."""
    facts = dict(re.findall(r"^(\w+):\s+([0-9]+) kB", machine.read("/proc/meminfo"), flags=re.MULTILINE))
    most, free = (int(facts.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    for folder in _cgroups(machine, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            value, now = (machine.read(f"{folder}/{name}").strip() for name in (limit, used))
            if value.isdigit() and 0 < int(value) < (most or 2**62):
                most = int(value)
            if value.isdigit() and now.isdigit() and int(value) < 2**62:
                cached = re.search(r"^(?:total_)?inactive_file ([0-9]+)$", machine.read(f"{folder}/memory.stat"), re.M)
                free = min(free, max(0, int(value) - int(now) + (int(cached[1]) if cached else 0)))
    return most, free


def _cgroups(machine: CheckedMachine, controller: str) -> Iterator[str]:
    """Yields the folders of this process's cgroup and those above it, for both versions of cgroups."""
    for line in machine.read("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = f"/sys/fs/cgroup/{controller}" if controllers else "/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part and part != ".."]
        for length in range(len(parts), -1, -1):
            yield "/".join([top, *parts[:length]])


def memory(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields the host's memory."""
    most, free = memory_bytes(machine)
    if not most:
        yield warn("the kernel does not say how much memory there is", "mount /proc")
        return
    text = f"{gib(free)} free of {gib(most)}"
    overcommit = machine.read("/proc/sys/vm/overcommit_memory").strip()
    if free < _LOW_MEMORY:
        yield warn(text, "end what uses it, or ask the scheduler for more memory (--mem)")
    elif overcommit == "2":
        yield warn(
            f"{text}; vm.overcommit_memory=2: reservations count as used, and torch and CUDA reserve much",
            "ask the administrator for vm.overcommit_memory=0",
        )
    else:
        yield ok(text)


def shared_memory(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields the room in /dev/shm, through which NCCL sends between ranks of a node, and where the launcher keeps the
    ranks' heartbeats."""
    folder = machine.root / "dev/shm"
    remedy = "give the container more: docker --shm-size=8g; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    try:
        found = os.statvfs(folder)
    except OSError as problem:
        yield warn(f"{folder}: {problem.strerror}: NCCL cannot use shared memory", remedy)
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"/dev/shm: {gib(free)} free of {gib(size)}"
    if not os.access(folder, os.W_OK):
        yield warn(f"{text}; it cannot be written", "mount it with mode 1777")
    elif size < _SMALL_SHM:
        yield warn(f"{text}: too small for NCCL with several GPUs", remedy)
    elif free < _SMALL_SHM:
        yield warn(f"{text}: full", "delete what ended programs left in /dev/shm, or: " + remedy)
    else:
        yield ok(text)


def ulimits(machine: CheckedMachine, limit: GetLimit) -> Iterator[CheckResult]:
    """Yields the limits of the shell that a run meets."""
    problems = list(_ulimits(machine, limit))
    yield from problems
    if not problems:
        files, processes = (_shown(limit(which)[0]) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
        yield ok(f"{files} open files, {processes} processes")


def _ulimits(machine: CheckedMachine, limit: GetLimit) -> Iterator[CheckResult]:
    unlimited = resource.RLIM_INFINITY
    size, _ = limit(resource.RLIMIT_FSIZE)
    if size != unlimited:
        yield error(
            f"files of at most {gib(size)} (ulimit -f): a larger checkpoint kills its rank", "ulimit -f unlimited"
        )
    files, most = limit(resource.RLIMIT_NOFILE)
    need = max(_FEW_FILES, 4 * machine.job.layout.processes)  # gloo and NCCL open sockets to every peer
    if files != unlimited and files < need:
        can = most == unlimited or most >= need
        yield warn(
            f"{files} open files per process (ulimit -n); a rank has sockets to its peers, {need} are safe",
            f"ulimit -n {need}" if can else f"ask the administrator: the hard limit is {most}",
        )
    processes, _ = limit(resource.RLIMIT_NPROC)
    if processes != unlimited and processes < _FEW_PROCESSES:
        yield warn(f"{processes} processes and threads per user (ulimit -u)", f"ulimit -u {_FEW_PROCESSES}, or more")
    stack, _ = limit(resource.RLIMIT_STACK)
    if stack != unlimited and stack < _SMALL_STACK:
        yield warn(f"stacks of {gib(stack)} (ulimit -s)", "ulimit -s 8192")
    time, _ = limit(resource.RLIMIT_CPU)
    if time != unlimited:
        yield warn(
            f"{time} s of processor time per process (ulimit -t): the kernel then kills a rank",
            "train inside an allocation, not on a login node",
        )
    space, _ = limit(resource.RLIMIT_AS)
    if space != unlimited:
        yield warn(f"{gib(space)} of address space (ulimit -v); torch and CUDA reserve more", "ulimit -v unlimited")
    locked, _ = limit(resource.RLIMIT_MEMLOCK)
    if locked != unlimited and machine.list("/sys/class/infiniband"):
        yield warn(
            f"{gib(locked)} of locked memory (ulimit -l), and this machine has InfiniBand: NCCL cannot use it",
            "ulimit -l unlimited; under Slurm PropagateResourceLimitsExcept=MEMLOCK",
        )
    core, _ = limit(resource.RLIMIT_CORE)
    if core != 0 and machine.read("/proc/sys/kernel/core_pattern").strip()[:1] not in ("|", ""):
        yield warn(
            f"core files of {'any size' if core == unlimited else gib(core)} (ulimit -c): each crash writes one",
            "ulimit -c 0",
        )


def _shown(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
