"""The machine and the framework of a table's row: the spelling of the device, the cluster, the framework."""

from __future__ import annotations

import re
from dataclasses import replace

from phalanx.config.cluster import Accelerator, Cluster
from phalanx.config.clusters import ACCELERATORS, CLUSTERS, MACHINES, MEMORY_TOLERANCE
from phalanx.cost.spec import Products
from phalanx.nearest import did_you_mean
from phalanx.registry import OWN
from phalanx.validation.row_cells import Cells

_DEVICES: tuple[tuple[str, str], ...] = (
    ("gb300", "gb300-nvl72"),
    ("gb200", "gb200-nvl72"),
    ("b300", "dgx-b300"),
    ("b200", "dgx-b200"),
    ("gh200", "gh200"),
    ("h200", "dgx-h200"),
    ("h100.*(96|hbm2e|500 ?w)", "grand-teton"),
    ("h100.*(pcie|nvl\\b)", "h100-pcie"),
    ("h800", "h800"),
    ("h100", "dgx-h100"),
    ("a800", "a800"),
    ("a100.*pcie", "a100-pcie"),
    ("a100.*40", "dgx-a100-40gb"),
    ("a100|ampere", "dgx-a100"),
    ("v100.*16", "v100-16gb"),
    ("v100", "dgx-v100"),
    ("mi355", "mi355x"),
    ("mi350", "mi350x"),
    ("mi325", "mi325x"),
    ("mi300x|mi300\\b", "mi300x"),
    ("mi250", "frontier"),
    ("max[ -]?1550|pvc|ponte", "aurora"),
    ("gaudi[ -]?3", "gaudi3"),
    ("gaudi[ -]?2", "gaudi2"),
    ("v6e|trillium", "tpu-v6e"),
    ("tpu.*v5p|v5p", "tpu-v5p"),
    ("v5e|v5 ?lite", "tpu-v5e"),
    ("tpu.*v4", "tpu-v4"),
)
"""Patterns of the devices' spellings in lower case, longer names first, and the machine."""

_SITES: tuple[tuple[str, str, str], ...] = (
    ("bigscience|jean[ -]zay", "dgx-a100", "jean-zay"),
    ("bigscience|jean[ -]zay", "dgx-v100", "jean-zay-v100"),
    ("bigscience|jean[ -]zay", "v100-16gb", "jean-zay-v100-16gb"),
    ("narayanan|korthikanti|selene|2104\\.04473|2205\\.05198", "dgx-a100", "selene"),
    ("2407\\.21783|24k-gpu", "dgx-h100", "meta-h100"),
    ("/results/eos", "dgx-h100", "eos"),
    ("polaris", "dgx-a100-40gb|dgx-a100", "polaris"),
    ("perlmutter", "dgx-a100-40gb|dgx-a100", "perlmutter"),
    ("sophia", "dgx-a100-40gb|dgx-a100", "sophia"),
)
"""Patterns of the source's description, the machine of its device, and the site's own machine."""

_FRAMEWORKS: tuple[tuple[str, str], ...] = (
    ("vtrain", "vtrain"),
    ("zero bubble|2401\\.10241", "zero-bubble"),
    ("\\(zero-3\\)", "deepspeed-zero3"),
    ("bigscience|chronicles|megatron-deepspeed", "megatron-deepspeed"),
    ("narayanan|2104\\.04473", "megatron-2021"),
    ("korthikanti|2205\\.05198", "megatron-2022"),
    ("llm-foundry", "fsdp1"),
    ("torchtitan.*async ?tp[,;]", "torchtitan-async"),
    ("torchtitan.*(_2025|2026).*compile", "torchtitan-2025"),
    ("torchtitan.*compile", "torchtitan-compile"),
    ("torchtitan", "torchtitan"),
    ("maxtext|paxml|\\bpalm\\b", "maxtext"),
    ("2407\\.21783", "llama3"),
    ("megascale.*(baseline|megatron-lm|parallel transformer|sliding window|\\+tp overlap|\\+pp overlap)", "megatron"),
    ("megascale", "megascale"),
    # Before NeMo, because half of the submissions have NeMo in their name.
    ("mlperf.*(google|tpu)", "maxtext"),
    ("mlperf", "mlperf"),
    ("\\b25\\.[01][0-9] nemo|v25\\.|dgxc", "nemo-2025"),
    ("\\b26\\.0[1-5](\\.[0-9]+)? nemo", "nemo-early-2026"),
    ("megatron-bridge|nemo", "nemo"),
    ("simumax|modelzoo|model_table|megatron-lm readme|megatron-core", "megatron-core"),
    ("deepspeed", "megatron-deepspeed"),
    ("fsdp", "torchtitan"),
)
"""Patterns of the source's description, and the family of frameworks."""

SHARDED = (
    "fsdp1",
    "torchtitan",
    "torchtitan-compile",
    "torchtitan-async",
    "torchtitan-2025",
    "maxtext",
    "deepspeed-zero3",
)
"""Frameworks that shard parameters by default."""
MODERN = ("nemo", "nemo-2025", "nemo-early-2026", "mlperf", "megatron-core", "llama3", "megascale", "megatron")
"""Megatron's relatives since 2022, whose tensor parallelism includes sequence parallelism by default."""
DISTRIBUTED = (*MODERN, "megatron-deepspeed")
"""Frameworks that shard the optimizer state by default."""
USABLE_MEMORY = 0.99
"""Share of the printed memory that a program can use, assumed for devices with an unusual size."""


