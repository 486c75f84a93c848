"""The prediction of one step: its time by part, its memory by rank, and its FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.cost.memory.rank_memory import RankMemory
from phalanx.partition.tiers import Tier
from phalanx.schedule.timing import bubble_fraction


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by part, on the slowest rank; they add up to the step time."""

    products: float = 0.0
    """Matrix products and attention."""
    streams: float = 0.0
    """Memory-bound operations."""
    recompute: float = 0.0
    """Repeated forward passes, before backward passes."""
    host: float = 0.0
    """Time for which devices wait for their hosts to launch kernels."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Exposed communication, by axis of the mesh."""
    bubble: float = 0.0
    """The bubble time: waiting for other pipeline ranks."""
    optimizer: float = 0.0
    """The optimizer step, clipping, and the fixed costs of a step; offloaded, on the host."""
    copies: float = 0.0
    """Exposed copies between device and host."""
    files: float = 0.0
    """Exposed reads and writes of optimizer state in files."""
    forward: float = 0.0
    """The part of products, streams and host in forward passes; the rest is in backward passes."""

    @property
    def backward(self) -> float:
        """Seconds of computation in backward passes, without repeated forward passes."""
        return max(0.0, self.products + self.streams + self.host - self.forward)

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(seconds for _, seconds in self.items())

    def items(self) -> list[tuple[str, float]]:
        """Returns name and seconds of every part, of communication one part per axis."""
        return [
            ("matrix products", self.products),
            ("memory-bound", self.streams),
            ("recompute", self.recompute),
            ("host", self.host),
            *((f"{axis} exposed", seconds) for axis, seconds in self.exposed.items()),
            ("bubble", self.bubble),
            ("optimizer", self.optimizer),
            *([("host copies exposed", self.copies)] if self.copies else []),
            *([("disk exposed", self.files)] if self.files else []),
        ]


@dataclass(frozen=True)
class Prediction:
    """One step of a job: time, memory and traffic."""

    parts: Parts
    """Seconds of the step by part."""
    devices: int
    tokens: int
    """Tokens per step, on all devices together."""
    model_flops: int
    """FLOPs per step without recomputation, attention counted in full."""
    hardware_flops: int
    """FLOPs per step with recomputation."""
    peak_flops: float
    """Peak FLOP/s of one device, by its data sheet."""
    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank."""
    memory_limit: float
    """Bytes of memory per device."""
    spread: tuple[float, float]
    """Factors on the time that enclose eight of ten published steps."""
    memory_spread: tuple[float, float]
    host_limit: float = 0.0
    """Bytes of host memory per device; 0: not known."""
    disk_limit: float = 0.0
    """Bytes of disk per device; 0: not known."""

    @property
    def step_time_s(self) -> float:
        """Seconds of the step."""
        return self.parts.total

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second on all devices together."""
        return self.tokens / self.step_time_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second per device."""
        return self.tokens_per_s / self.devices

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s per device."""
        return self.model_flops / self.step_time_s / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of the devices, 0 to 1."""
        return self.model_flops / self.step_time_s / self.devices / self.peak_flops

    @property
    def hfu(self) -> float:
        """FLOPs with recomputation over the peak of the devices, 0 to 1."""
        return self.hardware_flops / self.step_time_s / self.devices / self.peak_flops

    @property
    def bubble(self) -> float:
        """The pipeline bubble (schedule/timing.py)."""
        return bubble_fraction(self.parts.bubble, self.step_time_s)

    @property
    def fullest(self) -> RankMemory:
        """The memory of the pipeline rank that needs most."""
        return max(self.memory, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory of each kind."""
        return self.fullest.needed <= self.memory_limit and not self.short_tiers

    @property
    def tiers(self) -> dict[Tier, tuple[int, float]]:
        """The most bytes on any rank in each tier of memory that is used, and its limit; 0: not known."""
        found: dict[Tier, tuple[int, float]] = {"device": (self.fullest.peak, self.memory_limit)}
        host, disk = max(rank.host for rank in self.memory), max(rank.disk for rank in self.memory)
        if host:
            found["host"] = host, self.host_limit
        if disk:
            found["disk"] = disk, self.disk_limit
        return found

    @property
    def short_tiers(self) -> tuple[Tier, ...]:
        """The tiers other than the device that are known to be too small."""
        return tuple(tier for tier, (most, limit) in self.tiers.items() if tier != "device" and 0 < limit < most)
