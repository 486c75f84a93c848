"""Checks of GPUs: what the driver says (nvidia-smi), and whether torch sees the same."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.doctor.findings import CheckResult, DoctorCheck, error, ok, warn
from phalanx.doctor.machine import CheckedMachine
from phalanx.units import counted

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
        name, driver, total, used, mig, persistence, mode, ecc = cells
        return cls(
            name,
            driver,
            _number(total),
            _number(used),
            mig == "Enabled",
            persistence != "Disabled",
            mode == "Prohibited",
            int(_number(ecc)),
        )


def _number(cell: str) -> float:
    """Returns a number; 0 for what a GPU does not have, such as "[N/A]"."""
    return float(cell) if re.fullmatch(r"[0-9.]+", cell) else 0.0


def checks(machine: CheckedMachine) -> list[DoctorCheck]:
    """Returns the checks of this group."""
    return [DoctorCheck("accelerator", "gpu", lambda: gpus(machine), _DRIVER, 6.0)]


def gpus(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields the GPUs, their faults, and where the driver and torch differ."""
    program = shutil.which("nvidia-smi", path=machine.env.get("PATH", ""))
    nodes = [name for name in machine.list("/dev") if re.fullmatch(r"nvidia[0-9]+", name)]
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
    facts = machine.torch.facts() if nodes or machine.job.cluster.device == "cuda" else {}
    seen = facts.get("devices", [])
    if machine.job.cluster.device == "cuda" and not seen:
        yield error("cluster.device is cuda, and this machine has no GPU", "use cluster.device=cpu, or another machine")
    elif seen:
        yield ok(f"torch sees {len(seen)} × {seen[0]}")
    elif not nodes:
        yield ok("no NVIDIA driver: ranks compute on the CPU")


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
