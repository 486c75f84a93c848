"""Numbers with units, in the form of every log line, table and report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MIB = 2**20
"""Bytes of a mebibyte."""


def gib(count: float) -> str:
    """Formats bytes in binary units: "12.3GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f}{unit}" if unit == "B" else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.1f}GiB"


def counted(count: float, noun: str) -> str:
    """Formats a number with its noun: "1 call", "0.5 calls", "12 buckets"."""
    return f"{count:.4g} {noun}" if count == 1 else f"{count:.4g} {noun}s"


def listed(names: Sequence[object], most: int) -> str:
    """Formats names, of many only the first `most`: "a, b and 3 more"."""
    shown = ", ".join(map(str, names[:most]))
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def seconds(value: float) -> str:
    """Formats a duration: "850ms", "12.3s", "4m05s", "2h07m", from 48 hours on "2.13 days"."""
    if value < 1:
        return f"{value * 1000:.0f}ms"
    if value < 60:
        return f"{value:.1f}s"
    if value < 3600:
        return f"{int(value // 60)}m{int(value % 60):02d}s"
    if value < 48 * 3600:
        return f"{int(value // 3600)}h{int(value % 3600 // 60):02d}m"
    return f"{figure(value / 86400)} days"


def figure(value: float, digits: int = 3) -> str:
    """Formats a number with so many digits, or all before the point."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def duration(value: float, digits: int = 3) -> str:
    """Formats a short time in a suitable unit: "13.7 s", "14.2 ms", "3.41 µs"."""
    size, unit = next(
        ((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms")) if value >= 0.9995 * size), (1e-6, "µs")
    )
    return f"{value / size:.{digits}g} {unit}"


def aligned(rows: Iterable[Sequence[str]], sides: str = "") -> list[str]:
    """Returns rows of cells as lines with columns; `sides` has "l" or "r" for each, "l" for those beyond."""
    cells = [*rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rights = [side == "r" for side in sides.ljust(len(widths), "l")]
    columns = [*zip(widths, rights, strict=True)]
    return [
        "  ".join(
            cell.rjust(wide) if right else cell.ljust(wide) for cell, (wide, right) in zip(row, columns, strict=True)
        ).rstrip()
        for row in cells
    ]


def finite(value: Any, shown: Callable[[float], Any] = lambda number: None) -> Any:
    """Returns a document with NaN and infinity, which JSON lacks, as None, or as they are `shown`."""
    if isinstance(value, dict):
        return {key: finite(item, shown) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, shown) for item in value]
    return shown(value) if isinstance(value, float) and not math.isfinite(value) else value
