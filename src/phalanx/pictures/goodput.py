"""A picture of productive time over the time between checkpoints, for jobs of several sizes and two costs of a
checkpoint (`phalanx simulate JOB --failures-svg FILE`). A dot marks the optimum of each job."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.pictures import canvas
from phalanx.pictures.canvas import Panel
from phalanx.simulate.goodput import at, best

SIZES = (1024, 4096, 16384, 100_000)
"""Numbers of devices of the jobs that are compared with the user's."""
_POINTS, _LONGEST = 160, 60.0  # points of a line, and minutes between checkpoints at its end


def svg(sizes: Sequence[int], failures_per_device_day: float, saves: Sequence[float], restart_s: float) -> str:
    """Returns a panel per cost of a checkpoint in seconds, with a line per number of devices, as an SVG document."""
    panels = []
    for save in saves:
        lines: dict[str, list[tuple[float, float]]] = {}
        marks: dict[str, tuple[float, float]] = {}
        for devices in sizes:
            name = f"{devices:,} devices"
            minutes = [_LONGEST * (number / _POINTS) ** 2 for number in range(8, _POINTS + 1)]
            found = [at(60 * minute, devices, failures_per_device_day, save, restart_s) for minute in minutes]
            lines[name] = [(minute, 100 * g.fraction) for minute, g in zip(minutes, found, strict=True)]
            top = best(devices, failures_per_device_day, save, restart_s)
            if minutes[0] <= top.interval_s / 60 <= _LONGEST:
                marks[name] = top.interval_s / 60, 100 * top.fraction
        panels.append(
            Panel(f"a checkpoint takes {save:g} s", "minutes between checkpoints", "% productive time", lines, marks)
        )
    rate = f"{failures_per_device_day:.3g} failures per device and day"
    return canvas.svg(f"Productive time: {rate}, a restart takes {restart_s / 60:g} minutes", panels)
