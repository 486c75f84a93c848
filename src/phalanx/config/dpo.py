"""The options of preference tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from phalanx.config.constraints import Above, AtLeast, Below


@dataclass(frozen=True)
class DpoOptions:
    """Direct preference optimisation, which corpus preferences trains with (docs/guides/preference-tuning.md)."""

    beta: Annotated[float, Above(0), Below(1e6)] = 0.1
    """Strength of the tie to the reference model: rewards are beta × log(probability / the reference's)."""
    label_smoothing: Annotated[float, AtLeast(0), Below(0.5)] = 0.0
    """Share of the pairs that are taken to be labelled wrongly (conservative DPO)."""

    def line(self) -> str:
        """Returns the options as `name=value`, without those that do nothing."""
        return f"beta={self.beta:g}" + (f",label_smoothing={self.label_smoothing:g}" if self.label_smoothing else "")
