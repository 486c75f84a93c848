"""Nodes × processes per node = processes of the layout: any two give the third; and whether this machine has the cores,
memory and accelerators for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.cluster import DEVICE_WORDS, no_device
from phalanx.errors import JobError
from phalanx.launch.ranks import slurm_tasks
from phalanx.nearest import divisors, nearest_of

RANKS_PER_CORE = 8
"""Most ranks on a core of a CPU: beyond that they wait for each other's turns more than they compute."""
FEW_RANKS = 16  # ranks that every machine may have, however few cores it has
RANK_BYTES = 256 * 2**20  # memory of a rank's own before it holds a model: Python, torch and the process group
FLAG = "--oversubscribe"


@dataclass(frozen=True)
class Machine:
    cores: int
    free_bytes: int  # memory that is available now; with swap space
    devices: int


def this_machine(devices: int) -> Machine:
    """Returns the cores and the free memory of this machine (of its control group, where that is less)."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = sum(int(facts.get(name, "0").split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    return Machine(len(os.sched_getaffinity(0)), min([free, *_left_in_group()]), devices)


def _left_in_group() -> Iterator[int]:
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        cache = next(
            line for line in (group / "memory.stat").read_text(encoding="ascii").splitlines() if "file " in line
        )
    except (OSError, StopIteration, ValueError):
        return
    if most != "max":
        yield int(most) - used + int(cache.split()[1])


def tasks_per_node(env: Mapping[str, str]) -> int:
    """Returns the processes that Slurm started on each node, 0 if they are unknown or differ."""
    runs = slurm_tasks(env)
    return runs[0][0] if len(runs) == 1 else 0


def problems(ranks: int, device: str, machine: Machine, *, oversubscribe: bool, precision: str = "") -> Iterator[str]:
    """Yields why `ranks` processes cannot run here. `device` is the job's; `precision` is
    that of training. `oversubscribe` allows more than cores and memory bear; an accelerator has one rank all the same.
    """
    if device in DEVICE_WORDS and not machine.devices:
        yield no_device(device)
        return
    if device != "cpu" and machine.devices:
        if ranks > machine.devices:
            yield (
                f"the layout starts {ranks} ranks on this machine, which has {machine.devices} devices, one rank each; "
                f"use a layout of {machine.devices}, or cluster.device=cpu"
            )
        return
    if precision == "fp8":
        yield (
            "train.precision: fp8 needs a GPU with matrix products in 8 bits; on a CPU they are only emulated, slower "
            "than in bf16, as `phalanx verify` does; nearest legal: bf16"
        )
    if oversubscribe:
        return
    most = max(FEW_RANKS, RANKS_PER_CORE * machine.cores)
    if ranks > most:
        yield (
            f"the layout starts {ranks} ranks on this machine, whose {machine.cores} cores bear {most} "
            f"({RANKS_PER_CORE} per core, at least {FEW_RANKS}); use a smaller layout, or insist with {FLAG}"
        )
    elif ranks > FEW_RANKS // 4 and ranks * RANK_BYTES > machine.free_bytes:
        yield (
            f"the layout starts {ranks} ranks, which take {ranks * RANK_BYTES / 2**30:.1f} GiB before they hold a "
            f"model; {machine.free_bytes / 2**30:.1f} GiB are free on this machine; use a smaller layout, or insist "
            f"with {FLAG}"
        )


@dataclass(frozen=True)
class ProcessGrid:
    """How many nodes, and how many processes on each."""

    nodes: int  # the most, for which the layout is
    per_node: int
    least_nodes: int
    """Nodes without which the run waits; as many as `nodes` unless a range was asked for."""

    @property
    def processes(self) -> int:
        return self.nodes * self.per_node

    @property
    def nnodes(self) -> str:
        """The nodes as torchrun's --nnodes has them: 2, or 1:2."""
        return str(self.nodes) if self.least_nodes == self.nodes else f"{self.least_nodes}:{self.nodes}"


@dataclass(frozen=True)
class GridRequest:
    """What is known before the grid is."""

    nnodes: str = ""  # N or N:M as the user wrote it; empty if open
    per_node: str = ""  # a number, "auto" for the devices of a node, or empty if open
    processes: int = 0
    layout: int = 0  # processes of the layout; 0 if the planner chooses it
    layout_words: str = ""
    cluster_nodes: int = 0  # nodes that the job's cluster has; 0 if the job does not say
    available: int = 0  # nodes of the allocation or of the host file; 0 if unknown
    where: str = ""  # the source of `available`, in words
    devices: int = 0  # accelerators of a node; 0 if there are none, or if it is unknown
    cpu: bool = False


