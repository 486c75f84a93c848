"""When a run saves checkpoints, and how many it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from phalanx.config.constraints import AtLeast


@dataclass(frozen=True)
class Checkpoint:
    """Saving and resuming."""

    every: Annotated[int, AtLeast(0)] = 0
    """Steps between checkpoints; 0: only at the end and when stopped."""
    keep: Annotated[int, AtLeast(0)] = 2
    """Checkpoints kept; older ones are deleted. 0 keeps all."""
    verify: bool = True
    """Check every file's digest when loading."""
