"""The timeline of one step: what every pipeline rank does on its device and on its links."""

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
    kind: str
    """On the device: "F", "B", "I", "W" (passes) or "optimizer". On the network: "send", "gather", "reduce"."""
    stage: int = -1
    micro: int = -1
    part: int = 0
    """Number of the slice of the sequence."""
    exposed: float = 0.0
    """Of a pass: seconds of communication inside it that nothing hides."""
    to: int = -1
    """Of a send: the pipeline rank that gets it."""

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True)
class Timeline:
    """A simulated step. A rank is always busy, communicating or idle."""

    schedule: Schedule
    device: tuple[tuple[Span, ...], ...]
    """By pipeline rank, in order of time; no two at once."""
    network: tuple[tuple[Span, ...], ...]
    """By pipeline rank, what it sends, in order of time; may overlap with the device's spans and with each other."""
    seconds: float
    """Of the whole step."""

    def busy(self, rank: int) -> float:
        """Seconds in which the device computes."""
        return sum(span.seconds - span.exposed for span in self.device[rank])

    def communication(self, rank: int) -> float:
        """Seconds of exposed communication: inside passes, and in the rank's network spans while its device has nothing
        else to do. Waiting for another rank's message is idle time."""
        inside = sum(span.exposed for span in self.device[rank])
        return inside + _outside(self.network[rank], self.device[rank])

    def idle(self, rank: int) -> float:
        """Seconds in which neither the device nor the network of the rank works."""
        return self.seconds - self.busy(rank) - self.communication(rank)


def _outside(spans: Sequence[Span], hiding: Sequence[Span]) -> float:
    """Seconds that are in any of `spans` and in none of `hiding`; both in order of their starts, of `hiding` no two at
    once."""
    if not spans:
        return 0.0
    starts, seconds = _columns(spans)
    ends = np.maximum.accumulate(starts + seconds)
    # What each span adds to those before it: from where they end.
    starts[1:] = np.maximum(starts[1:], ends[:-1])
    hides, during = _columns(hiding)
    # Seconds of `hiding` before a moment: a line that goes up within each of them, and is level between.
    edges = np.column_stack([hides, hides + during]).ravel()
    hidden = np.cumsum(np.column_stack([np.zeros(len(hides)), during]).ravel())
    inside = np.interp(ends, edges, hidden) - np.interp(starts, edges, hidden) if len(hiding) else 0.0
    return max(0.0, float(np.sum(ends - starts - inside)))


def _columns(spans: Sequence[Span]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When each begins, and how long it takes."""
    return np.array([span[0] for span in spans]), np.array([span[1] for span in spans])
