"""The reliability of a measured machine's figures: the fit error and the spread of each part, which `phalanx bench`
stores with the figures, and the bounds above which predictions warn or are refused.

The fit error is the median relative error of the fit over the measurements of a part. The spread is the relative
difference between independent rounds of the same measurements (machine/links.py).
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from phalanx.config.constraints import Interval


def processor() -> str:
    """Returns the CPU's model name from /proc/cpuinfo, or the architecture where there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def core_count() -> int:
    """Returns the number of logical cores of the machine, whichever of them this process may use."""
    return os.cpu_count() or 1


def host_name() -> str:
    """Returns the network name of this machine."""
    return platform.node()


Measurement = Literal["compute", "comm"]
"""The two measurements of `phalanx bench`."""


STABLE_SPREAD = 0.05
"""Spread up to which independent rounds agree, so that no further one is measured: the cost model's own median error
(5.3 %, docs/explanation/accuracy.md)."""


class ErrorBounds(NamedTuple):
    """Relative errors above which a prediction warns, and above which it is refused."""

    unreliable: float
    refused: float


DEVICE_ERROR = ErrorBounds(0.25, 0.5)
"""Bounds on the fit error of products, attention and streams. On idle CPUs it is 1 to 15 % (docs/guides/bench.md)."""
LINK_ERROR = ErrorBounds(0.4, 0.8)
"""Bounds on the fit error of links. One latency and one bandwidth stand for five collectives, which alone gives 27 %
on an idle CPU with gloo (docs/guides/bench.md)."""
SPREAD = ErrorBounds(0.25, 1.0)
"""Bounds on the spread. A machine whose rounds differ by a factor of two says nothing about a step's time."""


@dataclass(frozen=True)
class FitQuality:
    """Quality of one part of a measurement."""

    error: Annotated[float, Interval(0)] = 0.0
    """Median relative error of the fit."""
    spread: Annotated[float, Interval(0)] = 0.0
    """Median over the part's measurements of (slowest - fastest) / median of the rounds that were kept."""
    rounds: Annotated[int, Interval(0)] = 0
    """Number of independent rounds; 0: this part was not measured, or without a spread."""


@dataclass(frozen=True)
class Provenance:
    """When, where and with which software a measurement was made."""

    date: str = ""
    """Day of the measurement, YYYY-MM-DD; empty if unknown."""
    host: str = ""
    """Network name of the machine."""
    processor: str = ""
    """Model name of its CPU."""
    cores: Annotated[int, Interval(0)] = 0
    """Logical cores of the machine."""
    versions: str = ""
    """Versions of phalanx, torch and Python."""


@dataclass(frozen=True)
class ComputeCalibration:
    """Quality of `phalanx bench compute`."""

    provenance: Provenance = field(default_factory=Provenance)
    products: FitQuality = field(default_factory=FitQuality)
    attention: FitQuality = field(default_factory=FitQuality)
    streams: FitQuality = field(default_factory=FitQuality)
    blocks: FitQuality = field(default_factory=FitQuality)
    """Blocks of small models, on a CPU. Each gives one figure, so they have a spread and no fit error."""


@dataclass(frozen=True)
class LinkCalibration:
    """Quality of `phalanx bench comm`."""

    provenance: Provenance = field(default_factory=Provenance)
    intra: FitQuality = field(default_factory=FitQuality)
    inter: FitQuality = field(default_factory=FitQuality)


@dataclass(frozen=True)
class Calibration:
    """Quality of the measurements that a cluster's figures come from; all at their defaults for other clusters."""

    compute: ComputeCalibration = field(default_factory=ComputeCalibration)
    comm: LinkCalibration = field(default_factory=LinkCalibration)

    @property
    def is_known(self) -> bool:
        """Whether any measurement stored its quality."""
        return bool(self.compute.provenance.date or self.comm.provenance.date)


class CalibratedPart(NamedTuple):
    """One measured part, the measurement that it belongs to and the bounds on its fit error."""

    name: str
    measurement: Measurement
    quality: FitQuality
    error_bounds: ErrorBounds

    @property
    def level(self) -> int:
        """0: reliable, 1: unreliable, 2: predictions are refused."""
        return max(
            sum(value > bound for bound in bounds)
            for value, bounds in ((self.quality.error, self.error_bounds), (self.quality.spread, SPREAD))
        )

    def excess(self) -> str:
        """Returns what exceeds its first bound, in words."""
        quality = self.quality
        found = []
        if quality.error > self.error_bounds.unreliable:
            found.append(f"fit error {quality.error:.1%} > {self.error_bounds.unreliable:.0%}")
        if quality.spread > SPREAD.unreliable:
            found.append(f"spread {quality.spread:.1%} > {SPREAD.unreliable:.0%}")
        return f"{self.name}: {', '.join(found)}"


