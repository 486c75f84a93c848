"""When a run saves checkpoints, and how many it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.config.constraints import Above, AtLeast, StoreUrl


@dataclass(frozen=True)
class Checkpoint:
    """Saving and resuming."""

    every: Annotated[int, AtLeast(0)] = 0
    """Steps between checkpoints; 0: only by `every_minutes`, at the end and when stopped."""
    every_minutes: Annotated[float, AtLeast(0)] = 10.0
    """Minutes between checkpoints, by the clock of rank 0; 0: only by `every`, at the end and when stopped."""
    keep: Annotated[int, AtLeast(0)] = 2
    """Newest whole checkpoints kept; older ones are deleted. 0 keeps all."""
    keep_every: Annotated[int, AtLeast(0)] = 0
    """Checkpoints after every so many steps are kept for ever, whatever `keep` says; 0: none."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest validation loss, too."""
    verify: bool = True
    """Check every file's digest when loading."""
    background: bool = True
    """Write checkpoints while training goes on, from a copy in host memory; each rank needs as much as it writes."""
    on_failure: Literal["continue", "stop"] = "continue"
    """If a checkpoint cannot be written: warn and train on while there is an earlier one, or stop."""
    timeout_s: Annotated[float, Above(0)] = 300.0
    """Seconds without progress after which storage is said to hang, and a checkpoint is given up."""
    remote: Annotated[str, StoreUrl()] = ""
    """Object store that checkpoints are copied to: s3://BUCKET/PREFIX, or another URL of fsspec. The run's are in a
    folder with its name. Credentials come from the environment."""
