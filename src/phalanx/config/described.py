"""A machine of the user's own: a known device with other links, or a device described by its data sheet.

Figures that the user leaves out come from the nearest known device and its machine; a note lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from math import log

from phalanx.config.cluster import Accelerator, Cluster, Link
from phalanx.config.clusters import CLUSTERS
from phalanx.config.device_entry import device_problems
from phalanx.config.devices import ACCELERATORS
from phalanx.nearest import did_you_mean

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
        base = _scaled(known, device)
    else:
        base = known
    filled = {
        field.name: getattr(base, field.name)
        for field in dataclasses.fields(Accelerator)
        if field.name not in described and getattr(base, field.name) != getattr(device, field.name)
    }
    filled.pop("name", None)
    device = dataclasses.replace(device, **{**filled, "name": device.name or OWN_NAME})
    found = {f"accelerator.{name}": f"{value:g}" for name, value in filled.items()}
    origins = dict.fromkeys(found, f"resolved as {known.name}")
    if "accelerator.name" not in given:
        origins["accelerator.name"] = "resolved: not named"
    links: dict[str, Link] = {}
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


def _scaled(known: Accelerator, device: Accelerator) -> Accelerator:
    """Returns the known device's figures for `device`: shares and times as they are, the fp32 peak by the ratio of
    16-bit peaks, fp16 as fast as bfloat16. Peaks of formats that nobody named are 0: the device may not have them."""
    half = _half(device)
    peaks = dict.fromkeys(_PEAKS, 0.0)
    if half:
        peaks |= {"fp16_tflops": half, "fp32_tflops": known.fp32_tflops * half / _half(known)}
    return dataclasses.replace(known, name="", **peaks)


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
