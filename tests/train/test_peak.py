"""The peak that MFU divides by: which one it is, on simulated time where it is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.config import calibration
from phalanx.config.calibration import Calibration, ComputeCalibration, FitQuality, Provenance
from phalanx.config.cluster import Accelerator, Cluster, Sharing
from phalanx.train import device as peak
from phalanx.train.device import MEASUREMENT_S, MEASUREMENTS, measured_peak, peak_flops

CPU = torch.device("cpu")
FILE = """\
cluster:
  devices_per_node: 2
  device: cpu
  accelerator: {name: a cpu, fp32_tflops: 0.1, bandwidth_gbs: 20.0}
  sharing: {node_cores: 2, processes: 2, alone_products: 1.8, alone_streams: 1.5}
"""
QUALITY = """\
  calibration:
    compute:
      provenance: {date: 2026-11-22, host: a-host, processor: a cpu, cores: 2}
      products: {error: 0.03, spread: SPREAD, rounds: 3}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "processor", lambda: "a cpu")
    monkeypatch.setattr(calibration, "core_count", lambda: 2)
    monkeypatch.setattr(peak, "MEASUREMENT_S", 0.0)
    return tmp_path / "cluster.yaml"


def test_the_job_s_figure_comes_first(file):
    file.write_text(FILE)
    found = peak_flops(Cluster(peak_tflops=2.0), CPU, torch.float32, 2)
    assert (found.flops, found.source) == (2e12, "the job's cluster.peak_tflops")


def test_the_stored_measurement_is_used(file):
    file.write_text(FILE + QUALITY.replace("SPREAD", "0.02"))
    found = peak_flops(Cluster(), CPU, torch.float32, 2)
    assert (found.flops, found.spread) == (pytest.approx(0.1e12), 0.02)
    assert found.source == f"phalanx bench compute, {file}: spread 2.0%"
    assert peak_flops(Cluster(), CPU, torch.float32, 1).flops == pytest.approx(0.18e12), "one process has both cores"
    assert peak_flops(Cluster(), CPU, torch.float32, 4).flops == pytest.approx(0.05e12)


def test_an_old_file_s_peak_is_used_and_its_spread_is_unknown(file):
    file.write_text(FILE)
    found = peak_flops(Cluster(), CPU, torch.float32, 2)
    assert (found.flops, found.source) == (pytest.approx(0.1e12), f"phalanx bench compute, {file}: spread unknown")


def test_the_job_s_own_cluster_comes_before_the_file(file):
    file.write_text(FILE)
    quality = FitQuality(0.03, 0.04, 3)
    measured = ComputeCalibration(Provenance("2026-11-22", "a-host", "a cpu", 2), products=quality)
    own = Cluster(
        device="cpu",
        accelerator=Accelerator("a cpu", fp32_tflops=0.3),
        sharing=Sharing(2, 2, 2, 1.8, 1.5),
        calibration=Calibration(measured),
    )
    found = peak_flops(own, CPU, torch.float32, 2)
    assert (found.flops, found.source) == (0.3e12, "phalanx bench compute, cluster of the job: spread 4.0%")
    elsewhere = replace(own, calibration=Calibration(replace(measured, provenance=Provenance("2026", "b", "b cpu", 2))))
    assert peak_flops(elsewhere, CPU, torch.float32, 2).source.startswith("median of")


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("", torch.float32),
        ("cluster: [\n", torch.float32),
        (FILE.replace("device: cpu", "device: cuda"), torch.float32),
        (FILE + QUALITY.replace("SPREAD", "0.3"), torch.float32),
        ((FILE + QUALITY.replace("SPREAD", "0.02")).replace("cores: 2", "cores: 64"), torch.float32),
        (FILE.replace("a cpu", "another cpu"), torch.float32),
        (FILE, torch.float64),
        (FILE, torch.bfloat16),
    ],
    ids=["no file", "wrong", "a GPU's", "unreliable", "other cores", "other processor", "fp64", "not measured"],
)
def test_otherwise_it_is_measured(file, text, dtype):
    if text:
        file.write_text(text)
    found = peak_flops(Cluster(), CPU, dtype, 2)
    assert found.flops > 0
    assert found.source.startswith(f"median of {MEASUREMENTS} measurements of a {str(dtype).removeprefix('torch.')}")
    assert "; `phalanx bench compute` stores a steadier one" in found.source


def test_a_noisy_machine_s_peak_is_the_median_and_has_its_spread():
    """Each measurement has simulated time that runs at another speed: 1, 2, 3, 4 and 5 times as long."""
    times = iter(
        now
        for speed in range(1, MEASUREMENTS + 1)
        for now in (0.0, 0.0, 0.0, MEASUREMENT_S * speed, MEASUREMENT_S * speed)
    )
    found = measured_peak(CPU, torch.float64, lambda: next(times))
    flops = [2 * 1024**3 / (MEASUREMENT_S * speed) for speed in range(1, MEASUREMENTS + 1)]
    assert found.flops == pytest.approx(flops[2])
    assert found.spread == pytest.approx((flops[0] - flops[-1]) / flops[2])
    assert f"spread {found.spread:.1%}" in found.source