def solve(request: GridRequest) -> ProcessGrid:
    """Returns the grid. Raises JobError with every problem, its equation and the nearest legal choice."""
    problems: list[str] = []
    least, nodes = _nodes(request.nnodes, problems)
    per_node = _per_node(request, problems)
    total = request.layout or request.processes
    if request.processes and request.layout and request.processes != request.layout:
        problems.append(
            f"--nproc {request.processes}, but the layout {request.layout_words} has {request.layout} processes; "
            f"nearest legal: --nproc {request.layout}"
        )
    if not problems:
        nodes, per_node = _inferred(request, nodes, per_node, total, problems)
    if not problems and request.available and nodes > request.available:
        problems.append(
            f"{nodes} nodes, but {request.where} has {request.available}; nearest legal: "
            f"--nnodes {request.available} --nproc-per-node {nodes * per_node // request.available}"
            if nodes * per_node % request.available == 0
            else f"{nodes} nodes, but {request.where} has {request.available}"
        )
    if not problems and request.devices and not request.cpu and per_node > request.devices:
        problems.append(
            f"{per_node} processes per node, but a node has {request.devices} devices, one process each; nearest "
            f"legal: --nproc-per-node {request.devices}, or cluster.device=cpu"
        )
    if problems:
        raise JobError(problems)
    return ProcessGrid(nodes, per_node, min(least, nodes) if least else nodes)


def _nodes(text: str, problems: list[str]) -> tuple[int, int]:
    """Returns the least and the most nodes, 0 if they are open."""
    if not text:
        return 0, 0
    match = re.fullmatch(r"([1-9][0-9]{0,4})(?::([1-9][0-9]{0,4}))?", text)
    if not match:
        problems.append(f"--nnodes {text[:80]!r}: expected a number of nodes, such as 2, or a range of it, such as 1:2")
        return 0, 0
    least, most = int(match[1]), int(match[2] or match[1])
    if least > most:
        problems.append(f"--nnodes {text}: the first is more than the second; nearest legal: --nnodes {most}:{least}")
    return least, most


def _per_node(request: GridRequest, problems: list[str]) -> int:
    text = request.per_node
    if text in ("", "auto"):
        return request.devices if text and not request.cpu else 0
    if not re.fullmatch(r"[1-9][0-9]{0,4}", text):
        problems.append(f"--nproc-per-node {text[:80]!r}: expected a number of processes, or auto")
        return 0
    return int(text)


def _inferred(request: GridRequest, nodes: int, per_node: int, total: int, problems: list[str]) -> tuple[int, int]:
    """Returns nodes and processes per node, of which 0 are those that are open."""
    if not total:
        nodes = nodes or request.cluster_nodes or request.available or 1
        if not (per_node or request.devices):
            problems.append(
                "the layout is left open, so that the number of processes is, too: give --nproc-per-node (or --nproc)"
            )
        return nodes, per_node or request.devices
    if not nodes and not per_node:
        nodes = _default_nodes(request, total)
    if not nodes:
        nodes = _divided(total, per_node, "--nproc-per-node", request, problems)
    elif not per_node:
        per_node = _divided(total, nodes, "--nnodes", request, problems)
    elif nodes * per_node != total:
        fits = total // nodes
        legal = [f"--nproc-per-node {fits}"] if total % nodes == 0 else []
        legal += [f"--nnodes {total // per_node}"] if total % per_node == 0 else []
        problems.append(
            f"--nnodes {nodes} × --nproc-per-node {per_node} = {nodes * per_node} processes, but {_whose(request)} has "
            f"{total}; nearest legal: {' or '.join(legal) or f'--nnodes {nearest_of(divisors(total), nodes)}'}, or a "
            f"layout of {nodes * per_node} processes"
        )
    return nodes, per_node


def _divided(total: int, by: int, given: str, request: GridRequest, problems: list[str]) -> int:
    if total % by:
        problems.append(
            f"{given} {by}: {_whose(request)} has {total} processes, which are not divisible by {by}; nearest legal: "
            f"{given} {nearest_of(divisors(total), by)}"
        )
    return total // by or 1


def _default_nodes(request: GridRequest, total: int) -> int:
    """Returns the nodes of a job that names none: those of its cluster, the fewest whose devices are enough, or all."""
    if request.cluster_nodes:
        return request.cluster_nodes
    most = request.available or 1
    if request.devices and not request.cpu:
        enough = [nodes for nodes in divisors(total) if total // nodes <= request.devices]
        return enough[0] if not request.available or enough[0] <= most else most
    return max(nodes for nodes in divisors(total) if nodes <= most)


def _whose(request: GridRequest) -> str:
    return f"the layout {request.layout_words}" if request.layout else "--nproc"
