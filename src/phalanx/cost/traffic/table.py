"""Bytes by mesh axis and collective, added up: what predictions of traffic are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.cost.traffic.collectives import Collective, sent_bytes

Traffic = dict[str, dict[str, float]]
"""Bytes that a rank sends in a step, {axis: {collective: bytes}}, as the ledger names them."""


@dataclass
class Table:
    """Bytes that one rank sends. What sends nothing is no entry."""

    entries: dict[tuple[str, Collective], float] = field(default_factory=dict)

    def add(self, axis: str, collective: Collective, payload: float, ranks: int, times: float = 1) -> None:
        """`times` collectives over `payload` bytes (see sent_bytes) and `ranks` ranks."""
        if ranks > 1:
            self.note(axis, collective, times * sent_bytes(collective, payload, ranks))

    def note(self, axis: str, collective: Collective, sent: float) -> None:
        """`sent` bytes."""
        if sent:
            self.entries[axis, collective] = self.entries.get((axis, collective), 0.0) + sent

    def take(self, other: Table, times: float = 1) -> None:
        """Add another table, `times` over."""
        for (axis, collective), sent in other.entries.items():
            self.note(axis, collective, times * sent)

    def traffic(self) -> Traffic:
        """By axis, then by collective, in the order in which the ledger has them."""
        found: Traffic = {}
        for (axis, collective), sent in sorted(self.entries.items()):
            found.setdefault(axis, {})[collective] = sent
        return found
