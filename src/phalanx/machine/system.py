"""Checks of what the machine, the container and the shell allow, of GPUs and their driver, of Python and its packages,
and of environment variables.

Only the variables named here are looked at, and only their values are shown: an environment also holds secrets.
"""

from __future__ import annotations

import importlib.metadata
import locale
import math
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import phalanx
from phalanx.config.cluster import DEVICE_TYPES, DEVICE_WORDS, no_device
from phalanx.errors import ExtensionError
from phalanx.machine.checks import CheckedMachine, CheckResult, Problems, check, error, ok, warn
from phalanx.registry import installed, load_installed
from phalanx.units import counted, gib

ON = ("1", "true", "TRUE", "True", "yes", "on")
HARMFUL: dict[str, tuple[tuple[str, ...], str]] = {
    "TORCH_NCCL_BLOCKING_WAIT": (ON, "collectives block the CPU thread, and nothing overlaps"),
    "NCCL_BLOCKING_WAIT": (ON, "collectives block the CPU thread, and nothing overlaps"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (("0",), "a failed collective is not noticed"),
    "NCCL_ASYNC_ERROR_HANDLING": (("0",), "a failed collective is not noticed"),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": (ON, "experimental"),
    "NCCL_P2P_DISABLE": (ON, "GPUs of a node communicate through host memory"),
    "NCCL_SHM_DISABLE": (ON, "ranks of a node communicate through sockets"),
    "NCCL_IB_DISABLE": (ON, "NCCL does not use InfiniBand or RoCE"),
    "NCCL_NET": (("Socket", "socket"), "NCCL does not use InfiniBand or RoCE"),
    "NCCL_DEBUG": (("TRACE", "trace"), "NCCL writes a line for every call"),
    "NCCL_LAUNCH_MODE": (("PARALLEL",), "removed from NCCL"),
    "CUDA_LAUNCH_BLOCKING": (ON, "every kernel waits for the last one"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (ON, "every tensor asks the driver for memory"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL", "detail"), "every collective is checked by another one"),
    "TORCH_USE_CUDA_DSA": (ON, "kernels check every access"),
    "TORCH_SHOW_CPP_STACKTRACES": (ON, "every error carries a stack of C++"),
    "TORCH_COMPILE_DISABLE": (ON, "train.compile has no effect"),
    "TORCHDYNAMO_DISABLE": (ON, "train.compile has no effect"),
    "MALLOC_CHECK_": (("1", "2", "3"), "the C library checks every allocation"),
    "PYTHONMALLOC": (("debug", "malloc_debug", "pymalloc_debug"), "Python checks every allocation"),
    "PYTHONDEVMODE": (ON, "Python checks much"),
}
"""Variables, the values that hurt, and their effect."""
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_LITTLE = 2**30
_LEAST = 64 * 2**20
_LONGEST_FOLDER = 60
_SLOW = "its file system does not answer: point the variable at another one"


@check("environment", "variables")
def variables(machine: CheckedMachine) -> Problems:
    """Yields variables whose values are known to hurt."""
    env = machine.env
    for name, (values, effect) in HARMFUL.items():
        if env.get(name) in values:
            yield warn(f"{name}={env[name]}: {effect}", f"unset {name}")
    bound = [name for name in _BINDING if env.get(name, "false").lower() not in ("false", "")]
    if bound and machine.local_ranks > 1:
        yield warn(
            f"{', '.join(bound)} set, and {machine.local_ranks} ranks share the node: all may bind to the same cores",
            f"unset {' '.join(bound)}, or let the launcher bind ranks",
        )
    proxies = [name for name in _PROXIES if env.get(name)]
    if proxies and machine.job.checkpoint.remote and not (env.get("no_proxy") or env.get("NO_PROXY")):
        yield warn(
            f"{', '.join(proxies)} set: checkpoints for the object store pass a proxy",
            "set no_proxy to the store's host if it is in your network",
        )
    return "none that is known to hurt" + (f"; {', '.join(proxies)} set (sockets ignore it)" if proxies else "")


@check("environment", "temporary files", _SLOW)
def temporary(machine: CheckedMachine) -> Problems:
    """Yields whether the launcher can make its private folder, through which the ranks of a machine meet."""
    stated = machine.env.get("TMPDIR", "")
    folder = Path(stated or tempfile.gettempdir())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
        free = _free(folder)
    except OSError as problem:
        yield error(f"{folder}: {problem.strerror}", "set TMPDIR to a folder that you may write")
        return
    if free < _LEAST:
        yield error(f"{folder}: {gib(free)} free", "free some space, or set TMPDIR to another folder")
    elif len(str(folder)) > _LONGEST_FOLDER:
        yield warn(f"{folder}: too long for a socket's name (108 characters)", "set TMPDIR to a shorter path")
    return f"{folder}: {gib(free)} free"


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@check("environment", "caches", _SLOW)
def caches(machine: CheckedMachine) -> Problems:
    """Yields folders of caches that are full or cannot be written."""
    fine = []
    for name in _CACHES:
        if not (stated := machine.env.get(name)):
            continue
        folder = Path(stated).expanduser()
        there = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
        if not os.access(there, os.W_OK):
            yield warn(f"{name}={folder} cannot be written", f"set {name} to a folder of yours")
        elif (free := _free(there)) < _LITTLE:
            yield warn(f"{name}={folder} has {gib(free)} free", f"free some space, or set {name} to another disk")
        else:
            fine.append(f"{name}={folder} has {gib(free)} free")
    return "; ".join(fine) or "no folder is set"


_HANGS = "the file system of the Python installation is slow or hangs: install on a local disk, or try again"
_MOST_NAMES = 10_000
Version = Callable[[str], str]


@check("software", "python")
def python(machine: CheckedMachine, encoding: str = locale.getencoding()) -> Problems:
    """Yields the versions of Python and Phalanx, and the encoding of text."""
    text = f"Python {platform.python_version()} ({machine.python}), phalanx {phalanx.__version__}"
    if encoding.lower().replace("-", "") != "utf8":
        yield warn(f"{text}; text is encoded in {encoding}", "export LC_ALL=C.UTF-8, or PYTHONUTF8=1")
    elif sys.flags.optimize or machine.env.get("PYTHONOPTIMIZE"):
        yield warn(f"{text}; PYTHONOPTIMIZE removes assertions", "unset PYTHONOPTIMIZE")
    return text


def _requirements() -> Sequence[str]:
    return [each for each in importlib.metadata.requires("phalanx") or () if "extra ==" not in each]


@check("software", "packages", _HANGS)
def packages(
    _: CheckedMachine, requirements: Sequence[str] = (), version: Version = importlib.metadata.version
) -> Problems:
    """Yields which required packages are missing, too old or untried. torch has its own check."""
    found = []
    for requirement in requirements or _requirements():
        name = re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]
        if name == "torch":
            continue
        try:
            installed = version(name)
        except importlib.metadata.PackageNotFoundError:
            yield error(f"{name} is not installed", f"pip install '{requirement}'")
            continue
        found.append(f"{name} {installed}")
        if out_of_range(installed, requirement):
            yield error(f"{name} {installed} does not meet {requirement}", f"pip install '{requirement}'")
    return ", ".join(found)


def out_of_range(installed: str, requirement: str) -> str:
    """Returns the bound of a requirement such as "torch>=2.11,<2.14" that a version does not meet; empty if it meets
    all. Suffixes such as +cpu or rc1 are not compared."""
    mine = _numbers(installed)
    for sign, text in re.findall(r"(>=|<)\s*([0-9][0-9.]*)", requirement.partition(";")[0]):
        bound = _numbers(text)
        length = max(len(mine), len(bound))
        padded, limit = ((*each, *(0,) * (length - len(each))) for each in (mine, bound))
        if not (padded >= limit if sign == ">=" else padded < limit):
            return f"{sign}{text}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    begin = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, begin[0].split("."))) if begin else ()


@check("software", "extensions", _HANGS, 5.0)
def extensions(_: CheckedMachine) -> Problems:
    """Yields the packages that extend Phalanx, and whether all of them can be loaded."""
    try:
        load_installed()
    except ExtensionError as problem:
        yield error("; ".join(problem.problems), "upgrade or uninstall the package")
        return
    yield ok(", ".join(map(str, installed())) or "no package extends Phalanx")


@check("software", "torch", _HANGS, 5.0)
def torch(machine: CheckedMachine) -> Problems:
    """Yields whether torch can be imported, its version is in range, and it can communicate."""
    required = next((each for each in _requirements() if re.match(r"torch\b", each)), "torch")
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        text = "torch is not installed: plan, predict and simulate work here (a login node), train and verify do not"
        yield warn(text, f"pip install '{required}' where you train")
        return
    facts = machine.torch.facts()
    if problem := facts.get("problem"):
        yield error(problem, f"pip install --force-reinstall '{required}', or load the modules it was built with")
        return
    builds = ("CUDA", facts["cuda"]), ("ROCm", facts["hip"]), ("XPU", facts["xpu"])
    build = next((f"{name} {version}" for name, version in builds if version), "CPU build")
    backends = [name for name in ("gloo", "nccl", "xccl") if facts[name]]
    text = f"torch {facts['version']} ({build}), {' and '.join(backends) or 'no backend'}"
    if bound := out_of_range(facts["version"], required):
        finding = error if bound.startswith(">=") else warn
        yield finding(f"{text}; Phalanx is tested with {required}", f"pip install '{required}'")
    elif not facts["gloo"]:
        yield error(f"{text}; every run needs gloo", "install torch from pytorch.org, or build it with USE_GLOO=1")
    elif facts["devices"] and backends == ["gloo"]:
        remedy = "install a torch that is built with NCCL, RCCL (which it calls nccl) or xccl"
        yield warn(f"{text}; GPUs communicate through gloo, which is slow", remedy)
    return text


@check("software", "import path", _HANGS)
def import_path(machine: CheckedMachine, here: Path | None = None) -> Problems:
    """Yields files that Python would import in place of a library: in `here` (under torchrun, which imports from the
    current directory) and in the folders of PYTHONPATH; and folders of another Python."""
    here, libraries = here or Path.cwd(), {*sys.stdlib_module_names, "phalanx", "torch"}
    names = {re.split(r"[<>=]", each)[0].lower() for each in _requirements()}
    libraries |= {"yaml" if name == "pyyaml" else name for name in names}
    stated = [Path(each) for each in machine.env.get("PYTHONPATH", "").split(os.pathsep) if each]
    for folder in dict.fromkeys([here, *stated]):
        found = []
        with suppress(OSError), os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                stem, _, suffix = entry.name.rpartition(".")
                if number >= _MOST_NAMES:
                    break
                if suffix == "py" and stem in libraries:
                    found.append(entry.name)
        if shadows := sorted(found):
            where = "the current directory" if folder == here else f"{folder} (PYTHONPATH)"
            yield warn(f"{where} has {', '.join(shadows[:5])}: imported in place of the library", "rename it")
    if foreign := [str(each) for each in stated if _other_python(str(each))]:
        yield warn(
            f"PYTHONPATH has folders of another Python than {'.'.join(map(str, sys.version_info[:2]))}: {foreign[0]}",
            "unset PYTHONPATH, or load the modules of this Python",
        )
    return f"{counted(len(stated), 'folder')} in PYTHONPATH" if stated else "nothing shadows a library"


def _other_python(folder: str) -> bool:
    version = re.search(r"python([0-9]+)\.([0-9]+)(?:/|$)", folder)
    return version is not None and (int(version[1]), int(version[2])) != tuple(sys.version_info[:2])


_FIELDS = (
    *("name", "driver_version", "memory.total", "memory.used", "mig.mode.current", "persistence_mode", "compute_mode"),
    "ecc.errors.uncorrected.volatile.total",
)
_USED_SHARE = 0.1
_DRIVER = "look at dmesg for Xid errors, and restart the driver or the node"
_INSTALL = "install torch for this driver: https://pytorch.org/get-started"


@dataclass(frozen=True)
class DriverGpu:
    """One GPU as nvidia-smi lists it."""

    name: str
    driver: str
    memory_mib: float
    used_mib: float
    mig: bool
    persistent: bool
    prohibited: bool
    ecc_errors: int

    @classmethod
    def parse(cls, line: str) -> DriverGpu:
        """Returns the GPU of a line of nvidia-smi's CSV. Raises ValueError."""
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS):
            raise ValueError(f"expected {len(_FIELDS)} columns, found {len(cells)}")
        name, driver, *amounts, mig, persistence, mode, errors = cells
        # What a GPU does not have is no number, such as "[N/A]".
        total, used, ecc = (float(each) if re.fullmatch(r"[0-9.]+", each) else 0.0 for each in (*amounts, errors))
        modes = mig == "Enabled", persistence != "Disabled", mode == "Prohibited"
        return cls(name, driver, total, used, *modes, int(ecc))


@check("accelerator", "gpu", _DRIVER, 6.0)
def gpus(machine: CheckedMachine) -> Problems:
    """Yields the GPUs, their faults, and where the driver and torch differ."""
    program = shutil.which("nvidia-smi", path=machine.env.get("PATH", ""))
    nodes = [name for name in machine.names_in("/dev") if re.fullmatch(r"nvidia[0-9]+", name)]
    if program is None:
        yield from _without_driver_tool(machine, nodes)
        return
    try:
        ran = machine.call([program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"])
    except OSError as problem:
        yield warn(f"{program} cannot be started: {problem.strerror or problem}", "reinstall the driver's tools")
        return
    if ran.code is None:
        yield error(f"nvidia-smi does not answer within {machine.seconds:g} s: the driver hangs", _DRIVER)
        return
    if ran.code:
        message = (ran.out.strip() or ran.err.strip() or "no message").splitlines()[0][:300]
        yield error(f"nvidia-smi ended with exit code {ran.code}: {message}", _DRIVER)
        return
    try:
        found = [DriverGpu.parse(line) for line in ran.out.splitlines() if line.strip()]
    except ValueError as problem:
        yield warn(f"nvidia-smi's answer is not understood: {problem}", "update the driver's tools")
        return
    yield from _faults(found)
    yield from _seen_by_torch(machine, found, program)


def _without_driver_tool(machine: CheckedMachine, nodes: list[str]) -> Iterator[CheckResult]:
    if nodes:
        yield warn(f"{counted(len(nodes), 'GPU')} (/dev/{nodes[0]}), but no nvidia-smi in PATH", "add it to PATH")
    wanted = machine.job.cluster.device
    drivers = machine.names_in("/sys/bus/pci/drivers")
    others = "kfd" in machine.names_in("/dev") or "i915" in drivers or "xe" in drivers
    facts = machine.torch.facts() if nodes or others or wanted in DEVICE_WORDS else {}
    seen = facts.get("devices", [])
    if wanted in DEVICE_WORDS and not (seen and facts["kind"] == DEVICE_TYPES[wanted]):
        yield error(no_device(wanted).partition("; ")[0], "use cluster.device=cpu, or another machine")
    elif seen:
        yield ok(f"torch sees {len(seen)} × {seen[0]}")
    elif not nodes:
        yield ok("no GPU that torch can use: ranks compute on the CPU")


def _faults(found: list[DriverGpu]) -> Iterator[CheckResult]:
    for number, gpu in enumerate(found):
        if gpu.ecc_errors:
            yield error(f"GPU {number} has {gpu.ecc_errors} uncorrected memory errors (ECC)", "reset or replace it")
        if gpu.prohibited:
            yield error(f"GPU {number} is in compute mode Prohibited", f"nvidia-smi -i {number} -c DEFAULT, as root")
    used = [number for number, gpu in enumerate(found) if gpu.used_mib > _USED_SHARE * gpu.memory_mib > 0]
    if used:
        which = ", ".join(map(str, used))
        amounts = ", ".join(f"{found[number].used_mib:,.0f}MiB" for number in used)
        yield warn(f"GPU {which}: {amounts} in use", "nvidia-smi shows the processes; end those of an earlier run")
    if slow := [str(number) for number, gpu in enumerate(found) if not gpu.persistent]:
        yield warn(
            f"GPU {', '.join(slow)}: no persistence mode, each first use loads the driver", "nvidia-smi -pm 1, as root"
        )
    if split := [str(number) for number, gpu in enumerate(found) if gpu.mig]:
        yield warn(
            f"GPU {', '.join(split)} is partitioned (MIG): a process sees one instance, and NCCL needs whole GPUs",
            "use one rank per instance with gloo, or nvidia-smi -mig 0, as root",
        )


def _seen_by_torch(machine: CheckedMachine, found: list[DriverGpu], program: str) -> Iterator[CheckResult]:
    text = f"{len(found)} × {found[0].name}, driver {found[0].driver}" if found else "nvidia-smi lists no GPU"
    facts = machine.torch.facts()
    if "version" not in facts:
        yield ok(f"{text}; not compared with torch")
        return
    supports = _driver_cuda(machine, program)
    if found and not facts["available"]:
        if not facts["cuda"]:
            yield error(f"{text}; torch {facts['version']} has no CUDA", _INSTALL)
        elif supports and int(supports[0]) < int(facts["cuda"].partition(".")[0]):
            yield error(f"{text} supports CUDA {'.'.join(supports)}, torch is built for {facts['cuda']}", _INSTALL)
        else:
            shown = machine.env.get("CUDA_VISIBLE_DEVICES")
            remedy = "unset CUDA_VISIBLE_DEVICES" if shown is not None else _DRIVER
            yield error(
                f"{text}; torch.cuda.is_available() is false"
                + (f" with CUDA_VISIBLE_DEVICES={shown[:80]}" if shown is not None else ""),
                remedy,
            )
        return
    yield from _enough(machine, len(facts["devices"]))
    shown = "CUDA_VISIBLE_DEVICES" in machine.env or any(gpu.mig for gpu in found)
    if len(facts["devices"]) < len(found) and not shown:
        yield warn(f"{text}, of which torch sees {len(facts['devices'])}", _DRIVER)
    elif found:
        behind = supports and tuple(map(int, supports)) < tuple(map(int, facts["cuda"].split(".")[:2]))
        note = f", CUDA {'.'.join(supports)}" if supports else ""
        note += f" (torch's {facts['cuda']} works with it by minor-version compatibility)" if behind else ""
        yield ok(f"{text}{note}; torch sees {len(facts['devices'])}")
    else:
        yield ok(text)


def _driver_cuda(machine: CheckedMachine, program: str) -> tuple[str, str] | None:
    """Returns the CUDA version that the driver supports, which only nvidia-smi's page shows."""
    try:
        found = re.search(r"CUDA Version:\s*([0-9]+)\.([0-9]+)", machine.call([program]).out)
    except OSError:
        return None
    return (found[1], found[2]) if found else None


def _enough(machine: CheckedMachine, visible: int) -> Iterator[CheckResult]:
    """Yields that this node's ranks have fewer GPUs than they need."""
    if not machine.may_use_gpus or not visible:
        return
    shown = machine.env.get("CUDA_VISIBLE_DEVICES")
    number = (machine.ranks.local_rank if machine.ranks else None) or 0
    if number >= visible:
        why = f" (CUDA_VISIBLE_DEVICES={shown[:80]})" if shown is not None else ""
        yield error(
            f"local rank {number} has no GPU: it sees {visible}{why}",
            "give every process all GPUs of its node (srun --gpus-per-node, not --gpus-per-task), or start fewer",
        )
    elif machine.local_ranks > visible and machine.has_job:
        yield error(
            f"{machine.local_ranks} ranks on this node, and torch sees {counted(visible, 'GPU')}",
            "start one process per GPU, on more nodes, or use cluster.device=cpu",
        )


_FEW_FILES, _FEW_PROCESSES = 4096, 1024
_SMALL_SHM = 256 * 2**20
_SMALL_STACK = 4 * 2**20
_LOW_MEMORY = 2**30
GetLimit = Callable[[int], tuple[int, int]]


@check("limits", "processors")
def processors(machine: CheckedMachine, usable: int = 0) -> Problems:
    """Yields the cores that this process may use (`usable`, by its affinity mask) against the threads of its ranks."""
    usable = usable or len(os.sched_getaffinity(0))
    quota, ranks, every = cgroup_cores(machine), machine.local_ranks, os.cpu_count() or usable
    if machine.ranks is not None and usable < every:
        ranks = 1  # the launcher has bound each rank to cores of its own
    nodes = [name for name in machine.names_in("/sys/devices/system/node") if re.fullmatch(r"node[0-9]+", name)]
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


@check("limits", "memory")
def memory(machine: CheckedMachine) -> Problems:
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
    return text


@check("limits", "shared memory")
def shared_memory(machine: CheckedMachine) -> Problems:
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
    return text


@check("limits", "ulimits")
def ulimits(machine: CheckedMachine, limit: GetLimit = resource.getrlimit) -> Problems:
    """Yields the limits of the shell that a run meets."""
    unlimited = resource.RLIM_INFINITY
    names = ("FSIZE", "NOFILE", "NPROC", "STACK", "CPU", "AS", "MEMLOCK", "CORE")
    size, files, processes, stack, time, space, locked, core = (
        soft if (soft := limit(getattr(resource, f"RLIMIT_{name}"))[0]) != unlimited else math.inf for name in names
    )
    if size < math.inf:
        text = f"files of at most {gib(size)} (ulimit -f): a larger checkpoint kills its rank"
        yield error(text, "ulimit -f unlimited")
    need = max(_FEW_FILES, 4 * machine.job.layout.processes)  # gloo and NCCL open sockets to every peer
    if files < need:
        _, most = limit(resource.RLIMIT_NOFILE)
        can = most == unlimited or most >= need
        yield warn(
            f"{files} open files per process (ulimit -n); a rank has sockets to its peers, {need} are safe",
            f"ulimit -n {need}" if can else f"ask the administrator: the hard limit is {most}",
        )
    if processes < _FEW_PROCESSES:
        yield warn(f"{processes} processes and threads per user (ulimit -u)", f"ulimit -u {_FEW_PROCESSES}, or more")
    if stack < _SMALL_STACK:
        yield warn(f"stacks of {gib(stack)} (ulimit -s)", "ulimit -s 8192")
    if time < math.inf:
        text = f"{time} s of processor time per process (ulimit -t): the kernel then kills a rank"
        yield warn(text, "train inside an allocation, not on a login node")
    if space < math.inf:
        yield warn(f"{gib(space)} of address space (ulimit -v); torch and CUDA reserve more", "ulimit -v unlimited")
    if locked < math.inf and machine.names_in("/sys/class/infiniband"):
        yield warn(
            f"{gib(locked)} of locked memory (ulimit -l), and this machine has InfiniBand: NCCL cannot use it",
            "ulimit -l unlimited; under Slurm PropagateResourceLimitsExcept=MEMLOCK",
        )
    if core and machine.read("/proc/sys/kernel/core_pattern").strip()[:1] not in ("|", ""):
        any_size = "any size" if core == math.inf else gib(core)
        yield warn(f"core files of {any_size} (ulimit -c): each crash writes one", "ulimit -c 0")
    shown = ("unlimited" if value == math.inf else f"{value:,}" for value in (files, processes))
    return "{} open files, {} processes".format(*shown)
