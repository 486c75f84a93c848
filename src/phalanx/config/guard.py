"""Protection of a run against silent corruption, against spikes of the loss, and against values that are not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.config.constraints import Above, AtLeast, Between


@dataclass(frozen=True)
class GuardOptions:
    """Silent corruption, loss spikes and NaN: how they are found, and what follows."""

    every: Annotated[int, AtLeast(0)] = 100
    """Steps between comparisons of parameters, moments and gradients with their replicas on other ranks; each
    checkpoint is preceded by one. 0: none. Nothing is compared where replicas train independently (sync other than
    bsp) or steps overlap (schedule=pipedream)."""
    repeat_every: Annotated[int, AtLeast(0)] = 0
    """Steps between steps that are computed twice although nothing makes them doubtful, which finds what makes neither
    loss nor norm jump: 1 finds every transient fault at twice the time, 100 one in a hundred, and a core that often
    computes wrongly, for 1 %. 0: none."""
    on_corruption: Literal["rewind", "heal", "stop"] = "rewind"
    """If replicas differ: rewind loads the newest checkpoint and trains on from there; heal copies what differs from a
    majority of the replicas and rewinds if there is none; stop ends the run with exit code 4."""
    on_spike: Literal["off", "skip", "rewind", "stop"] = "off"
    """If loss or gradient norm jump, and a second computation of the step agrees: skip leaves the step's samples out;
    rewind loads the newest checkpoint and continues with the samples after the spike; stop ends the run with exit
    code 5; off looks for none."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """If loss or gradients are not finite, and a second computation agrees; as on_spike."""
    spike_norm: Annotated[float, Above(1)] = 5.0
    """A gradient norm above this multiple of its running median is a spike."""
    spike_loss: Annotated[float, Above(1)] = 1.5
    """A loss above this multiple of its running median is a spike."""
    spike_window: Annotated[int, Between(2, 4096)] = 64
    """Steps of the running medians."""
    spike_warmup: Annotated[int, AtLeast(1)] = 100
    """Steps at the start of a run in which nothing counts as a spike."""
    limit: Annotated[int, AtLeast(0)] = 10
    """Steps skipped, rewinds and heals in any 1,000 steps; one more stops the run."""