@dataclass(frozen=True)
class Assessment:
    """The reliability of predictions that need some of the measurements, by their stored quality."""

    parts: list[CalibratedPart]
    """Measured parts with a known quality."""
    unknown: list[Measurement]
    """Needed measurements whose quality is not stored."""
    made: dict[str, Provenance]
    """Origins of the measurements with a stored quality."""
    changed: str = ""
    """Difference of this machine from the measured one; empty if there is none or if it does not matter."""

    @property
    def status(self) -> Literal["reliable", "unknown", "unreliable", "refused"]:
        level = max((part.level for part in self.parts), default=0)
        if level == 0 and self.unknown:
            return "unknown"
        return ("reliable", "unreliable", "refused")[level]

    @property
    def remedy(self) -> str:
        """Returns the commands that repeat the measurements that are unreliable, unknown or from another machine."""
        again = {part.measurement for part in self.parts if part.level} | set(self.unknown)
        again |= set(self.made) if self.changed else set()
        commands = [f"`phalanx bench {name}`" for name in ("compute", "comm") if name in again]
        return f"run {' and '.join(commands)} again on an idle machine" if commands else ""

    @property
    def problem(self) -> str:
        """Returns what is unreliable, with figures and bounds; empty if nothing is."""
        return "; ".join(part.excess() for part in self.parts if part.level)

    def line(self) -> str:
        """Returns the fit error and the spread of every part, the verdict and what to do, as one line."""
        words = [
            f"measured {made.date} on {made.host} ({made.processor}, {made.cores} cores)"
            for made in dict.fromkeys(self.made.values())
        ]
        if errors := [f"{part.name} {part.quality.error:.1%}" for part in self.parts if part.name != "blocks"]:
            words.append(f"fit error: {', '.join(errors)}")
        if self.parts:
            words.append("spread: " + ", ".join(f"{part.name} {part.quality.spread:.1%}" for part in self.parts))
        if self.problem:
            words.append(f"unreliable ({self.problem})")
        if self.unknown:
            words.append(f"{' and '.join(self.unknown)} of unknown quality (no fit error or spread is stored)")
        if self.changed:
            words.append(self.changed)
        return "; ".join(words) + (f": {self.remedy}" if self.remedy else "")

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `--json`; fit_error and spread are those of the worst part, None where unknown."""
        return {
            "status": self.status,
            "fit_error": max((part.quality.error for part in self.parts), default=None),
            "spread": max((part.quality.spread for part in self.parts), default=None),
            "parts": {part.name: asdict(part.quality) for part in self.parts},
            "unknown": self.unknown,
            "measured": {name: asdict(made) for name, made in self.made.items()},
            "changed": self.changed or None,
            "remedy": self.remedy or None,
        }


def relative_spread(values: Sequence[float]) -> float:
    """Returns (largest - smallest) / median of positive values."""
    return (max(values) - min(values)) / statistics.median(values)


def assess(calibration: Calibration, needed: tuple[Measurement, ...], *, here: bool, cpu: str = "") -> Assessment:
    """Assesses the stored quality of the needed measurements.

    Args:
        here: whether the figures stand for this machine, so that another processor or core count is reported.
        cpu: the accelerator's name where it is a CPU; it identifies the machine where a file stores no provenance.
    """
    provenance = {"compute": calibration.compute.provenance, "comm": calibration.comm.provenance}
    made: dict[str, Provenance] = {name: provenance[name] for name in needed if provenance[name].date}
    unknown: list[Measurement] = [name for name in needed if name not in made]
    changed = _machine_change(list(made.values()), cpu) if here else ""
    return Assessment(list(_parts(calibration, needed)), unknown, made, changed)


def _parts(calibration: Calibration, needed: tuple[Measurement, ...]) -> Iterator[CalibratedPart]:
    compute, comm = calibration.compute, calibration.comm
    device = {name: getattr(compute, name) for name in ("products", "attention", "streams", "blocks")}
    links = {"links in a node": comm.intra, "links between nodes": comm.inter}
    if "compute" in needed:
        yield from (CalibratedPart(name, "compute", one, DEVICE_ERROR) for name, one in device.items() if one.rounds)
    if "comm" in needed:
        yield from (CalibratedPart(name, "comm", one, LINK_ERROR) for name, one in links.items() if one.rounds)


def _machine_change(made: list[Provenance], cpu: str) -> str:
    here, cores = processor(), core_count()
    if not made:
        if cpu in ("", here):
            return ""
        return f"this machine has another processor ({here}) than the measured one ({cpu})"
    other = next((one for one in made if (one.processor, one.cores) != (here, cores)), None)
    if other is None:
        return ""
    return f"this machine ({here}, {cores} cores) is not the measured one ({other.processor}, {other.cores} cores)"
