"""What NVIDIA's driver says of GPUs, from a module that pretends to be nvidia-ml-py."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.trackers.tracker import values_of
from phalanx.train import telemetry
from phalanx.train.callbacks import Done
from phalanx.train.drivers import UNKNOWN
from phalanx.train.metrics import MetricsFile
from phalanx.train.requests import Milestones


class NVMLError(Exception):
    """The error of a query that the driver refuses."""


def driver_of(*, broken: bool = False) -> SimpleNamespace:
    """Returns the module: two GPUs, of which the first that torch sees throttles, and does not know its power."""

    def failing(text):
        raise NVMLError(text)

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: failing("Driver Not Loaded") if broken else None,
        nvmlDeviceGetHandleByUUID={"GPU-a": 0, "GPU-b": 1}.__getitem__,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=97),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=2**30),
        nvmlDeviceGetPowerUsage=lambda handle: failing("Not Supported") if handle else 512_300,
        nvmlDeviceGetTemperature=lambda handle, _: 60 + 30 * handle,
        nvmlDeviceGetClockInfo=lambda handle, _: 1980 - 1000 * handle,
        nvmlDeviceGetCurrentClocksEventReasons=(0x4, 0x4 | 0x40).__getitem__,
    )


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Makes the telemetry of a rank on the second and the first GPU of a machine, and the path of its rows."""

    def make(driver=None, kind="cuda", rank=0):
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        facts = {0: SimpleNamespace(uuid="b"), 1: SimpleNamespace(uuid="a")}
        monkeypatch.setattr(torch.cuda, "get_device_properties", facts.get)
        path = tmp_path / "metrics.jsonl"
        recorder: Any = SimpleNamespace(rows=MetricsFile(path), milestones=Milestones(20, 10, 0, 0))
        return telemetry.GpuTelemetry.of(recorder, torch.device(kind, 0), rank, 8), path

    return make


def after(found, step: int) -> None:
    found.after_step(Done(step, UNKNOWN, last=False, stops=False))


def test_a_row_has_what_the_driver_says_of_every_gpu(gpus, caplog):
    found, path = gpus(driver_of())
    found.read()
    with caplog.at_level(logging.WARNING):
        for step in (9, 10):
            after(found, step)
        after(found, 20)  # no sample since
        found.read()
        after(found, 20)
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first.pop("event"), first.pop("step"), second["step"]) == ("gpu", 10, 20)
    del first["time"]
    assert first == {
        "utilization": {"0": 0.97, "1": 0.97},
        "memory": {"0": 2**30, "1": 2**30},
        "power_w": {"1": 512.3},
        "temperature_c": {"0": 90, "1": 60},
        "clock_mhz": {"0": 980, "1": 1980},
        "throttled": {"0": 1, "1": 0},
        "power_capped": {"0": 1, "1": 1},
    }
    assert values_of(second)["gpu/power_w/1"] == 512.3
    assert [record.getMessage() for record in caplog.records] == [
        "step: 10  GPU 0: the driver throttles its clocks at 90 °C"
    ]


@pytest.mark.parametrize(
    ("driver", "options", "said"),
    [
        (None, {}, 'pip install "phalanx[gpu]"'),
        (driver_of(broken=True), {}, "Driver Not Loaded"),
        (driver_of(), {"rank": 1}, ""),
        (driver_of(), {"kind": "xpu"}, ""),
    ],
)
def test_without_a_driver_nothing_is_read(gpus, caplog, driver, options, said):
    with caplog.at_level(logging.INFO), gpus(driver, **options)[0] as found:
        after(found, 10)
    assert not found.gpus
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)
