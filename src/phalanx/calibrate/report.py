"""The result of a measurement: as text, as JSON, as a picture, and as the fields of a cluster."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import phalanx
from phalanx.calibrate.comm import Fitted, chosen
from phalanx.calibrate.compute import Measured
from phalanx.config import this_machine
from phalanx.config.calibration import (
    Assessment,
    Calibration,
    ComputeCalibration,
    LinkCalibration,
    Measurement,
    Provenance,
    assess,
)
from phalanx.config.cluster import Accelerator, Link
from phalanx.config.fields import get, leaves
from phalanx.cost.fit import FitRow, median_error
from phalanx.pictures.panels import device_svg, link_svg


# The date, machine and software versions of a measurement.
def provenance() -> Provenance:
    """Returns today's date, this machine and the versions of phalanx, torch and Python."""
    torch = importlib.metadata.version("torch")
    return Provenance(
        date=time.strftime("%Y-%m-%d"),
        host=this_machine.host_name(),
        processor=this_machine.processor(),
        cores=this_machine.core_count(),
        versions=f"phalanx {phalanx.__version__}, torch {torch}, python {platform.python_version()}",
    )


DIGITS = 4
"""Significant digits of fitted figures; the fit errors leave one or two of them."""


@dataclass(frozen=True)
class CalibrationReport:
    """One measurement and its fit."""

    what: Measurement
    """The command, compute or comm."""
    setting: str
    """Processes, threads and backend."""
    fields: dict[str, Any]
    """Fields of the cluster by dotted path, with the calibration's."""
    rows: list[FitRow]
    lines: list[str]
    """The fit in words."""
    svg: str
    assessment: Assessment
    """The reliability of predictions, given its fit errors and spreads."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further entries of the JSON document."""

    @property
    def error(self) -> float:
        return median_error(self.rows)

    def text(self) -> str:
        """Returns a table of every measurement, and the fit."""
        table = [("", "", "measured", "fitted", "error", "")]
        table += [
            (
                row.kind.replace("_", "-"),
                row.shape,
                _time(row.measured),
                _time(row.fitted),
                f"{row.error:+.1%}",
                _mark(row),
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if place in (0, 1, 5) else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()
            for cells in table
        ]
        return "\n".join(
            [
                self.setting,
                "",
                *lines,
                "",
                *self.lines,
                self.assessment.line(),
                f"median error of the fit: {self.error:.1%}",
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `--json`, but for the paths of the files."""
        points = [{**asdict(row), "error": row.error} for row in self.rows]
        return {
            "bench": self.what,
            "setting": self.setting,
            "cluster": self.fields,
            "median_error": self.error,
            "calibration": self.assessment.as_dict(),
            **self.more,
            "points": points,
        }


def of_compute(measured: Measured, known: Mapping[str, Any], device: str, setting: str) -> CalibrationReport:
    """Reports `bench compute`. `known` are the fields that the file already has for this device."""
    found, rows = measured.fit()
    shared = measured.fit_sharing(found)
    quality = replace(measured.calibration(rows), provenance=provenance())
    peak = f"{measured.precision}_tflops"
    names = ("name", peak, "ceiling", "memory_gib", "bandwidth_gbs", "cores", "sustained", "older", "launch_us")
    if device == "cpu":
        names = (*names, "product_us", "host_us")
    fields: dict[str, Any] = {"device": device, "devices_per_node": known.get("devices_per_node", 1)}
    fields |= {f"accelerator.{name}": _short(getattr(found, name)) for name in names}
    if shared.processes:
        fields |= {f"sharing.{name}": _short(value) for name, value in asdict(shared).items() if name != "linked"}
    fields |= {f"host.{name}": _short(value) for name, value in asdict(measured.host).items() if value}
    fields |= _calibration_fields("compute", quality)
    if (other := known.get("accelerator.fp32_tflops", 0.0)) and peak != "fp32_tflops":
        # One ceiling serves all precisions, so that fp32's rate stays only if its peak changes.
        before = known.get("accelerator.ceiling", Accelerator.ceiling)
        fields["accelerator.fp32_tflops"] = _short(other * before / fields["accelerator.ceiling"])
    lines = [
        f"peak in {measured.precision}: {getattr(found, peak):.4g} TFLOP/s "
        + ("(data sheet)" if measured.known else "(reached)")
        + f"; the best product reaches {found.ceiling:.1%} of it, and sustains {found.sustained:.1%} of that",
        f"fused attention: {found.older:.1%} of the rate on the device that its kernel was written for",
        f"memory bandwidth: {found.bandwidth_gbs:.4g} GB/s, of which the cost model lets streams reach 85%",
        f"launch overhead: {found.launch_us:.3g} us per kernel",
        f"host: copies of {measured.host.link_gbs:.4g} GB/s, AdamW's update at {measured.host.update_gbs:.4g} GB/s",
        f"disk of {measured.folder}: {measured.host.disk_gbs:.4g} GB/s, read and written by turns, "
        f"{measured.host.disk_gib:,.4g} GiB free"
        if measured.folder
        else "disk: not measured: no file could be made in the folder of temporary files",
    ]
    if shared.processes:
        lines += [
            f"dispatch: {found.host_us:.3g} us per operation, {found.product_us:.3g} us more per matrix product",
            f"one process with all {shared.node_cores} cores, in training: {shared.alone_products:.2f} × the product "
            f"rate of one of {shared.processes}, {shared.alone_streams:.2f} × its memory bandwidth",
        ]
    title = f"{found.name}, {measured.precision}: {setting}"
    svg = device_svg(title, measured.products, measured.attentions, measured.streams, rows)
    assessment = assess(Calibration(compute=quality), ("compute",), here=False)
    return CalibrationReport(
        "compute", setting, fields, rows, lines, svg, assessment, {"precision": measured.precision}
    )


def of_comm(groups: Sequence[Fitted], per_node: int, device: str, name: str, setting: str) -> CalibrationReport:
    """Reports `bench comm`, from the fits of all group sizes; `name` is the device's."""
    fields: dict[str, Any] = {"device": device, "devices_per_node": per_node}
    if device == "cpu":
        fields["sharing.linked"] = per_node
    lines = []
    quality = LinkCalibration(provenance=provenance())
    for place in ("intra", "inter"):
        if one := chosen(groups, place):
            fields |= {f"{place}.{name}": _short(getattr(one.link, name)) for name in ("gbs", "latency_us", "reached")}
            quality = replace(quality, **{place: one.quality})
    fields |= _calibration_fields("comm", quality)
    for one in groups:
        of = "one per node" if one.place == "inter" else "of a node"
        target = f" → cluster.{one.place}" if one is chosen(groups, one.place) else ""
        lines.append(
            f"{one.group.ranks} ranks, {of}: latency {one.link.latency_us:.4g} us, {one.link.gbs:.4g} GB/s, "
            f"median error {one.quality.error:.1%}, spread {one.quality.spread:.1%}{target}"
        )
    rows = [row for one in groups for row in one.rows]
    more = {"groups": [_as_dict(one) for one in groups]}
    svg = link_svg(f"{name}: {setting}", [(one.machine, one.transfers) for one in groups])
    assessment = assess(Calibration(comm=quality), ("comm",), here=False)
    return CalibrationReport("comm", setting, fields, rows, lines, svg, assessment, more)


def _calibration_fields(measurement: Measurement, quality: ComputeCalibration | LinkCalibration) -> dict[str, Any]:
    """Returns a calibration as fields of a cluster, by dotted path, without parts that were not measured."""
    measured = [path for path in leaves(type(quality)) if getattr(get(quality, path.split(".")[0]), "rounds", 1)]
    return {f"calibration.{measurement}.{path}": _short(get(quality, path)) for path in measured}


def _as_dict(one: Fitted) -> dict[str, Any]:
    link: Link = one.link
    return {
        "ranks": one.group.ranks,
        "stride": one.group.stride,
        "place": one.place,
        "latency_us": link.latency_us,
        "gbs": link.gbs,
        "median_error": one.quality.error,
        "spread": one.quality.spread,
        "rounds": one.quality.rounds,
    }


def _mark(row: FitRow) -> str:
    return "" if row.used else "not fitted"


def _short(value: Any) -> Any:
    """Returns a figure rounded to DIGITS, a name as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"
