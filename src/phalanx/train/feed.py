"""The micro-batches of one step after the other, and where a pipeline asks, those of the next one ahead of time."""

from __future__ import annotations

import time
from collections.abc import Iterator

from phalanx.data.loader import MicroBatch
from phalanx.train.metrics import Meter


class Feed:
    """Hands out what `batches` reads. What is waited for is the meter's to report."""

    def __init__(self, batches: Iterator[list[MicroBatch]], meter: Meter):
        self.batches, self.meter = batches, meter
        self.next: list[MicroBatch] | None = None

    def take(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next step."""
        found = self.ahead()
        self.next = None
        return found

    def ahead(self) -> list[MicroBatch]:
        """The same, but they will be handed out once more."""
        if self.next is None:
            began = time.perf_counter()
            self.next = next(self.batches)
            self.meter.waited += time.perf_counter() - began
        return self.next
