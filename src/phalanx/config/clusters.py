"""Known machines and devices with their sources (machines.json, devices.json), this machine as it was measured, and
machines of the user's own: what `cluster.preset` and `cluster.accelerator` may name, or describe.

A machine of the user's own is a known device with other links, or a device described by its data sheet. Figures that
the user leaves out come from the nearest known device and its machine; a note lists them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

from phalanx.config import fields, values, yaml_file
from phalanx.config.calibration import Calibration
from phalanx.config.cluster import Accelerator, Cluster, HostShare, Link, Sharing
from phalanx.config.fields import leaves
from phalanx.config.values import Known, data_file, read_as
from phalanx.errors import JobError
from phalanx.facts import stated
from phalanx.nearest import did_you_mean, nearest
from phalanx.registry import Registry, View

NOT_MEASURED = {"cluster.preset": "this file describes a machine itself"}
"""Fields of a cluster that the file must not have, with the reason."""


def default_path(env: Mapping[str, str] = os.environ) -> Path:
    """Returns $PHALANX_HOME/cluster.yaml, or phalanx/cluster.yaml in the user's XDG configuration folder."""
    if env.get("PHALANX_HOME"):
        return Path(env["PHALANX_HOME"]).expanduser() / "cluster.yaml"
    base = Path(env.get("XDG_CONFIG_HOME", ""))  # the specification ignores relative paths
    return (base if base.is_absolute() else Path.home() / ".config") / "phalanx" / "cluster.yaml"


def local_fields(path: Path) -> dict[str, Any]:
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


def read_local(nodes: int = 0, path: Path | None = None) -> Cluster:
    """Returns the measured machine with `nodes` nodes (0: those of the file, or one). Raises JobError if there is no
    file, if it has errors, or if a measurement that the machine needs is missing."""
    path = path or default_path()
    machine = read_local_partly(path)
    machine = fields.replace(machine, "nodes", nodes or machine.nodes)
    if problems := _unmeasured(machine):
        raise JobError([f"{path}: {problem}" for problem in problems])
    return machine


def read_local_partly(path: Path) -> Cluster:
    """Returns the cluster of the file, which may lack measurements. Raises JobError if it is absent or has errors."""
    if not path.exists():
        raise JobError(
            f"cluster=local is this machine as measured, and it was not measured ({path} does not exist): run "
            "`phalanx bench compute` and `phalanx bench comm` first"
        )
    machine = Cluster()
    for name, value in local_fields(path).items():
        machine = fields.replace(machine, name, value)
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


MEMORY_TOLERANCE = 0.12
"""Relative difference allowed between a driver's figure for the memory and the row's: ECC and the driver take some."""


@stated
@dataclass(frozen=True)
class DeviceEntry:
    """One row of the table."""

    accelerator: Accelerator
    source: str
    """Source of the figures."""
    reported_as: tuple[str, ...] = ()
    """Names that torch reports, without the maker's; none for devices that torch has none for. Rows that share a name
    differ in memory."""


def device_problems(device: Accelerator) -> Iterator[str]:
    """Yields every figure that a known device must state and this one does not."""
    for name in ("fp32_tflops", "memory_gib", "bandwidth_gbs"):
        if not getattr(device, name) > 0:
            yield f"{name} is missing"
    if not (device.bf16_tflops > 0 or device.fp16_tflops > 0):
        yield "bf16_tflops or fp16_tflops is missing"


def _device_problems(name: str, entry: DeviceEntry) -> Iterator[str]:
    if entry.accelerator.name != name:
        yield f"accelerator.name is {entry.accelerator.name!r}, not {name!r}"
    yield from (f"accelerator.{problem}" for problem in device_problems(entry.accelerator))
    for reported in entry.reported_as:
        if not _plain(reported):
            yield f"reported_as {reported!r} names no device"
        elif known := device_reported_as(reported, entry.accelerator.memory_gib):
            yield f"reported_as {reported!r} with {entry.accelerator.memory_gib:g} GiB already means {known.name}"


def _device_entry(name: str, stored: dict[str, Any]) -> DeviceEntry:
    return read_as(DeviceEntry, {**stored, "accelerator": {"name": name, **stored["accelerator"]}}, name)


DEVICES = Registry("device", Known("devices.json", _device_entry), _device_problems)
"""Known devices with their sources, by name. Memory is what a program can use, a little less than the nominal size."""
ACCELERATORS = View(DEVICES, lambda _, entry: entry.accelerator)
"""Known devices by name."""


def maker_of(name: str) -> str:
    """Returns the value of cluster.device that means a known device; empty for one that torch does not name so."""
    makers = {"rocm": "mi", "xpu": "max", "": ("gaudi", "tpu", "trainium", "ascend")}
    return next((device for device, prefix in makers.items() if name.startswith(prefix)), "cuda")