def framework_of(cells: Cells) -> str:
    """Returns the family of the framework; `megatron` if it is unknown."""
    found = next((family for pattern, family in _FRAMEWORKS if re.search(pattern, cells.description)), "")
    if not found:
        cells.assume("framework unknown: as Megatron")
    return found or "megatron"


def cluster_of_row(cells: Cells) -> Cluster | None:
    """Returns the machine with as many nodes as the row needs; None with a recorded problem if it is unknown."""
    text, devices = cells.text("gpu").lower(), cells.whole("n_gpus")
    if not devices and not any(problem.startswith("n_gpus") for problem in cells.problems):
        cells.problem(f"n_gpus: is {cells.text('n_gpus') or 'blank'}, and nothing else says how many devices there are")
    machine = _named(text) or next((name for pattern, name in _DEVICES if re.search(pattern, text)), "")
    if not machine:
        known = ", ".join(ACCELERATORS)
        hint = did_you_mean(re.sub(r"nvidia|amd|intel|google|[^a-z0-9-]", "", text), ACCELERATORS)
        cells.problem(f"gpu: {cells.text('gpu')!r} is not a known device{hint} (known: {known})")
    if not machine or not devices:
        return None
    cluster = _sited(cells, machine)
    per_node = cells.whole("gpus_per_node") or cluster.devices_per_node
    per_node = min(per_node, devices)
    cluster = replace(cluster, accelerator=_with_memory(cells, text, cluster.accelerator))
    return replace(cluster, preset="", nodes=-(-devices // per_node), devices_per_node=per_node)


def _named(text: str) -> str:
    """Returns the machine of this name, or the first one that a package has added for a device of this name; empty if
    there is none."""
    if text in MACHINES:
        return text
    added = (name for name in MACHINES if MACHINES.package(name) != OWN)
    return next((name for name in added if MACHINES[name].cluster.accelerator.name == text), "")


def _with_memory(cells: Cells, text: str, device: Accelerator) -> Accelerator:
    """Returns the device with the memory that its spelling states, if that differs: an A100 with 64 GB."""
    stated = re.search("([0-9]{2,3}) ?gi?b", text)
    if not stated or abs(float(stated[1]) / device.memory_gib - 1) < MEMORY_TOLERANCE:
        return device
    cells.assume(f"{device.name} with {stated[1]} GB")
    return replace(device, memory_gib=USABLE_MEMORY * float(stated[1]))


def _sited(cells: Cells, machine: str) -> Cluster:
    """Returns the machine of the source if it is known, else the device's usual one."""
    site = next(
        (own for pattern, of, own in _SITES if re.fullmatch(of, machine) and re.search(pattern, cells.description)),
        machine,
    )
    if site == "v100-16gb":  # the one device without a machine of its own in the catalogue
        cells.assume("V100 with 16 GB in a DGX-1")
        return replace(CLUSTERS["dgx-v100"], accelerator=ACCELERATORS["v100-16gb"])
    cluster = CLUSTERS[site]
    if "vtrain" in cells.description:
        # 800 Gb/s per node (its config/validation), for eight devices. The preset's NVLink figure is from its own
        # tables of NCCL.
        return replace(cluster, inter=replace(cluster.inter, gbs=12.5))
    return cluster


def products_of(cells: Cells, cluster: Cluster, framework: str) -> Products:
    """Returns the number format of the blocks' matrix products; the narrower one of two."""
    text = cells.text("precision").lower()
    device = cluster.accelerator
    for pattern, products in (("fp4", "fp4"), ("fp8|int8|e4m3", "fp8"), ("bf16|bfloat", "bf16"), ("fp16|half", "fp16")):
        if re.search(pattern, text):
            if products in ("fp4", "fp8") and not getattr(device, f"{products}_tflops"):
                cells.problem(
                    f"precision: {cells.text('precision')!r}, but {device.name} has no {products}; nearest: bf16"
                )
            if products == "bf16" and not device.bf16_tflops:
                return "fp16"
            return products  # pyright: ignore[reportReturnType]
    if re.search("fp32|tf32|float32", text):
        return "fp32"
    if text:
        cells.problem(f"precision: {cells.text('precision')!r} is unknown; known: fp32, fp16, bf16, fp8, fp4")
    if not device.bf16_tflops:
        return "fp16"
    if (
        device.fp4_tflops
        and cells.whole("n_gpus") <= 8
        and re.search("mlperf.*v5\\.1.*8b.*(fp4|2 candidate|not matched)", cells.description)
    ):
        # There are two recipes for one node: submitters that do not use the 8-bit one use the 4-bit one.
        cells.assume("precision blank: fp4, the faster of the round's two recipes")
        return "fp4"
    if "mlperf" in cells.description and device.fp8_tflops and not device.name.startswith("tpu"):
        cells.assume("precision blank: fp8, as MLPerf submissions train")
        return "fp8"
    if framework in ("megatron-2021", "megatron-2022", "zero-bubble", "vtrain"):
        return "fp16"
    cells.assume("precision blank: bf16")
    return "bf16"
