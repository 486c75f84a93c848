"""The guard's memory from step to step, which checkpoints keep: recent losses and norms, and its interventions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from phalanx.config.job import GuardOptions

LIMIT_STEPS = 1000
"""The steps over which interventions are counted against `guard.limit`."""


@dataclass
class History:
    """Running medians of the steps that were taken, and the steps at which the guard intervened."""

    options: GuardOptions
    steps: int = 0
    """Steps taken since the run began."""
    losses: deque[float] = field(init=False)
    norms: deque[float] = field(init=False)
    interventions: list[int] = field(default_factory=list)
    """Steps, from 1, that were skipped, healed, or led to a rewind, those of the last LIMIT_STEPS."""

    def __post_init__(self) -> None:
        self.losses = deque(maxlen=self.options.spike_window)
        self.norms = deque(maxlen=self.options.spike_window)

    def take(self, loss: float, norm: float) -> None:
        """Records a step that the optimizer takes."""
        self.steps += 1
        self.losses.append(loss)
        self.norms.append(norm)

    def spike(self, loss: float, norm: float) -> str:
        """Returns how a step's loss or gradient norm jumps; nothing if they do not, or if it is too early to tell."""
        if self.steps < self.options.spike_warmup or not self.losses:
            return ""
        texts = []
        for name, value, values, factor in (
            ("loss", loss, self.losses, self.options.spike_loss),
            ("gradient norm", norm, self.norms, self.options.spike_norm),
        ):
            usual = median(values)
            if value > factor * usual:
                texts.append(f"{name} {value:.4g} is {value / usual:.3g} × its median of {usual:.4g}")
        return ", ".join(texts)

    def intervene(self, step: int) -> bool:
        """Records an intervention at `step`. Returns whether the limit allows it."""
        self.interventions = [each for each in self.interventions if each > step - LIMIT_STEPS]
        if len(self.interventions) >= self.options.limit:
            return False
        self.interventions.append(step)
        return True

    def restart(self) -> None:
        """Forgets the steps, and keeps the interventions: a run that goes back must not go back for ever."""
        self.steps = 0
        self.losses.clear()
        self.norms.clear()

    def state(self) -> dict[str, Any]:
        """Returns everything as JSON-able values, for a checkpoint."""
        return {
            "steps": self.steps,
            "losses": list(self.losses),
            "norms": list(self.norms),
            "interventions": self.interventions,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Adopts a checkpoint's state. Interventions of this process, which led here, stay."""
        self.restart()
        self.steps = int(state["steps"])
        self.losses.extend(map(float, state["losses"]))
        self.norms.extend(map(float, state["norms"]))
        self.interventions = self.interventions or [*map(int, state["interventions"])]
