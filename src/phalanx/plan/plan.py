"""What a search over layouts finds: the best, what was weighed against them, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phalanx.config.layout import Layout
from phalanx.cost.prediction import Prediction
from phalanx.cost.spec import StepSpec


@dataclass(frozen=True)
class Candidate:
    """A legal layout, and what a step of it takes."""

    spec: StepSpec
    """Its layout is complete: micro-batch, accumulation and every axis."""
    prediction: Prediction
    seconds: float
    """Of a step, simulated event by event: what the ranking goes by."""

    @property
    def layout(self) -> Layout:
        return self.spec.layout

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second on all devices together, of the simulated step."""
        return self.prediction.tokens / self.seconds

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second and device, of the simulated step."""
        return self.tokens_per_s / self.prediction.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the devices' data sheet allows, of the simulated step."""
        return self.prediction.model_flops / self.seconds / self.prediction.devices / self.prediction.peak_flops


class Alternative(NamedTuple):
    """What somebody would have taken without a search, and how it does."""

    name: str
    """Such as "FSDP alone (zero 3)" or "rule of thumb: ..."."""
    candidate: Candidate | None
    """None where it is not even legal."""
    why: str
    """One sentence with figures: why it loses."""


class SpacePoint(NamedTuple):
    """One layout on the map of the space."""

    family: str
    """The axes it uses, such as "FSDP" or "tensor + pipeline"."""
    seconds: float
    """Of a step."""
    peak: float
    """Bytes on the fullest device."""
    fits: bool
    line: str
    """The layout, as `Layout.line` prints it."""


@dataclass(frozen=True)
class Plan:
    """The answer of a search."""

    request: StepSpec
    """Model, cluster, batch and program that were asked about; its layout says nothing."""
    best: tuple[Candidate, ...]
    """The fastest first, ties to the simpler. Empty where nothing fits."""
    nearest: Candidate | None
    """Where nothing fits: the layout that needs the least memory."""
    alternatives: tuple[Alternative, ...]
    points: tuple[SpacePoint, ...]
    """A sample of the space, some that fit and some that do not."""
    rejected: dict[str, int]
    """Number of layouts by the reason that they were left out."""
    searched: int
    """Layouts that were looked at."""
    seconds: float
    """That the search took."""
    notes: tuple[str, ...]
    """Why this choice: sentences."""
