"""The table of known devices: their rates, the sources, and the names that drivers report.

Peaks are dense, of the form that the row names, without sparsity. Some figures are not on data sheets: `ceiling` and
`fp8_ceiling` come from ml-engineering's table of maximum achievable matmul FLOPs, or from a device of the same family
if that lacks it; `sustained` and `older` are calibrated on published runs of clusters, `alone` on the steps of one
H200 (docs/explanation/cost-model.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from phalanx.config.cluster import Accelerator
from phalanx.config.device_entry import DeviceEntry, device_problems
from phalanx.registry import Registry, View

_BEKMAN = "ml-engineering, compute/accelerator (Bekman 2026)"
"""Source of peaks, memory, bandwidth and ceilings; the page cites the makers' data sheets."""
_TPU_SOURCE = f"{_BEKMAN}; ceiling: How to Scale Your Model (Austin et al. 2025), chapter 12"
MEMORY_TOLERANCE = 0.12
"""Relative difference allowed between a driver's figure for the memory and the row's: ECC and the driver take some."""


_VOLTA = Accelerator(
    fp16_tflops=125,
    fp32_tflops=15.7,
    ceiling=0.80,
    fp8_ceiling=0.7,
    bandwidth_gbs=900,
    cores=80,
    sustained=0.8,
    launch_us=5.0,
)
"""The SXM2 form; it has no bfloat16."""
_AMPERE = Accelerator(
    bf16_tflops=312,
    fp16_tflops=312,
    fp32_tflops=19.5,
    ceiling=0.869,
    fp8_ceiling=0.7,
    cores=108,
    sustained=0.92,
    launch_us=4.0,
)
_HOPPER = Accelerator(
    bf16_tflops=989,
    fp16_tflops=989,
    fp8_tflops=1979,
    fp32_tflops=67,
    ceiling=0.803,
    fp8_ceiling=0.709,
    memory_gib=79.1,
    bandwidth_gbs=3350,
    cores=132,
    sustained=0.82,
    alone=0.967,
    older=0.62,
    launch_us=3.0,
)
_BLACKWELL = Accelerator(
    bf16_tflops=2250,
    fp16_tflops=2250,
    fp8_tflops=4500,
    fp4_tflops=9000,
    fp32_tflops=80,
    bandwidth_gbs=8000,
    cores=148,
    older=0.35,
    launch_us=3.0,
)
_GRACE_BLACKWELL = replace(
    _BLACKWELL,
    bf16_tflops=2500,
    fp16_tflops=2500,
    fp8_tflops=5000,
    fp4_tflops=10000,
    ceiling=0.729,
    fp8_ceiling=0.723,
    cores=152,
)
_CDNA3 = Accelerator(
    bf16_tflops=1307,
    fp16_tflops=1307,
    fp8_tflops=2615,
    fp32_tflops=163.4,
    cores=304,
    sustained=0.9,
    launch_us=5.0,
)
_CDNA4 = Accelerator(
    bf16_tflops=2300,
    fp16_tflops=2300,
    fp8_tflops=4600,
    fp4_tflops=9200,
    memory_gib=287.5,
    bandwidth_gbs=8000,
    cores=256,
    sustained=0.9,
    launch_us=5.0,
)
_TPU = Accelerator(ceiling=0.95, fp8_ceiling=0.95, sustained=0.9, launch_us=1.0)
"""A compiler makes one program of a step, so nothing is launched. A core has two to four large systolic arrays."""

