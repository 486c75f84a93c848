"""Known training frameworks by name, with the constants of time and memory that depend on them.

Values that stand in a framework's code or paper are taken from there. Five are fitted to published rows, never
more than eight of them (calibration.yaml): `slowdown`, `kernel_us`, `moe_slowdown`, `moe_host_ms` and
`recurrent_slowdown`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from phalanx.config.cluster import Accelerator
from phalanx.cost import memory_profiles as profiles
from phalanx.cost.spec import Framework

CALIBRATION = Path(__file__).with_name("calibration.yaml")

_PHALANX = Framework(
    name="phalanx",
    interference=1.5,
    passes=2.0,
    cast_bytes=9,
    casts_each=True,
    narrow_experts=False,
    clip_bytes=0,
    memory_profile=profiles.PHALANX,
)
PHALANX = replace(_PHALANX, slowdown=1.14, alone=replace(_PHALANX, passes=2.5, moe_slowdown=1.4))
"""Phalanx: operations in torch's eager mode, flash attention, everything overlapped. In a cluster it was not measured:
its slowdown is the middle of those fitted to torchtitan, which runs the same kernels of the same library; its
interference is assumed to be near that of FSDP1. Alone it is fitted to the kernels of three steps on one H200
(tests/cost/one_device.yaml), which are the best ones; there rows of experts were still summed by an atomic addition per
element."""

PHALANX_CPU = replace(
    _PHALANX,
    name="phalanx-cpu",
    slowdown=1.0,
    interference=1.5,
    sum_passes=3.0,
    memory_profile=replace(
        profiles.PHALANX,
        masks="runs",
        rms_copies=True,
        copies_sums=True,
        context_mib=380,
        communicator_mib=0,
        reserve=1.0,
    ),
)
"""Phalanx on CPUs: their rates are measured on the machine itself, and the context is the memory of the process beside
its tensors (a Python with torch and gloo: 380 MiB). Gloo moves bytes with the cores that compute: half of the time of
an all-reduce is processor time (40 MB between two processes: 53 ms, of which 21 to 27), which products lose."""

UNFUSED_LOSS = 1.86
"""`loss_passes` of Megatron-LM's loss before it was fused (megatron/mpu/cross_entropy.py): 52 bytes per logit for its
copy in fp32 (6), largest (4), difference (8), exponential (8), sum (4), quotient (8), gradient (8) and that in 16 bits
(6), where fused kernels move 28."""

MEGATRON_2021 = Framework(
    name="megatron-2021",
    attention="unfused",
    loss_passes=UNFUSED_LOSS,
    reads_sizes=True,
    dp_overlaps=False,
    pp_overlaps=False,
    pp_scatters=True,
    memory_profile=profiles.MEGATRON_2021,
)
"""Megatron-LM of Narayanan et al. 2021: unfused attention, fused softmax, GELU and dropout-residual kernels (section
4.2), reduction after the last backward pass (section 5)."""

MEGATRON_2022 = replace(MEGATRON_2021, name="megatron-2022")
"""Megatron-LM of Korthikanti et al. 2022."""

VTRAIN = replace(
    MEGATRON_2021,
    name="vtrain",
    pp_scatters=False,
    memory_profile=profiles.MEGATRON_DEEPSPEED_FP16,
)
"""Megatron-DeepSpeed as vTrain's authors ran it (Bang et al. 2024, section 5): small models, which are launch-bound."""

MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021, name="megatron-deepspeed", pp_scatters=False, memory_profile=profiles.MEGATRON_DEEPSPEED
)
"""BLOOM's framework (bigscience-workshop/Megatron-DeepSpeed): ZeRO-1 in a pipeline."""

DEEPSPEED_ZERO3 = replace(MEGATRON_2021, name="deepspeed-zero3", messages=12, memory_profile=profiles.DEEPSPEED_ZERO3)
"""DeepSpeed's ZeRO-3 of 2021 (Narayanan et al. 2021, table 2)."""

ZERO_BUBBLE = replace(MEGATRON_2022, name="zero-bubble")
"""Qi et al. 2023's fork of Megatron-LM."""

MEGATRON_CORE = Framework(
    name="megatron-core",
    flash=3,
    reads_sizes=True,
    ep_folds=True,
    memory_profile=profiles.MEGATRON_CORE,
)
"""Megatron Core with Transformer Engine: fused kernels, flash attention, overlapped distributed optimizer."""

NEMO = replace(
    MEGATRON_CORE, name="nemo", tp_hidden=0.7, gathers_narrow=True, ep_once=True, memory_profile=profiles.NEMO
)
"""NVIDIA's own recipes (NeMo, Megatron-Bridge, MLPerf): user buffers overlap tensor-parallel traffic, CUDA graphs and
fp8 parameters if the recipe has them."""

NEMO_2025 = replace(NEMO, name="nemo-2025", ep_once=False)
"""NeMo containers of 2025 (25.02 to 25.11), whose experts ran in many small kernels. Their recipes use NCCL's
all-to-all unless they say so: DeepEP and HybridEP came with 25.11."""

