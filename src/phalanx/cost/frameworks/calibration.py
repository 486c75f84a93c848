"""The few numbers that were fitted to published runs: `Framework.slowdown` of a framework on a kind of device.

Each is one factor on the time of the device, fitted as the median over at most eight runs, which are named here by
their place in their source; docs/explanation/accuracy.md reports errors without them. A pair that is not here has
a slowdown of 1: data sheets and ceilings alone.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.cluster import Accelerator
from phalanx.cost.frameworks.framework import Framework
from phalanx.cost.frameworks.known import FRAMEWORKS

SLOWDOWNS: dict[tuple[str, str], tuple[float, tuple[str, ...]]] = {
    ("megatron-2021", "a100-80gb"): (
        1.09,
        ("narayanan2021-0002", "narayanan2021-0006", "narayanan2021-0009", "narayanan2021-0018", "narayanan2021-0022"),
    ),
    ("megatron-2022", "a100-80gb"): (
        1.05,
        ("korthikanti2022_table5-0002", "korthikanti2022_table5-0005", "korthikanti2022_table5-0008"),
    ),
    ("megatron-deepspeed", "a100-80gb"): (
        1.13,
        (
            "bloom_bigscience_a100-0008",
            "bloom_bigscience_a100-0032",
            "bloom_bigscience_a100-0049",
            "bloom_bigscience_a100-0062",
            "bloom_bigscience_a100-0090",
            "bloom_bigscience_a100-0114",
            "bloom_bigscience_a100-0126",
            "bloom_bigscience_a100-0144",
        ),
    ),
    ("zero-bubble", "a100-80gb"): (
        1.12,
        (
            "zero_bubble_2401.10241-0003",
            "zero_bubble_2401.10241-0011",
            "zero_bubble_2401.10241-0017",
            "zero_bubble_2401.10241-0024",
            "zero_bubble_2401.10241-0030",
            "zero_bubble_2401.10241-0033",
            "zero_bubble_2401.10241-0037",
            "zero_bubble_2401.10241-0044",
        ),
    ),
    ("vtrain", "a100-80gb"): (
        0.95,
        (
            "vtrain_a100_measured-0095",
            "vtrain_a100_measured-0255",
            "vtrain_a100_measured-0486",
            "vtrain_a100_measured-0677",
            "vtrain_a100_measured-0863",
            "vtrain_a100_measured-1095",
            "vtrain_a100_measured-1255",
            "vtrain_a100_measured-1477",
        ),
    ),
    ("megatron-core", "b200"): (
        1.14,
        (
            "simumax_b200_measured-0007",
            "simumax_b200_measured-0013",
            "simumax_b200_measured-0017",
            "simumax_b200_measured-0023",
            "simumax_b200_measured-0025",
            "simumax_b200_measured-0030",
            "simumax_b200_measured-0035",
            "simumax_b200_measured-0041",
        ),
    ),
    ("fsdp1", "h100-80gb"): (
        1.05,
        (
            "llm_foundry_mpt-0012",
            "llm_foundry_mpt-0015",
            "llm_foundry_mpt-0029",
            "llm_foundry_mpt-0032",
            "llm_foundry_mpt-0040",
            "llm_foundry_mpt-0053",
            "llm_foundry_mpt-0059",
            "llm_foundry_mpt-0070",
        ),
    ),
    ("torchtitan", "h100-96gb"): (1.12, ("torchtitan-0002", "torchtitan-0009", "torchtitan-0019")),
    ("torchtitan-compile", "h100-96gb"): (1.12, ("torchtitan-0002", "torchtitan-0009", "torchtitan-0019")),
    ("torchtitan-async", "h100-96gb"): (1.12, ("torchtitan-0002", "torchtitan-0009", "torchtitan-0019")),
    ("torchtitan-2025", "h100-96gb"): (1.12, ("torchtitan-0002", "torchtitan-0009", "torchtitan-0019")),
    ("torchtitan", "a100-80gb"): (1.18, ("torchtitan-0036", "torchtitan-0040")),
}
"""By framework and device: the slowdown, and the rows that it was fitted to."""


_HOPPER_MOE = (
    "nemo_megatron_bridge-0112",
    "nemo_megatron_bridge-0147",
    "nemo_megatron_bridge-0155",
    "nemo_megatron_bridge-0223",
)
MOE_SLOWDOWNS: dict[tuple[str, str], tuple[float, tuple[str, ...]]] = {
    ("nemo-2025", ""): (1.47, ("nemo_megatron_bridge-0248", "nemo_megatron_bridge-0262")),
    ("nemo-early-2026", ""): (
        1.4,
        (
            "nemo_megatron_bridge-0109",
            "nemo_megatron_bridge-0112",
            "nemo_megatron_bridge-0137",
            "nemo_megatron_bridge-0151",
            "nemo_megatron_bridge-0184",
            "nemo_megatron_bridge-0202",
        ),
    ),
    # Hopper keeps the older dispatcher, in later containers too.
    ("nemo-early-2026", "h100-80gb"): (1.9, _HOPPER_MOE),
    ("nemo", "h100-80gb"): (1.9, _HOPPER_MOE),
}
"""By framework and device ("": all others): `Framework.moe_slowdown`, and the rows that it was fitted to."""


def calibrated(program: str, device: Accelerator) -> Framework:
    """Returns the framework of that name, calibrated on that device."""
    slowdown, _ = SLOWDOWNS.get((program, device.name), (1.0, ()))
    moe_slowdown, _ = MOE_SLOWDOWNS.get((program, device.name), MOE_SLOWDOWNS.get((program, ""), (1.0, ())))
    framework = FRAMEWORKS[program]
    return replace(framework, slowdown=slowdown * framework.slowdown, moe_slowdown=moe_slowdown)


def calibration_rows() -> frozenset[str]:
    """Returns all rows that a factor was fitted to."""
    return frozenset(row for _, rows in (*SLOWDOWNS.values(), *MOE_SLOWDOWNS.values()) for row in rows)
