"""The result of a search over layouts: the best ones, the alternatives, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from phalanx.config.layout import Layout
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.spec import StepSpec
from phalanx.notebook import ShownInNotebooks
from phalanx.simulate.step import step_seconds


@dataclass(frozen=True)
class Candidate:
    """A legal layout and the time of its step."""

    spec: StepSpec
    """The step with a complete layout: micro-batch, accumulation and every axis."""
    seconds: float
    """Seconds of a step, simulated event by event; the ranking goes by them."""
    rehearsed: int | None = None
    """Bytes that the fullest rank needs, found by a rehearsal; None without one."""

    @classmethod
    def of(cls, spec: StepSpec) -> Candidate:
        """Simulates a step. Raises JobError for a step that cannot be simulated."""
        return cls(spec, step_seconds(spec))

    @cached_property
    def prediction(self) -> Prediction:
        """Time, memory and FLOPs by formula."""
        return predict(self.spec)

    @property
    def layout(self) -> Layout:
        """The layout, with its micro-batch and accumulation."""
        return self.spec.layout

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second on all devices together, of the simulated step."""
        return self.prediction.tokens / self.seconds

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second per device, of the simulated step."""
        return self.tokens_per_s / self.prediction.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of the devices' data sheet, of the simulated step."""
        return self.prediction.model_flops / self.seconds / self.prediction.devices / self.prediction.peak_flops


class Alternative(NamedTuple):
    """A layout that one might choose without a search, and its comparison with the best."""

    name: str
    """Name such as "FSDP alone (zero 3)" or "rule of thumb: ..."."""
    candidate: Candidate | None
    """The layout; None if it is not legal."""
    why: str
    """The reason why it loses, one sentence with figures."""


class SpacePoint(NamedTuple):
    """One layout on the map of the space."""

    family: str
    """The axes that it uses, such as "FSDP" or "tensor + pipeline"."""
    seconds: float
    """Seconds of a step."""
    peak: float
    """Bytes that the fullest device needs."""
    fits: bool
    line: str
    """The layout, as `Layout.line` prints it."""


@dataclass(frozen=True)
class Plan(ShownInNotebooks):
    """The result of a search."""

    page, height = "phalanx.pictures.plan_page:html", 900

    request: StepSpec
    """The model, cluster, batch and framework of the request; its layout has no meaning."""
    best: tuple[Candidate, ...]
    """The choice, which is the simplest of those in the tie band of the fastest, then the best layouts of other meshes,
    fastest first; empty if nothing fits."""
    nearest: Candidate | None
    """If nothing fits, the layout that needs the least memory."""
    alternatives: tuple[Alternative, ...]
    """Layouts that one might choose without a search, with the reason why each loses."""
    points: tuple[SpacePoint, ...]
    """A sample of the space, some layouts that fit and some that do not."""
    rejected: dict[str, int]
    """Numbers of rejected layouts by reason."""
    searched: int
    """Number of layouts in the search space."""
    seconds: float
    """Seconds of the search."""
    notes: tuple[str, ...]
    """The reasons for the choice, as sentences."""
    fastest: Candidate | None = None
    """The fastest layout found, whatever it uses."""
    struck: Mapping[str, str] = field(default_factory=dict)
    """Layouts that did not fit when they were rehearsed, with the reasons; empty without a rehearsal."""

    def struck_lines(self) -> list[str]:
        return [f"  {line}: {why}" for line, why in self.struck.items()]
