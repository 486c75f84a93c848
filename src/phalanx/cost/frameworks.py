"""Known training frameworks by name, with the constants of time and memory that depend on them.

Values that stand in a framework's code or paper are taken from there. Six are fitted to published rows, never
more than eight of them (calibration.yaml): `slowdown`, `kernel_us`, `across_sockets`, `moe_slowdown`, `moe_host_ms`
and `recurrent_slowdown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from phalanx.blocks.operator import PHALANX as PHALANX_PROFILE
from phalanx.blocks.operator import MemoryProfile
from phalanx.config.cluster import Accelerator
from phalanx.config.values import yaml_data
from phalanx.cost.spec import Framework
from phalanx.techniques.memory import COMPILED_LOSS_TENSORS

CALIBRATION = Path(__file__).with_name("calibration.yaml")

_STORED = yaml_data(__file__, "frameworks.yaml")
Made = TypeVar("Made", MemoryProfile, Framework)


def _made(stored: Mapping[str, dict[str, Any]], made: dict[str, Made], first: Callable[..., Made]) -> dict[str, Made]:
    """Adds the entries of a section to those that are there, each after its base, and returns them."""
    for name, entry in stored.items():
        own: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        base = own.pop("base", "")
        own |= {key: COMPILED_LOSS_TENSORS for key, value in own.items() if value == "compiled"}
        own |= {key: made[own[key]] for key in ("alone", "fp16") if key in own}
        own |= {"memory_profile": PROFILES[own["memory_profile"]]} if "memory_profile" in own else {}
        own |= {"name": name} if first is Framework and not name.startswith("_") else {}
        made[name] = replace(made[base], **own) if base else first(**own)
    return made


PROFILES = _made(_STORED["profiles"], {"phalanx": PHALANX_PROFILE}, MemoryProfile)
"""The memory profiles of frameworks by name."""
FRAMEWORKS = {name: each for name, each in _made(_STORED["frameworks"], {}, Framework).items() if name[0] != "_"}
"""The known frameworks by name."""
PHALANX, PHALANX_CPU = FRAMEWORKS["phalanx"], FRAMEWORKS["phalanx-cpu"]


@dataclass(frozen=True)
class FittedValue:
    """One line of calibration.yaml: the value of a field of a framework on a device, and the rows it was fitted to."""

    field: str
    programs: str
    """Names with spaces between them."""
    device: str
    """Names with spaces between them; '': all devices without a line of their own."""
    value: float
    source: str
    numbers: tuple[int, ...]

    def is_of(self, program: str, device: str) -> bool:
        return program in self.programs.split() and (not self.device or self.is_on(device))

    def is_on(self, device: str) -> bool:
        return device in self.device.split()

    @property
    def rows(self) -> list[str]:
        return [f"{self.source}-{number:04}" for number in self.numbers]


@cache
def fits() -> tuple[FittedValue, ...]:
    """Returns the lines of calibration.yaml, those of a device after those of all others."""
    written = yaml_data(__file__, CALIBRATION.name)
    lines = [
        FittedValue(field, programs, device, value, source, tuple(numbers))
        for field, lines in written.items()
        for programs, device, value, source, numbers in lines
    ]
    return tuple(sorted(lines, key=lambda line: bool(line.device)))


DISPATCHERS = {"all-to-all": (False, False, 16), "deepep": (True, False, 20), "hybridep": (True, True, 32)}
"""Whether a dispatcher sends a token once to each node, whether it gathers the map of tokens and experts, and its cores
(SMs): NCCL's channels, DeepEP's default, and Megatron-Bridge's moe_hybridep_num_sms."""


HELD = ("inputs_leave", "parameter_bytes", "state_bytes", "gradient_bytes", "step_gradient_bytes")
"""Facts of a recipe that are fields of the memory profile."""


