"""The traffic ledger: calls and bytes sent per collective and mesh axis.

It counts where the calls are made (comm/axis.py), so a real run and its dry run count the same. One entry costs two
additions.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from phalanx.cost.communication import Collective, sent_bytes
from phalanx.units import counted, gib


@dataclass
class LedgerEntry:
    """One collective on one axis."""

    calls: int = 0
    sent: float = 0.0
    """Bytes sent by this rank, by the formula of the bandwidth-optimal algorithm."""


class Ledger:
    """Counts the bytes that one rank has sent."""

    def __init__(self) -> None:
        self.entries: defaultdict[tuple[str, Collective], LedgerEntry] = defaultdict(LedgerEntry)
        self.counts = True
        self.lock = threading.Lock()  # a parameter server answers each replica in a thread

    def add(self, axis: str, collective: Collective, payload: int, ranks: int) -> None:
        """Records a call over a whole tensor of `payload` bytes."""
        self.note(axis, collective, sent_bytes(collective, payload, ranks))

    def note(self, axis: str, collective: Collective, sent: float) -> None:
        """Records a call that sends `sent` bytes."""
        if not self.counts:
            return
        with self.lock:
            entry = self.entries[axis, collective]
            entry.calls += 1
            entry.sent += sent

    def clear(self) -> None:
        """Resets all counts."""
        self.entries.clear()

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Pauses counting in a `with` block: validations and checkpoints are not part of a step's traffic."""
        before, self.counts = self.counts, False
        try:
            yield
        finally:
            self.counts = before

    def traffic(self, steps: int = 1) -> dict[str, dict[str, float]]:
        """Returns bytes sent per step, {axis: {collective: bytes}}, as `phalanx predict --json` names them."""
        table: dict[str, dict[str, float]] = {}
        for (axis, collective), entry in sorted(self.entries.items()):
            table.setdefault(axis, {})[collective] = entry.sent / steps
        return table

    def lines(self, steps: int) -> list[str]:
        """Returns a log line per axis: bytes and calls per step."""
        lines = []
        for axis in dict.fromkeys(axis for axis, _ in sorted(self.entries)):
            parts = []
            for (of, collective), entry in sorted(self.entries.items()):
                if of == axis:
                    sent, calls = gib(int(entry.sent / steps)), counted(entry.calls / steps, "call")
                    parts.append(f"{collective.replace('_', '-')} {sent} in {calls}")
            lines.append(f"{axis}: {', '.join(parts)}")
        return lines
