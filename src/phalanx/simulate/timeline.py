"""The timeline of one step: the activity of every pipeline rank on its device and on its links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.schedule.schedule import Schedule


class Span(NamedTuple):
    """An interval of time with its kind."""

    start: float
    """Seconds from the beginning of the step."""
    seconds: float
    """Seconds that it takes."""
    kind: str
    """On the device: "F", "B", "I", "W" (passes) or "optimizer". On the network: "send", "gather", "reduce". On the
    host: "update", and the copies "down" from the device and "up" to it."""
    stage: int = -1
    """The pipeline stage; -1 for none."""
    micro: int = -1
    """The micro-batch; -1 for none."""
    part: int = 0
    """Index of the slice of the sequence."""
    exposed: float = 0.0
    """Seconds of exposed communication inside a pass."""
    to: int = -1
    """The pipeline rank that receives a send."""

    @property
    def end(self) -> float:
        return self.start + self.seconds


class TimeShares(NamedTuple):
    """How a pipeline rank spends a step, in seconds."""

    busy: float
    """Its device computes."""
    communication: float
    """Exposed: inside passes, and in the rank's network spans while its device is idle."""
    idle: float
    """Nothing of it works; it waits, for example for another rank's message."""
    host: float
    """Its device and network wait while its host updates parameters or copies them."""


@dataclass(frozen=True)
class Timeline:
    """A simulated step. A rank is always busy, communicating, waiting for its host, or idle."""

    schedule: Schedule
    """The order of passes on each pipeline rank."""
    device: tuple[tuple[Span, ...], ...]
    """Spans by pipeline rank, in order of time and without overlap."""
    network: tuple[tuple[Span, ...], ...]
    """Messages that each pipeline rank sends, in order of time; they may overlap the device's spans and each other."""
    seconds: float
    """Seconds of the whole step."""
    host: tuple[tuple[Span, ...], ...] = ()
    """Copies and updates of each pipeline rank's host, in order of time; empty if nothing is offloaded."""

    def shares(self, rank: int) -> TimeShares:
        """Returns how a pipeline rank spends the step. Sums over all of its spans, so keep the result."""
        exposed = sum(span.exposed for span in self.device[rank])
        busy = sum(span.seconds for span in self.device[rank]) - exposed
        communication = exposed + _outside(self.network[rank], self.device[rank])
        host = 0.0
        if self.host:
            every = sorted((*self.host[rank], *self.network[rank]))
            host = exposed + _outside(every, self.device[rank]) - communication
        idle = self.seconds - busy - communication - host
        # Rounding may leave a rest, also a negative one.
        return TimeShares(busy, communication, idle if idle > 1e-12 * self.seconds else 0.0, host)


def _outside(spans: Sequence[Span], hiding: Sequence[Span]) -> float:
    """Returns the seconds that lie in any of `spans` and in none of `hiding`; both are in order of their starts, and
    `hiding` does not overlap itself."""
    if not spans:
        return 0.0
    starts, seconds = _columns(spans)
    ends = np.maximum.accumulate(starts + seconds)
    # Each span starts where those before it end, so that overlaps count once.
    starts[1:] = np.maximum(starts[1:], ends[:-1])
    hides, during = _columns(hiding)
    # Seconds of `hiding` before a moment: a line that rises within each span, and is level in between.
    edges = np.column_stack([hides, hides + during]).ravel()
    hidden = np.cumsum(np.column_stack([np.zeros(len(hides)), during]).ravel())
    inside = np.interp(ends, edges, hidden) - np.interp(starts, edges, hidden) if len(hiding) else 0.0
    return max(0.0, float(np.sum(ends - starts - inside)))


def _columns(spans: Sequence[Span]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the starts and the durations of spans."""
    return np.array([span[0] for span in spans]), np.array([span[1] for span in spans])