def as_recipe(framework: Framework, recipe: Mapping[str, Any]) -> Framework:
    """Returns the framework as a recipe with these facts runs it (validation/recipes.yaml)."""
    usual = framework.ep_once, framework.ep_maps, framework.ep_cores
    once, maps, cores = DISPATCHERS.get(recipe.get("dispatcher", ""), usual)
    graphs = recipe.get("graphs", "none")
    held = {name: recipe[name] for name in HELD if name in recipe}
    launched: dict[str, Any] = {"kernel_us": 0.0, "reads_sizes": False} if graphs == "iteration" else {}
    return replace(
        framework,
        ep_once=once,
        ep_maps=maps,
        ep_cores=cores,
        ep_overlaps=recipe.get("overlaps", False),
        graphs=graphs,
        narrow_attention=recipe.get("fp8_attention", False),
        fused_experts=recipe.get("fused_experts", False),
        wide_blocks=recipe.get("wide_blocks", 0.0),
        unrepeated=(*framework.unrepeated, *recipe.get("saves", ())),
        windows=recipe.get("windows", framework.windows),
        memory_profile=replace(framework.memory_profile, repeats=tuple(recipe.get("recomputes", ())), **held),
        **launched,
        **recipe.get("figures", {}),
    )


HOSTS = ("kernel_us", "across_sockets")
"""Fields of which every program without rows has the median of the others' values."""
UNFITTED = ("megatron", "automodel", "internlm", "kempnerforge")
"""Programs that no row was fitted to."""


AMPERE = ("a100", "a800")
"""Devices without the instructions of FlashAttention-3 and of cuDNN's kernels in clusters: programs run the second
there."""


def calibrated(program: str, device: Accelerator, without: str = "") -> Framework:
    """Returns the framework of that name, calibrated on that device by rows of other sources than `without`."""
    return recalibrated(FRAMEWORKS[program], device, without)


def recalibrated(framework: Framework, device: Accelerator, without: str = "") -> Framework:
    """Returns the framework with the values that rows of other sources than `without` give it on that device.

    A program without such rows has the median of the others' values: none reaches a device's best rates."""
    own = [line for line in fits() if line.is_of(framework.name, device.name)]
    values: dict[str, Any] = {}
    every = {line.field for line in (fits() if framework.name in UNFITTED else own)} - {"sustained"}
    for field in every | {"slowdown", *HOSTS}:
        others = [line.value for line in fits() if line.field == field and line.source != without]
        known = field in HOSTS or framework.name in UNFITTED or any(line.field == field for line in own)
        usual = 1.0 if field == "slowdown" else getattr(FRAMEWORKS[framework.name], field)
        values[field] = median(others) if known and others else usual
    fitted = {line.field: line.value for line in own if line.source != without}
    values |= fitted
    values["slowdown"] *= FRAMEWORKS[framework.name].slowdown
    values["kernel_us"] *= framework.kernel_us > 0  # nothing is launched where the whole step is one program
    if framework.flash == 3 and device.name.startswith(AMPERE):
        values["flash"] = 2
    return replace(
        framework,
        **values,
        fitted="slowdown" in fitted,
        moe_fitted=bool({"moe_slowdown", "moe_host_ms"} & fitted.keys()),
    )


def sustained(device: Accelerator, without: str = "", values: Mapping[FittedValue, float] | None = None) -> float:
    """Returns Accelerator.sustained by rows of other sources than `without`: the mean of the device's lines, weighted
    by their rows, or the median of the other devices'. A device that no line names keeps its own. `values` replace
    those of calibration.yaml."""
    rates = [line for line in fits() if line.field == "sustained"]
    if not any(line.is_on(device.name) for line in rates):
        return device.sustained
    means: dict[str, float] = {}
    for names in {line.device for line in rates if line.source != without}:
        own = [line for line in rates if line.device == names and line.source != without]
        means[names] = fmean(((values or {}).get(line, line.value) for line in own), [len(line.rows) for line in own])
    return next((mean for names, mean in means.items() if device.name in names.split()), median(means.values()))


def calibration_rows() -> frozenset[str]:
    """Returns all rows that a factor was fitted to."""
    return frozenset(row for fit in fits() for row in fit.rows)
