"""`cluster=local`: this machine as measured by `phalanx bench`, read from the YAML file that it wrote. The file is a
job file with a `cluster` section only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.config import values, yaml_file
from phalanx.config.cluster import Cluster
from phalanx.config.fields import leaves, replace
from phalanx.errors import JobError

NOT_MEASURED = {"cluster.preset": "this file describes a machine itself"}
"""Fields of a cluster that the file must not have, with the reason."""


def default_path(env: Mapping[str, str] = os.environ) -> Path:
    """Returns $PHALANX_HOME/cluster.yaml, or phalanx/cluster.yaml in the user's XDG configuration folder."""
    if env.get("PHALANX_HOME"):
        return Path(env["PHALANX_HOME"]).expanduser() / "cluster.yaml"
    base = Path(env.get("XDG_CONFIG_HOME", ""))  # the specification ignores relative paths
    return (base if base.is_absolute() else Path.home() / ".config") / "phalanx" / "cluster.yaml"


def read_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of `cluster` that the file sets, by dotted path (`intra.gbs`).

    Raises JobError with every problem: YAML, unknown fields, values of another type, each with its line."""
    settings, problems = yaml_file.read(path)
    found: dict[str, Any] = {}
    for setting in settings:
        section, _, name = setting.path.partition(".")
        try:
            if section != "cluster" or setting.path in NOT_MEASURED:
                raise ValueError(NOT_MEASURED.get(setting.path, "this file has only a `cluster` section"))
            found[name] = values.convert(setting.text, leaves()[setting.path])
        except ValueError as error:
            problems.append(f"{setting.origin}: {setting.path}: {error}")
    if problems:
        raise JobError(problems)
    return found


def read(nodes: int = 0, path: Path | None = None) -> Cluster:
    """Returns the measured machine with `nodes` nodes (0: those of the file, or one). Raises JobError if there is no
    file, if it has errors, or if a measurement that the machine needs is missing."""
    path = path or default_path()
    machine = read_partly(path)
    machine = replace(machine, "nodes", nodes or machine.nodes)
    if problems := _unmeasured(machine):
        raise JobError([f"{path}: {problem}" for problem in problems])
    return machine


def read_partly(path: Path) -> Cluster:
    """Returns the cluster of the file, which may lack measurements. Raises JobError if it is absent or has errors."""
    if not path.exists():
        raise JobError(
            f"cluster=local is this machine as measured, and it was not measured ({path} does not exist): run "
            "`phalanx bench compute` and `phalanx bench comm` first"
        )
    machine = Cluster()
    for name, value in read_fields(path).items():
        machine = replace(machine, name, value)
    return machine


def _unmeasured(machine: Cluster) -> list[str]:
    """Returns a message for each measurement that a prediction lacks."""
    found = []
    device, links = machine.accelerator, {"intra": machine.devices_per_node != 1, "inter": machine.nodes > 1}
    if not device.bandwidth_gbs or not any((device.fp32_tflops, device.bf16_tflops, device.fp16_tflops)):
        found.append("cluster.accelerator is not measured: run `phalanx bench compute`")
    if links["intra"] and not machine.intra.gbs:
        found.append("cluster.intra is not measured: run `phalanx bench comm`, or set cluster.devices_per_node to 1")
    if links["inter"] and not machine.inter.gbs:
        found.append(
            f"cluster.inter is not measured, and there are {machine.nodes} nodes: run `phalanx bench comm` on several "
            "nodes with torchrun, srun or mpiexec, or write cluster.inter.gbs and .latency_us into this file"
        )
    return found