NEMO_EARLY_2026 = replace(NEMO, name="nemo-early-2026")
"""NeMo containers 26.02 to 26.04, before fused permutation and graphs of whole MoE blocks (26.06)."""

MLPERF = replace(NEMO, name="mlperf")
"""NVIDIA's recipes, tuned for MLPerf's rounds."""

MLPERF_2023 = replace(MLPERF, name="mlperf-2023", flash=1)
"""Those of round 3.0, with the first FlashAttention and selective recomputation (mlcommons/training_results_v3.0,
NVIDIA/benchmarks/gpt3: activations_checkpoint_granularity selective, use_emha False)."""

MEGASCALE = replace(MEGATRON_CORE, name="megascale", tp_hidden=0.5)
"""MegaScale (Jiang et al. 2024)."""

LLAMA3 = replace(MEGATRON_CORE, name="llama3", memory_profile=profiles.LLAMA3)
"""The framework of Llama 3 (Llama Team 2024, section 3.3)."""

INTERNLM = Framework(
    name="internlm",
    flash=1,
    passes=2.0,
    reads_sizes=True,
    broadcasts=True,
    sum_passes=3.0,
    memory_profile=profiles.INTERNLM,
)
"""InternLM's framework of 2023: kernels of the first FlashAttention and Apex, other operations in eager mode, tensor
parallelism without sequence parallelism, timers that wait for the device after each micro-batch, gradients that torch
adds up in kernels of their own, and parameters that their owners broadcast after the step
(internlm/solver/optimizer/hybrid_zero_optim.py)."""

FSDP1 = Framework(name="fsdp1", flash=1, interference=1.6, passes=2.0, memory_profile=profiles.FSDP1)
"""llm-foundry and Composer on torch's first FSDP, in eager mode; reduces in the width of the computation."""

TORCHTITAN = Framework(name="torchtitan", passes=2.0, memory_profile=profiles.TORCHTITAN)
"""torchtitan on FSDP2 in eager mode."""

TORCHTITAN_COMPILE = replace(
    TORCHTITAN, name="torchtitan-compile", passes=1.0, memory_profile=profiles.TORCHTITAN_COMPILED
)
"""torchtitan with compiled blocks."""

TORCHTITAN_2025 = replace(TORCHTITAN_COMPILE, name="torchtitan-2025", memory_profile=profiles.TORCHTITAN_COMPILED_LOSS)
"""torchtitan from 2025 on, with compiled blocks and loss."""

TORCHTITAN_ASYNC = replace(TORCHTITAN_COMPILE, name="torchtitan-async", tp_hidden=0.5)
"""torchtitan with compiled blocks and chunked tensor-parallel traffic that overlaps with products (AsyncTP)."""

KEMPNERFORGE = replace(
    TORCHTITAN_COMPILE, name="kempnerforge", gathers_each=True, whole_logits=True, memory_profile=profiles.KEMPNERFORGE
)
"""KempnerForge: FSDP2 and DTensor's tensor parallelism as torch's documents show it, without torchtitan's prepared
inputs and loss over slices of the vocabulary (kempnerforge/distributed/tensor_parallel.py)."""

AUTOMODEL = replace(
    TORCHTITAN_COMPILE,
    name="automodel",
    flash=3,
    ep_once=True,
    memory_profile=profiles.AUTOMODEL,
)
"""NVIDIA NeMo AutoModel: Hugging Face's models with kernels of Transformer Engine and DeepEP's dispatch, on FSDP2."""

MAXTEXT = Framework(name="maxtext", flash=3, kernel_us=0, tp_hidden=0.5, memory_profile=profiles.XLA)
"""JAX: the compiler makes one program of a step."""

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        PHALANX,
        PHALANX_CPU,
        MEGATRON_2021,
        MEGATRON_2022,
        VTRAIN,
        MEGATRON_DEEPSPEED,
        DEEPSPEED_ZERO3,
        ZERO_BUBBLE,
        MEGATRON_CORE,
        NEMO,
        NEMO_2025,
        NEMO_EARLY_2026,
        MLPERF,
        MLPERF_2023,
        MEGASCALE,
        LLAMA3,
        INTERNLM,
        FSDP1,
        TORCHTITAN,
        TORCHTITAN_COMPILE,
        TORCHTITAN_ASYNC,
        TORCHTITAN_2025,
        KEMPNERFORGE,
        AUTOMODEL,
        MAXTEXT,
        replace(MEGATRON_CORE, name="megatron"),
    )
}
"""The known frameworks by name."""


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
    written = yaml.safe_load(CALIBRATION.read_text(encoding="utf-8"))
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
    launched = {"kernel_us": 0.0, "reads_sizes": False} if graphs == "iteration" else {}
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
        windows=recipe.get("windows", framework.windows),
        memory_profile=replace(framework.memory_profile, repeats=tuple(recipe.get("recomputes", ())), **held),
        **launched,
        **recipe.get("figures", {}),
    )


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
    for field in every | {"slowdown", "kernel_us"}:
        others = [line.value for line in fits() if line.field == field and line.source != without]
        known = field == "kernel_us" or framework.name in UNFITTED or any(line.field == field for line in own)
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
