"""The table of devices and machines: one row per driver's name, a source per row, and the page that shows them."""

from pathlib import Path

import pytest

from phalanx.config.clusters import (
    ACCELERATORS,
    CLUSTERS,
    DEVICES,
    MACHINES,
    DeviceEntry,
    MachineEntry,
    device_reported_as,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "devices.md"


@pytest.mark.parametrize(
    ("reported", "gib", "name"),
    [
        ("NVIDIA GB200", 184.3, "gb200"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA GB300", 277.0, "gb300"),
        ("NVIDIA B300 SXM6 AC", 268.6, "b300"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA H100", 94.5, "h100-96gb"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie-80gb"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-pcie-80gb"),
        ("NVIDIA A100", 39.4, "a100-40gb"),
        ("NVIDIA A100", 79.2, "a100-80gb"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32gb"),
        ("AMD Instinct MI300X", 191.5, "mi300x"),
        ("AMD Instinct MI250X", 64.0, "mi250x-gcd"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("NVIDIA L40S", 44.5, "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.9, "rtx-pro-6000"),
    ],
)
def test_a_driver_s_name_finds_its_row(reported, gib, name):
    assert device_reported_as(reported, gib) is ACCELERATORS[name]


@pytest.mark.parametrize(
    ("reported", "gib"),
    [
        ("NVIDIA H100 NVL", 93.1),
        ("NVIDIA H200 NVL", 139.8),
        ("NVIDIA H800 PCIe", 79.1),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.4),
        ("NVIDIA A100-SXM4-80GB", 39.4),
        ("NVIDIA A100", 60.0),
        ("Tesla V100-PCIE-32GB", 31.7),
        ("AMD Instinct MI250X/MI250", 64.0),
        ("NVIDIA GeForce RTX 5090", 31.4),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 94.9),
        ("", 79.1),
    ],
)
def test_another_form_or_a_slice_of_a_known_device_is_unknown(reported, gib):
    assert device_reported_as(reported, gib) is None


def test_rows_that_share_a_driver_s_name_differ_in_memory():
    for entry in DEVICES.values():
        for reported in entry.reported_as:
            assert device_reported_as(f"NVIDIA {reported}", entry.accelerator.memory_gib) is entry.accelerator


def test_every_row_has_a_source_and_what_a_prediction_needs():
    for entry in DEVICES.values():
        device = entry.accelerator
        assert entry.source
        assert device.fp16_tflops
        assert device.fp32_tflops
        assert device.memory_gib
        assert device.bandwidth_gbs
    for entry in MACHINES.values():
        assert entry.source
        assert entry.cluster.intra.gbs
        assert entry.cluster.inter.gbs
        assert entry.cluster.devices_per_node


def test_the_page_shows_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    for table in (device_table(), machine_table()):
        assert table in page, f"docs/reference/devices.md should have\n\n{table}"


def device_table() -> str:
    """Returns the page's table of devices."""
    head = (
        "| device | bf16 | fp8 | fp4 | fp32 | ceiling | GiB | GB/s | drivers report | source |\n" + "|---" * 10 + "|\n"
    )
    return head + "\n".join(map(_device_row, DEVICES.values()))


def _device_row(entry: DeviceEntry) -> str:
    device = entry.accelerator
    peaks = (device.bf16_tflops or device.fp16_tflops, device.fp8_tflops, device.fp4_tflops, device.fp32_tflops)
    cells = [device.name, *(f"{peak:g}" if peak else "" for peak in peaks), f"{device.ceiling:.2g}"]
    cells += [f"{device.memory_gib:g}", f"{device.bandwidth_gbs:g}", ", ".join(entry.reported_as), entry.source]
    return f"| {' | '.join(cells)} |"


def machine_table() -> str:
    """Returns the page's table of machines."""
    head = "| preset | devices per node | fast links among | GB/s | beyond, GB/s | source |\n" + "|---" * 6 + "|\n"
    return head + "\n".join(_machine_row(name, entry) for name, entry in MACHINES.items())


def _machine_row(name: str, entry: MachineEntry) -> str:
    cluster = CLUSTERS[name]
    node = f"{cluster.devices_per_node} × {cluster.accelerator.name}"
    cells = [name, node, f"{cluster.joined}", f"{cluster.intra.gbs:g}", f"{cluster.inter.gbs:.3g}", entry.source]
    return f"| {' | '.join(cells)} |"