_ENTRIES = (
    DeviceEntry(
        replace(_VOLTA, name="v100-16gb", memory_gib=15.8),
        source="NVIDIA V100 data sheet; ceiling: the vendor's cuBLAS figures",
        reported_as=("V100-SXM2-16GB",),
    ),
    DeviceEntry(
        replace(_VOLTA, name="v100-32gb", memory_gib=31.7),
        source="NVIDIA V100 data sheet; ceiling: the vendor's cuBLAS figures",
        reported_as=("V100-SXM2-32GB", "V100-SXM3-32GB", "V100-DGXS-32GB"),
    ),
    DeviceEntry(
        replace(_AMPERE, name="a100-40gb", memory_gib=39.4, bandwidth_gbs=1555),
        source=f"{_BEKMAN}; the PCIe form with 40 GB has the same peaks",
        reported_as=("A100-SXM4-40GB", "A100-PCIE-40GB", "A800-SXM4-40GB", "A100"),
    ),
    DeviceEntry(
        replace(_AMPERE, name="a100-80gb", memory_gib=79.2, bandwidth_gbs=2039),
        source=f"{_BEKMAN}; an A800 differs in its links only",
        reported_as=("A100-SXM4-80GB", "A800-SXM4-80GB", "A100"),
    ),
    DeviceEntry(
        replace(_AMPERE, name="a100-pcie-80gb", ceiling=0.811, memory_gib=79.2, bandwidth_gbs=1935),
        source=f"{_BEKMAN}; an A800 differs in its links only",
        reported_as=("A100 80GB PCIe", "A800 80GB PCIe"),
    ),
    DeviceEntry(
        replace(_HOPPER, name="h100-80gb"),
        source=_BEKMAN,
        reported_as=("H100 80GB HBM3", "H100"),
    ),
    DeviceEntry(
        # 500 W instead of 700: the clock, and with it the ceiling, is lower by the cube root of the power,
        # (500/700)^(1/3) = 0.89.
        replace(
            _HOPPER,
            name="h100-96gb",
            ceiling=0.803 * 0.89,
            fp8_ceiling=0.709 * 0.89,
            memory_gib=94.5,
            bandwidth_gbs=2400,
        ),
        source="torchtitan, benchmarks/llama3_h100_202412: Meta's Grand Teton variant, with HBM2e and 500 W",
        reported_as=("H100",),
    ),
    DeviceEntry(
        replace(
            _HOPPER,
            name="h100-pcie-80gb",
            bf16_tflops=756,
            fp16_tflops=756,
            fp8_tflops=1513,
            fp32_tflops=51,
            ceiling=0.75,
            fp8_ceiling=0.66,
            bandwidth_gbs=2000,
            cores=114,
        ),
        source=f"{_BEKMAN}; ceilings assumed from the SXM form's",
        reported_as=("H100 PCIe",),
    ),
    DeviceEntry(
        replace(_HOPPER, name="h800-80gb"),
        source=f"{_BEKMAN}: an H100 but for its links",
        reported_as=("H800",),
    ),
    DeviceEntry(
        replace(_HOPPER, name="h200", fp8_ceiling=0.734, memory_gib=139.8, bandwidth_gbs=4800),
        source=_BEKMAN,
        reported_as=("H200",),
    ),
    DeviceEntry(
        replace(_HOPPER, name="gh200", ceiling=0.838, fp8_ceiling=0.776, memory_gib=94.5, bandwidth_gbs=4000),
        source=f"{_BEKMAN}: the Hopper of a Grace Hopper superchip, with 96 GB of HBM3",
        reported_as=("GH200 480GB", "GH200 120GB"),  # the figure is the processor's memory
    ),
    DeviceEntry(
        replace(_BLACKWELL, name="b200", ceiling=0.776, fp8_ceiling=0.763, memory_gib=178.4, sustained=0.62),
        source=_BEKMAN,
        reported_as=("B200",),
    ),
    DeviceEntry(
        replace(
            _BLACKWELL,
            name="b300",
            fp4_tflops=13500,
            ceiling=0.786,
            fp8_ceiling=0.745,
            memory_gib=268.0,
            sustained=0.66,
        ),
        source=_BEKMAN,
        reported_as=("B300 SXM6 AC", "B300"),
    ),
    DeviceEntry(
        replace(_GRACE_BLACKWELL, name="gb200", memory_gib=184.0, sustained=0.72),
        source=_BEKMAN,
        reported_as=("GB200",),
    ),
    DeviceEntry(
        replace(_GRACE_BLACKWELL, name="gb300", fp4_tflops=15000, memory_gib=276.0, sustained=0.78),
        source=_BEKMAN,
        reported_as=("GB300",),
    ),
    DeviceEntry(
        Accelerator(
            name="mi250x-gcd",
            bf16_tflops=191.5,
            fp16_tflops=191.5,
            fp32_tflops=23.9,
            ceiling=0.75,
            fp8_ceiling=0.7,
            memory_gib=64.0,
            bandwidth_gbs=1638,
            cores=110,
            sustained=0.9,
            launch_us=5.0,
        ),
        source=f"{_BEKMAN}: half of an MI250X, one of its two dies, which is what a process sees",
        reported_as=("MI250X",),  # "MI250X/MI250" may be either
    ),
    DeviceEntry(
        replace(_CDNA3, name="mi300x", ceiling=0.514, fp8_ceiling=0.45, memory_gib=191.5, bandwidth_gbs=5300),
        source=_BEKMAN,
        reported_as=("MI300X", "MI300X VF"),
    ),
    DeviceEntry(
        replace(_CDNA3, name="mi325x", ceiling=0.604, fp8_ceiling=0.5, memory_gib=255.5, bandwidth_gbs=6000),
        source=_BEKMAN,
        reported_as=("MI325X",),
    ),
    DeviceEntry(
        replace(_CDNA4, name="mi350x", fp32_tflops=144.2, ceiling=0.61, fp8_ceiling=0.58),
        source=f"{_BEKMAN}: the chip of an MI355X with 1,000 W instead of 1,400; ceiling by the cube root of the power",
        reported_as=("MI350X",),
    ),
    DeviceEntry(
        replace(_CDNA4, name="mi355x", fp32_tflops=157.3, ceiling=0.68, fp8_ceiling=0.65),
        source=_BEKMAN,
        reported_as=("MI355X",),
    ),
    DeviceEntry(
        Accelerator(
            name="max1550-tile",
            bf16_tflops=419.5,
            fp16_tflops=419.5,
            fp32_tflops=26.2,
            ceiling=0.61,
            fp8_ceiling=0.6,
            memory_gib=64.0,
            bandwidth_gbs=1000,
            cores=64,
            sustained=0.9,
            launch_us=8.0,
        ),
        source="Intel Max 1550 data sheet, one of two tiles; ceiling: 256 TFLOP/s measured (ALCF, Aurora user guide)",
    ),
    DeviceEntry(
        Accelerator(
            name="gaudi2",
            bf16_tflops=432,
            fp16_tflops=432,
            fp8_tflops=865,
            fp32_tflops=11,
            ceiling=0.969,
            fp8_ceiling=0.955,
            memory_gib=94.6,
            bandwidth_gbs=2450,
            cores=24,
            sustained=0.9,
            launch_us=6.0,
        ),
        source=_BEKMAN,
    ),
    DeviceEntry(
        Accelerator(
            name="gaudi3",
            bf16_tflops=1677,
            fp16_tflops=1677,
            fp8_tflops=1677,
            fp32_tflops=14.3,
            ceiling=0.741,
            fp8_ceiling=0.769,
            memory_gib=126.5,
            bandwidth_gbs=3700,
            cores=64,
            sustained=0.9,
            launch_us=6.0,
        ),
        source=_BEKMAN,
    ),
    DeviceEntry(
        replace(
            _TPU,
            name="tpu-v4",
            bf16_tflops=275,
            fp16_tflops=275,
            fp8_tflops=275,
            fp32_tflops=34,
            memory_gib=31.7,
            bandwidth_gbs=1228,
            cores=2,
        ),
        source=_TPU_SOURCE,
    ),
    DeviceEntry(
        replace(
            _TPU,
            name="tpu-v5e",
            bf16_tflops=197,
            fp16_tflops=197,
            fp8_tflops=394,
            fp32_tflops=24,
            memory_gib=15.7,
            bandwidth_gbs=819,
        ),
        source=_TPU_SOURCE,
    ),
    DeviceEntry(
        replace(
            _TPU,
            name="tpu-v5p",
            bf16_tflops=459,
            fp16_tflops=459,
            fp8_tflops=918,
            fp32_tflops=57,
            memory_gib=94.8,
            bandwidth_gbs=2765,
            cores=2,
            sustained=0.78,
        ),
        source=_TPU_SOURCE,
    ),
    DeviceEntry(
        replace(
            _TPU,
            name="tpu-v6e",
            bf16_tflops=918,
            fp16_tflops=918,
            fp8_tflops=1836,
            fp32_tflops=114,
            memory_gib=31.2,
            bandwidth_gbs=1640,
        ),
        source=_TPU_SOURCE,
    ),
)


def _entry_problems(name: str, entry: DeviceEntry) -> Iterator[str]:
    if entry.accelerator.name != name:
        yield f"accelerator.name is {entry.accelerator.name!r}, not {name!r}"
    yield from (f"accelerator.{problem}" for problem in device_problems(entry.accelerator))
    for reported in entry.reported_as:
        if not _plain(reported):
            yield f"reported_as {reported!r} names no device"
        elif known := device_reported_as(reported, entry.accelerator.memory_gib):
            yield f"reported_as {reported!r} with {entry.accelerator.memory_gib:g} GiB already means {known.name}"


DEVICES = Registry("device", {entry.accelerator.name: entry for entry in _ENTRIES}, _entry_problems)
"""Known devices with their sources, by name. Memory is what a program can use, a little less than the nominal size."""
ACCELERATORS = View(DEVICES, lambda _, entry: entry.accelerator)
"""Known devices by name."""


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
    words = re.sub(r"^(nvidia|amd|tesla|instinct|\s)+\s", "", name.lower().strip())
    return " ".join(re.split(r"[\s_-]+", words))
