"""The machine a job runs on: how many nodes, how many devices each, and what one device can do at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Cluster:
    """The machine: nodes × devices a node."""

    nodes: int = 1
    """Nodes of the job."""
    devices_per_node: int = 0
    """Devices (GPUs, or CPU processes) on a node; 0 means as many as the layout asks for."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the accelerator where there is one."""
    peak_tflops: float = 0.0
    """Dense peak of one device in this job's precision, in TFLOP/s, for MFU; 0 looks the device up, and measures a
    matrix product on a CPU."""
