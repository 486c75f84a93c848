"""Throughput: per device and of the whole job, in the row and in the log line."""

from __future__ import annotations

import pytest

from phalanx.train.metrics import Meter, line


def test_throughput_is_per_device_and_of_the_whole_job() -> None:
    meter = Meter(positions_per_step=8000, flops_per_step=2e12, peak_flops=4e12, devices=8)
    row = meter.step(1)
    seconds = row["step_time_s"]
    assert row["tps"] == pytest.approx(1000 / seconds)
    assert row["tps_total"] == pytest.approx(8000 / seconds)
    assert row["mfu"] == pytest.approx(0.5 / seconds)
    assert set(meter.since_shown()) == {"tps", "tps_total", "tflops", "mfu"}


def test_the_log_line_is_as_the_documentation_shows_it() -> None:
    row = {"step": 10, "loss": 2.12341, "grad_norm": 0.512, "lr": 3e-4}
    row |= {"tps": 9999.0, "tps_total": 79992.0, "tflops": 1.234, "mfu": 0.401}
    assert line(row, int(12.3 * 2**30)) == (
        "step: 10  loss: 2.1234  grad_norm: 0.51  lr: 3.0e-04  tps: 9,999  tps_total: 79,992  tflops: 1.23  "
        "mfu: 40.1%  memory: 12.3GiB"
    )


def test_padding_counts_in_no_figure() -> None:
    tokens = {1: 2000, 2: 6000}
    meter = Meter(
        positions_per_step=8000, flops_per_step=2e12, peak_flops=4e12, devices=8, tokens_of=tokens.__getitem__
    )
    one, two = meter.step(1), meter.step(2)
    assert one["tps_total"] * one["step_time_s"] == pytest.approx(2000)
    assert two["mfu"] * two["step_time_s"] == pytest.approx(0.5 * 0.75)
    assert (one["padding"], two["padding"]) == (0.75, 0.25)
    both = meter.since_shown()
    assert both["padding"] == 0.5
    shown = line({"step": 2, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, **both}, 0)
    assert "  padding: 50.0%  tps: " in shown
