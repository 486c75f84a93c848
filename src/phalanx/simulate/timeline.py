"""What every rank of a pipeline does in one step, on its device and on its links, second by second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phalanx.schedule.schedule import Schedule


class Span(NamedTuple):
    """Something that takes time."""

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
    """A step, simulated. Every moment of a rank is busy, communication or idle."""

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
        """Seconds of communication that nothing hides: inside passes, and those of the rank's own network spans in
        which its device has nothing else to do. To wait for another rank's message is idle time."""
        inside = sum(span.exposed for span in self.device[rank])
        return inside + _outside(self.network[rank], self.device[rank])

    def idle(self, rank: int) -> float:
        """Seconds in which neither the device nor the rank's network does anything."""
        return self.seconds - self.busy(rank) - self.communication(rank)


def _outside(spans: tuple[Span, ...], hiding: tuple[Span, ...]) -> float:
    """Seconds that are in any of `spans` and in none of `hiding`; both in order of their starts."""
    total, covered, number = 0.0, 0.0, 0
    for span in spans:
        at = max(span.start, covered)
        covered = max(covered, span.end)
        # What ends before this one begins hides nothing of those after it either.
        while number < len(hiding) and hiding[number].end <= at:
            number += 1
        following = number
        while at < covered:
            if following == len(hiding) or hiding[following].start >= covered:
                total += covered - at
                break
            total += max(0.0, hiding[following].start - at)
            at = max(at, hiding[following].end)
            following += 1
    return total
