"""What a measurement found: for a person, for a script, as a picture, and as the fields of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.calibrate.comm import Fitted, chosen
from phalanx.calibrate.compute import Measured
from phalanx.config.cluster import Accelerator, Link
from phalanx.cost.fit import FitRow, median_error
from phalanx.pictures.fit import device_svg, link_svg

DIGITS = 4
"""Of fitted figures: more than they are good for."""


@dataclass(frozen=True)
class CalibrationReport:
    """One measurement and its fit."""

    what: str
    """compute or comm."""
    setting: str
    """On what: processes, threads, backend."""
    fields: dict[str, Any]
    """Of the cluster, by dotted path."""
    rows: list[FitRow]
    lines: list[str]
    """The fit for a person."""
    svg: str
    more: dict[str, Any] = field(default_factory=dict)
    """Further figures for a script."""

    @property
    def error(self) -> float:
        return median_error(self.rows)

    def text(self) -> str:
        """A table of every measurement, and the fit."""
        table = [("", "", "measured", "fitted", "error", "")]
        table += [
            (_said(row.kind), row.shape, _time(row.measured), _time(row.fitted), f"{row.error:+.1%}", _mark(row))
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
        return "\n".join([self.setting, "", *lines, "", *self.lines, f"median error of the fit: {self.error:.1%}"])

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints, but for where it was written."""
        points = [{**asdict(row), "error": row.error} for row in self.rows]
        return {
            "bench": self.what,
            "setting": self.setting,
            "cluster": self.fields,
            "median_error": self.error,
            **self.more,
            "points": points,
        }


def of_compute(measured: Measured, known: Mapping[str, Any], device: str, setting: str) -> CalibrationReport:
    """`known` are the fields that the file has of this device already."""
    found, rows = measured.fit()
    shared = measured.shared(found)
    peak = f"{measured.precision}_tflops"
    names = ("name", peak, "ceiling", "memory_gib", "bandwidth_gbs", "cores", "sustained", "older", "launch_us")
    if device == "cpu":
        names = (*names, "product_us", "host_us")
    fields: dict[str, Any] = {"device": device, "devices_per_node": known.get("devices_per_node", 1)}
    fields |= {f"accelerator.{name}": _short(getattr(found, name)) for name in names}
    if shared.processes:
        fields |= {f"sharing.{name}": _short(value) for name, value in asdict(shared).items() if name != "linked"}
    if (other := known.get("accelerator.fp32_tflops", 0.0)) and peak != "fp32_tflops":
        # One ceiling serves all precisions: what fp32 reached stays.
        before = known.get("accelerator.ceiling", Accelerator.ceiling)
        fields["accelerator.fp32_tflops"] = _short(other * before / fields["accelerator.ceiling"])
    lines = [
        f"peak in {measured.precision}: {getattr(found, peak):.4g} TFLOP/s "
        + ("(data sheet)" if measured.known else "(measured)")
        + f", of which the best product reaches {found.ceiling:.1%}, and in a long run {found.sustained:.1%} of that",
        f"fused attention: {found.older:.1%} of the rate of its kernel on the device it was written for",
        f"memory: {found.bandwidth_gbs:.4g} GB/s nominal, of which streams reach 85% in the cost model",
        f"a tiny kernel: {found.launch_us:.3g} us",
    ]
    if shared.processes:
        lines += [
            f"a product's call: {found.product_us:.3g} us more; starting an operation: {found.host_us:.3g} us",
            f"one process with all {shared.node_cores} cores, in training: {shared.alone_products:.2f} × the products "
            f"of one of {shared.processes}, {shared.alone_streams:.2f} × its memory",
        ]
    title = f"{found.name}, {measured.precision}: {setting}"
    svg = device_svg(title, measured.products, measured.attentions, measured.streams, rows)
    return CalibrationReport("compute", setting, fields, rows, lines, svg, {"precision": measured.precision})


def of_comm(groups: Sequence[Fitted], per_node: int, device: str, setting: str) -> CalibrationReport:
    fields: dict[str, Any] = {"device": device, "devices_per_node": per_node}
    if device == "cpu":
        fields["sharing.linked"] = per_node
    lines = []
    for place in ("intra", "inter"):
        if one := chosen(groups, place):
            fields |= {f"{place}.{name}": _short(getattr(one.link, name)) for name in ("gbs", "latency_us", "reached")}
    for one in groups:
        of = "one on each node" if one.place == "inter" else "of a node"
        wanted = f" → cluster.{one.place}" if one is chosen(groups, one.place) else ""
        lines.append(
            f"{one.group.ranks} ranks, {of}: latency {one.link.latency_us:.4g} us, {one.link.gbs:.4g} GB/s, "
            f"median error {one.error:.1%}{wanted}"
        )
    rows = [row for one in groups for row in one.rows]
    more = {"groups": [_as_dict(one) for one in groups]}
    return CalibrationReport(
        "comm", setting, fields, rows, lines, link_svg(setting, [(one.machine, one.transfers) for one in groups]), more
    )


def _as_dict(one: Fitted) -> dict[str, Any]:
    link: Link = one.link
    return {
        "ranks": one.group.ranks,
        "stride": one.group.stride,
        "place": one.place,
        "latency_us": link.latency_us,
        "gbs": link.gbs,
        "median_error": one.error,
    }


def _said(name: str) -> str:
    return name.replace("_", "-")


def _mark(row: FitRow) -> str:
    return "" if row.used else "not fitted"


def _short(value: Any) -> Any:
    """A figure with as many digits as it is worth, a name as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"
