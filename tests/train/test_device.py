"""The peak that MFU divides by: from the table by the driver's name, stated by the job, or none at all."""

from types import SimpleNamespace

import pytest
import torch

from phalanx.config.cluster import Cluster
from phalanx.train.device import peak_flops
from phalanx.train.metrics import Meter, line

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that the driver reports a GPU of this name and memory."""

    def reports(name: str, gib: float) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        facts = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)

    return reports


@pytest.mark.parametrize(
    ("name", "gib", "dtype", "tflops"),
    [
        ("NVIDIA GB200", 184.3, torch.bfloat16, 2500),
        ("NVIDIA B200", 178.4, torch.bfloat16, 2250),
        ("NVIDIA H100 PCIe", 79.1, torch.float16, 756),
        ("NVIDIA H100 80GB HBM3", 79.1, torch.float32, 67),
        ("Tesla V100-SXM2-32GB", 31.7, torch.bfloat16, 125),
    ],
)
def test_a_known_gpu_has_the_table_s_peak(gpu, name, gib, dtype, tflops):
    gpu(name, gib)
    found = peak_flops(Cluster(), CUDA, dtype, 1)
    assert (found.flops, found.source) == (tflops * 1e12, f"data sheet of {name}")


@pytest.mark.parametrize(
    ("name", "dtype"), [("NVIDIA H100 NVL", torch.bfloat16), ("NVIDIA H100 80GB HBM3", torch.float64)]
)
def test_without_a_peak_it_says_so_and_what_states_one(gpu, name, dtype):
    gpu(name, 79.1)
    found = peak_flops(Cluster(), CUDA, dtype, 1)
    assert found.flops == 0
    assert name in found.source
    assert "cluster.peak_tflops" in found.source
    stated = peak_flops(Cluster(peak_tflops=835), CUDA, dtype, 1)
    assert (stated.flops, stated.source) == (835e12, "the job's cluster.peak_tflops")


def test_without_a_peak_rows_and_lines_have_no_mfu():
    meter = Meter(positions_per_step=1024, flops_per_step=1e9, peak_flops=0.0, devices=2)
    row = meter.step(1) | {"step": 1, "loss": 2.0, "grad_norm": 0.5, "lr": 1e-3}
    assert "mfu" not in row
    assert row["tflops"] > 0
    assert "mfu" not in line(row, 2**30)
