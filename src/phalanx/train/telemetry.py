"""What NVIDIA's driver says of the GPUs of rank 0's node (NVML, by nvidia-ml-py), as rows of metrics.jsonl:

{"event": "gpu", "step": 20, "utilization": {"0": 0.97}, "memory": {"0": bytes}, "power_w": …, "temperature_c": …,
"clock_mhz": …, "throttled": {"0": 0}}

`throttled` is 1 where the driver holds clocks back because of heat, or hardware asks for it; `power_capped` where a GPU
is at its limit of power, as large products are. A thread asks, so that no step waits for the driver."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from phalanx.train.callbacks import Callback, Done
from phalanx.train.metrics import Recorder

log = logging.getLogger(__name__)

SAMPLE_S = 5.0
"""Seconds between two samples."""
HEAT, POWER_CAP = 0x8 | 0x20 | 0x40 | 0x80, 0x4
"""Bits of NVML's reasons for lower clocks: slowdown by hardware, heat (software's and hardware's limit), power brake;
and the limit of power (nvml.h, nvmlClocksEventReason…)."""


def readings(nvml: Any, handle: Any) -> dict[str, Callable[[], float]]:
    """Returns what is read of one GPU, by the name in a row."""
    reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons
    return {
        "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "throttled": lambda: int(bool(reasons(handle) & HEAT)),
        "power_capped": lambda: int(bool(reasons(handle) & POWER_CAP)),
    }


class GpuTelemetry(Callback):
    """Writes the newest sample of the driver with each step that is shown. A context manager."""

    def __init__(self, recorder: Recorder, count: int):
        """`count` GPUs of this node are the run's; 0: nothing is read."""
        self.recorder, self.ended = recorder, threading.Event()
        self.sample: dict[str, dict[str, float]] = {}
        """The newest sample that no row has, by name and GPU."""
        self.hot = set[str]()
        """GPUs that were throttled."""
        nothing: tuple[Any, dict[str, Any]] = (None, {})
        self.nvml, self.gpus = _opened(count) if count else nothing

    @classmethod
    def of(cls, recorder: Recorder, device: torch.device, rank: int, local_world: int) -> GpuTelemetry:
        """Returns that of a rank: rank 0 reads those of its node."""
        is_nvidia = device.type == "cuda" and not torch.version.hip and rank == 0
        return cls(recorder, min(local_world, torch.accelerator.device_count()) if is_nvidia else 0)

    def __enter__(self) -> GpuTelemetry:
        if self.gpus:
            threading.Thread(target=self._watch, name="phalanx-gpus", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def _watch(self) -> None:
        while not self.ended.is_set():
            self.read()
            self.ended.wait(SAMPLE_S)

    def read(self) -> None:
        """Takes a sample. What a driver does not know is left out."""
        found: dict[str, dict[str, float]] = {}
        for number, handle in self.gpus.items():
            for name, read in readings(self.nvml, handle).items():
                with suppress(self.nvml.NVMLError):
                    found.setdefault(name, {})[number] = read()
        self.sample = found

    def after_step(self, done: Done) -> None:
        if not self.sample or not (done.ends or self.recorder.milestones.shows(done.number)):
            return
        sample, self.sample = self.sample, {}
        self.recorder.rows.write("gpu", step=done.number, **sample)
        hot = {number for number, is_hot in sample.get("throttled", {}).items() if is_hot}
        for number in sorted(hot - self.hot):
            degrees = sample.get("temperature_c", {}).get(number)
            at = "" if degrees is None else f" at {degrees:.0f} °C"
            log.warning("step: %d  GPU %s: the driver throttles its clocks%s", done.number, number, at)
        self.hot = hot


def _opened(count: int) -> tuple[Any, dict[str, Any]]:
    """Returns NVML and the handles of the first GPUs that torch sees, by their number; none if it cannot be used."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        log.info('gpus: power, heat and utilisation are not recorded: pip install "phalanx[gpu]"')
        return None, {}
    try:
        nvml.nvmlInit()
        return nvml, dict(_handles(nvml, count))
    except nvml.NVMLError as error:
        log.warning("gpus: power, heat and utilisation are not recorded: %s", error)
        return None, {}


def _handles(nvml: Any, count: int) -> Iterator[tuple[str, Any]]:
    for number in range(count):  # by UUID: CUDA_VISIBLE_DEVICES does not count for the driver
        uuid = torch.get_device_module("cuda").get_device_properties(number).uuid
        yield str(number), nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
