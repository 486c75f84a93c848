"""The steps of a run that are profiled, and what is recorded of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.config.constraints import AtLeast

MOST_STEPS = 20
"""Most steps of a profile: a rank's trace of one step takes from a megabyte to hundreds."""
MOST_TRACED = 16
"""Most ranks that write a trace with ranks=all."""


@dataclass(frozen=True)
class ProfileOptions:
    """A profile of some steps, in the run's folder traces (docs/guides/profile.md)."""

    steps: Annotated[tuple[int, int], AtLeast(0)] = (0, 0)
    """First and last step to profile, such as [10, 12]; steps count from 1. [0, 0]: none."""
    ranks: Literal["all"] | tuple[int, ...] = "all"
    """Ranks that write traces: all (of more than 16 the first 16), or a list such as [0, 3]."""
    memory: bool = False
    """Record allocations: the largest tensors at the peak, beside the prediction; on CUDA also a memory snapshot."""
    python: bool = False
    """Sample the Python side with pyinstrument, as text and HTML."""

    @property
    def is_on(self) -> bool:
        """Whether any step is profiled."""
        return self.steps != (0, 0)

    def traced(self, world: int) -> tuple[int, ...]:
        """Returns the ranks, of `world`, that write traces."""
        return tuple(range(min(world, MOST_TRACED))) if self.ranks == "all" else self.ranks