def device_reported_as(name: str, memory_gib: float) -> Accelerator | None:
    """Returns the known device that a driver reports as `name`, such as "NVIDIA A100-SXM4-80GB", with `memory_gib` GiB;
    None if there is none. The whole name must match except for the maker, case and hyphens, so that neither a GB200
    passes for a B200 nor a slice of a GPU (MIG) for a whole one."""
    spelled = _plain(name)
    entries = [entry for entry in DEVICES.values() if spelled in {_plain(reported) for reported in entry.reported_as}]
    found = [entry.accelerator for entry in entries]
    return next((device for device in found if abs(memory_gib / device.memory_gib - 1) < MEMORY_TOLERANCE), None)


def _plain(name: str) -> str:
    """Returns a driver's name without the maker's, in lower case, with single spaces."""
    words = re.sub(r"^(nvidia|amd|tesla|instinct|intel\(r\)|\s)+\s", "", name.lower().strip())
    return " ".join(re.split(r"[\s_-]+", words))


LINK_REACHED = 0.8
"""Share of a PCIe link's bandwidth that large copies of pinned memory reach: 25 of 32 GB/s over PCIe 4.0."""
UPDATE_REACHED = 0.43
"""Share of the host's memory bandwidth that an optimizer's update reaches: AdamW on 10 billion parameters moves 280 GB
in 2.57 s on a host with 256 GB/s (Ren et al. 2021, table 4: CPU-Adam, two Xeon 8168)."""
DISK_REACHED = 0.8
"""Share of the disks' peak bandwidth that large requests reach, of which half are writes: assumed."""


@stated
@dataclass(frozen=True)
class MachineEntry:
    """One row of the table: a node and the links between nodes."""

    cluster: Cluster
    source: str
    """Source of the figures."""


LOCAL = "local"
"""Name of the machine that was measured here."""


@dataclass(frozen=True)
class _Cards:
    """Network cards of `gbits` Gb/s, each shared by `devices_per_card` devices."""

    gbits: float
    devices_per_card: float = 1
    latency_us: float = 12


@dataclass(frozen=True)
class _Host:
    """A host of `devices` devices: its memory and what that moves, each device's link to it, and the local disks."""

    devices: int
    memory_gb: float
    bandwidth_gbs: float
    link_gbs: float
    disk_tb: float = 0
    disk_gbs: float = 0


def _entry(name: str, stored: dict[str, Any]) -> MachineEntry:
    """Returns an entry of machines.json: a cluster with the name of its device, in whose place a link or a host may be
    the name of one of the file's, and a link may be cards."""
    file, stored = data_file("machines.json"), dict(stored)
    for part, known in (("intra", "links"), ("inter", "links"), ("host", "hosts")):
        if isinstance(said := stored.get(part), str):
            stored[part] = file[known][said]
        elif said and "like" in said:
            stored[part] = {**file[known][said["like"]], **said}
        if part in stored:
            stored[part] = {key: each for key, each in stored[part].items() if key not in ("like", "comment")}
    accelerator, source = ACCELERATORS[stored.pop("device")], stored.pop("source")
    share = HostShare()
    if "host" in stored:
        host = read_as(_Host, stored.pop("host"), name)
        share = HostShare(
            memory_gib=host.memory_gb * 1e9 / 2**30 / host.devices,
            link_gbs=host.link_gbs * LINK_REACHED,
            update_gbs=UPDATE_REACHED * host.bandwidth_gbs / host.devices,
            disk_gbs=DISK_REACHED * host.disk_gbs / host.devices,
            disk_gib=host.disk_tb * 1e12 / 2**30 / host.devices,
        )
    if "gbits" in stored["inter"]:
        cards = read_as(_Cards, stored["inter"], name)
        gbs = cards.gbits / 8 / cards.devices_per_card
        stored["inter"] = {"gbs": gbs, "latency_us": cards.latency_us, "reached": 0.85}
    cluster = read_as(Cluster, {"devices_per_node": stored.pop("devices"), **stored}, name)
    return MachineEntry(replace(cluster, accelerator=accelerator, host=share), source)


def _entry_problems(name: str, entry: MachineEntry) -> Iterator[str]:
    """Yields every figure that a known machine must state and this one does not, and those that it must not state."""
    cluster = entry.cluster
    if name == LOCAL:
        yield "the name stands for the machine that `phalanx bench` measured"
    if not cluster.accelerator.name:
        yield "cluster.accelerator.name is missing"
    yield from (f"cluster.accelerator.{problem}" for problem in device_problems(cluster.accelerator))
    if not cluster.devices_per_node:
        yield "cluster.devices_per_node is missing"
    for link in ("intra", "inter") if cluster.devices_per_node > 1 else ("inter",):
        for figure in ("gbs", "latency_us", "reached"):
            if not getattr(getattr(cluster, link), figure) > 0:
                yield f"cluster.{link}.{figure} is missing"
    for field, nothing in (
        ("preset", ""),
        ("nodes", 1),
        ("failures", ()),
        ("sharing", Sharing()),
        ("calibration", Calibration()),
    ):
        if getattr(cluster, field) != nothing:
            yield f"cluster.{field} is not a machine's own: leave it out"


