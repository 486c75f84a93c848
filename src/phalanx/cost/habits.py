"""What a training program keeps in memory, where programs differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Habits:
    """Bytes that a program keeps for the same model under the same layout."""

    gradient_bytes: int = 0
    """Bytes of a gradient's number; 0 is that of the parameters."""
