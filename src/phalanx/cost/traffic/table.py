"""Sums of bytes by mesh axis and collective, from which traffic is predicted."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.cost.traffic.collectives import Collective, sent_bytes

Traffic = dict[str, dict[str, float]]
"""Bytes that a rank sends per step, {axis: {collective: bytes}}, as the ledger names them."""


@dataclass
class Table:
    """Bytes that one rank sends; zeros have no entry."""

    entries: dict[tuple[str, Collective], float] = field(default_factory=dict)

    def add(self, axis: str, collective: Collective, payload: float, ranks: int, times: float = 1) -> None:
        """Adds `times` collectives over `payload` bytes (see sent_bytes) and `ranks` ranks."""
        if ranks > 1:
            self.note(axis, collective, times * sent_bytes(collective, payload, ranks))

    def note(self, axis: str, collective: Collective, sent: float) -> None:
        """Adds `sent` bytes."""
        if sent:
            self.entries[axis, collective] = self.entries.get((axis, collective), 0.0) + sent

    def take(self, other: Table, times: float = 1) -> None:
        """Adds another table, `times` over."""
        for (axis, collective), sent in other.entries.items():
            self.note(axis, collective, times * sent)

    def traffic(self) -> Traffic:
        """Returns the bytes by axis, then by collective, in the order of the ledger."""
        traffic: Traffic = {}
        for (axis, collective), sent in sorted(self.entries.items()):
            traffic.setdefault(axis, {})[collective] = sent
        return traffic