MACHINES = Registry("cluster", Known("machines.json", _entry), _entry_problems)
"""Known machines with their sources, by name, as one node."""
CLUSTERS = View(MACHINES, lambda name, entry: replace(entry.cluster, preset=name))
"""Known machines by name, as one node."""


def cluster_of(preset: str) -> Cluster:
    """Returns the machine of `cluster.preset`: `dgx-h100:64` is 64 of its nodes, `dgx-h100` one, `local` the machine
    that `phalanx bench` measured here. Raises JobError with the nearest name for an unknown machine, for an invalid
    number of nodes, and for a `local` that was not measured."""
    name, colon, nodes = preset.partition(":")
    if name not in CLUSTERS and name != LOCAL:
        meant = nearest(name, [*CLUSTERS, LOCAL])
        hint = f"; did you mean {meant}{colon}{nodes}?" if meant else ""
        raise JobError(f"no cluster preset {name!r}{hint} (known: {', '.join([*CLUSTERS, LOCAL])})")
    if colon and not re.fullmatch("[1-9][0-9]{0,18}", nodes):
        raise JobError(f"{preset!r}: after the colon comes the number of nodes, such as {name}:8")
    if name == LOCAL:
        return replace(read_local(int(nodes or 0)), preset=preset)
    return replace(CLUSTERS[name], preset=preset, nodes=int(nodes or 1))


OWN_NAME = "own device"
"""Name of a described accelerator that the user did not name."""
_PEAKS = ("bf16_tflops", "fp16_tflops", "fp8_tflops", "fp4_tflops", "fp32_tflops")
_KEYS = ("bandwidth_gbs", "memory_gib")


@dataclasses.dataclass(frozen=True)
class Described:
    """A described machine with every figure, and where the figures that the user left out come from."""

    cluster: Cluster
    filled: dict[str, str]
    """Origin of each figure that was filled in, by its path within `cluster`."""
    note: str = ""
    """A line for the user that names the filled figures."""
    problems: tuple[tuple[str, str], ...] = ()
    """Paths within `cluster` and messages."""


def describe(cluster: Cluster, given: Set[str]) -> Described:
    """Completes a machine whose accelerator the user described; `given` are the paths within `cluster` that the user
    set. A machine without such a path, or from a preset, is returned as it is, with its problems."""
    device = cluster.accelerator
    named = {path.removeprefix("accelerator.") for path in given if path.startswith("accelerator.")}
    default = Accelerator()
    # A 0 where 0 is the default is what a job has that does not know the figure.
    described = {name for name in named if getattr(device, name) or getattr(default, name)}
    changed = any(getattr(device, name) != getattr(default, name) for name in named)
    if not changed or any(path.startswith("calibration.") for path in given):  # measured: nothing is to be assumed
        return Described(cluster, {})
    if any(getattr(device, name) < 0 for name in named & {*_PEAKS, *_KEYS}):  # out of its range
        return Described(cluster, {})
    if cluster.preset or cluster.device == "cpu":  # no known device resembles a process of a CPU
        wrong = tuple(_missing(device, named, cluster.device == "cpu")) if device.name else ()
        return Described(cluster, {}, problems=wrong)
    known = ACCELERATORS.get(device.name)
    if known is None:
        if wrong := tuple(_missing(device, named)):
            return Described(cluster, {}, problems=wrong)
        known = _nearest(device)
        half = _half(device)
        peaks: dict[str, Any] = dict.fromkeys(_PEAKS, 0.0)
        if half:
            peaks |= {"fp16_tflops": half, "fp32_tflops": known.fp32_tflops * half / _half(known)}
        base = dataclasses.replace(known, name="", **peaks)
    else:
        base = known
    filled: dict[str, Any] = {
        field.name: getattr(base, field.name)
        for field in dataclasses.fields(Accelerator)
        if field.name not in described and getattr(base, field.name) != getattr(device, field.name)
    }
    filled.pop("name", None)
    device = dataclasses.replace(device, **filled, name=device.name or OWN_NAME)
    found = {f"accelerator.{name}": f"{value:g}" for name, value in filled.items()}
    origins = dict.fromkeys(found, f"resolved as {known.name}")
    if "accelerator.name" not in given:
        origins["accelerator.name"] = "resolved: not named"
    links: dict[str, Any] = {}
    machine = next((name for name, each in CLUSTERS.items() if each.accelerator.name == known.name), "")
    for kind in ("intra", "inter") if machine else ():
        link, more = _completed(getattr(cluster, kind), getattr(CLUSTERS[machine], kind), kind, given)
        links[kind] = link
        found |= more
        origins |= dict.fromkeys(more, f"resolved as {machine}")
    cluster = dataclasses.replace(cluster, accelerator=device, **links)
    of_device = device.name if device.name in ACCELERATORS else f"{known.name}, the nearest known device"
    if device.name in ACCELERATORS:  # the table's figures are what its name means: only the links are assumed
        found = {path: text for path, text in found.items() if not path.startswith("accelerator.")}
    listed = ", ".join(f"{path.removeprefix('accelerator.')} {text}" for path, text in found.items())
    source = of_device + (f" (links: {machine})" if machine else "")
    note = f"cluster: figures that are not given are those of {source}: {listed}" if found else ""
    return Described(cluster, origins, note, tuple(_unlinked(cluster)))


