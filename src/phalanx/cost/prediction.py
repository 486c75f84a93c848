"""What a prediction says."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.cost.memory.rank_memory import RankMemory
from phalanx.schedule.bubble import bubble_fraction


@dataclass(frozen=True)
class Parts:
    """Where the time of a step goes on the slowest rank, in seconds: these add up to it."""

    products: float = 0.0
    """Matrix products and attention."""
    streams: float = 0.0
    """Memory-bound operations."""
    recompute: float = 0.0
    """Forward passes again, before backward passes."""
    host: float = 0.0
    """Devices wait for their programs to start kernels."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Communication that nothing hides, by axis of the mesh."""
    bubble: float = 0.0
    """Waiting for other pipeline ranks: the bubble time."""
    optimizer: float = 0.0
    """The optimizer's step, clipping, and what every step costs besides."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(seconds for _, seconds in self.items())

    def items(self) -> list[tuple[str, float]]:
        """Name and seconds of every part, of communication one an axis."""
        return [
            ("matrix products", self.products),
            ("memory-bound", self.streams),
            ("recompute", self.recompute),
            ("host", self.host),
            *((f"{axis} exposed", seconds) for axis, seconds in self.exposed.items()),
            ("bubble", self.bubble),
            ("optimizer", self.optimizer),
        ]


@dataclass(frozen=True)
class Prediction:
    """One step of a job: time, memory and traffic."""

    parts: Parts
    devices: int
    tokens: int
    """Tokens of a step, on all devices together."""
    model_flops: int
    """FLOPs of a step without recomputation, attention counted in full."""
    hardware_flops: int
    """The same with what is computed twice."""
    peak_flops: float
    """FLOP/s of one device, by its data sheet."""
    memory: tuple[RankMemory, ...]
    """By pipeline rank."""
    memory_limit: float
    """Bytes that a device has."""
    spread: tuple[float, float]
    """Factors on the time between which eight of ten published steps lie."""
    memory_spread: tuple[float, float]

    @property
    def step_time_s(self) -> float:
        return self.parts.total

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second on all devices together."""
        return self.tokens / self.step_time_s

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.devices

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s a device."""
        return self.model_flops / self.step_time_s / self.devices / 1e12

    @property
    def mfu(self) -> float:
        return self.model_flops / self.step_time_s / self.devices / self.peak_flops

    @property
    def hfu(self) -> float:
        return self.hardware_flops / self.step_time_s / self.devices / self.peak_flops

    @property
    def bubble(self) -> float:
        """The pipeline bubble (schedule/bubble.py)."""
        return bubble_fraction(self.parts.bubble, self.step_time_s)

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank that needs the most memory."""
        return max(self.memory, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool:
        return self.fullest.needed <= self.memory_limit