def _missing(device: Accelerator, named: Set[str], is_cpu: bool = False) -> list[tuple[str, str]]:
    """Returns one problem that names every figure a prediction needs and the device lacks, or one for each that is
    `named` and 0."""
    if device.name and not any(getattr(device, name) for name in (*_PEAKS, *_KEYS)):
        return [
            (
                "accelerator.name",
                f"no known device {device.name!r}{_alike(device.name)} (known: "
                f"{', '.join(ACCELERATORS)}); of another give bf16_tflops, memory_gib and bandwidth_gbs",
            )
        ]
    lacks = [problem.removesuffix(" is missing") for problem in device_problems(device)]
    lacks = [name for name in lacks if name != "memory_gib" or not is_cpu]
    half, full = "bf16_tflops or fp16_tflops", "fp32_tflops"
    spare = half if half in lacks and full not in lacks else full  # one peak is enough: the other follows
    lacks = [name for name in lacks if name != spare]
    if wrong := [name for lack in lacks for name in lack.split(" or ") if name in named]:
        return [(f"accelerator.{name}", "must be above 0, is 0") for name in wrong]
    if not lacks:
        return []
    return [
        (
            "accelerator",
            f"{', '.join(lacks)} {'is' if len(lacks) == 1 else 'are'} missing; give the figure of the data sheet, or "
            f"name a known device: cluster.accelerator=h100-80gb (known: {', '.join(ACCELERATORS)})",
        )
    ]


def _alike(name: str) -> str:
    begins = [known for known in ACCELERATORS if known.startswith(name.lower())]
    return f"; did you mean {' or '.join(begins)}?" if begins and name else did_you_mean(name, ACCELERATORS)


def _nearest(device: Accelerator) -> Accelerator:
    """Returns the known device whose 16-bit peak (or fp32 peak), memory bandwidth and memory are nearest by ratio."""

    def distance(known: Accelerator) -> float:
        pairs = [(_half(device), _half(known))] if _half(device) else [(device.fp32_tflops, known.fp32_tflops)]
        pairs += [(getattr(device, name), getattr(known, name)) for name in _KEYS]
        return sum(log(one / other) ** 2 for one, other in pairs)

    return min(ACCELERATORS.values(), key=distance)


def _half(device: Accelerator) -> float:
    return device.bf16_tflops or device.fp16_tflops


def _completed(link: Link, known: Link, kind: str, given: Set[str]) -> tuple[Link, dict[str, str]]:
    """Returns a link with the figures of a known one where none is given, and their texts by path. Pairs without a
    switch are the known link's only together with its bandwidth."""
    own_speed = f"{kind}.gbs" in given
    names = [name for name in ("gbs", "latency_us", "reached", "pair_gbs", "reduces") if f"{kind}.{name}" not in given]
    if own_speed and "pair_gbs" in names:
        names.remove("pair_gbs")
    filled = {name: getattr(known, name) for name in names if getattr(known, name) != getattr(link, name)}
    return dataclasses.replace(link, **filled), {
        f"{kind}.{name}": str(value).lower() if isinstance(value, bool) else f"{value:g}"
        for name, value in filled.items()
    }


def _unlinked(cluster: Cluster) -> list[tuple[str, str]]:
    """Returns a problem of every link that the machine needs and that has no bandwidth, and of an impossible domain."""
    found = []
    for kind, needed, why in (
        ("intra", cluster.devices_per_node > 1, f"{cluster.devices_per_node} devices per node"),
        ("inter", cluster.nodes > 1, f"{cluster.nodes} nodes"),
    ):
        if needed and not getattr(cluster, kind).gbs:
            found.append((f"{kind}.gbs", f"must be above 0: the machine has {why}"))
    domain, per_node = cluster.domain, cluster.devices_per_node
    if domain and per_node and domain % per_node and per_node % domain:
        found.append(("domain", f"must divide devices_per_node {per_node} or be a multiple of it, is {domain}"))
    return found
