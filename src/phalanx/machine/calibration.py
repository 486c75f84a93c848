"""A whole measurement on one rank, and its result: as text, as JSON, as a picture, and as the fields of a cluster.

The file of `cluster=local` is a job file with a `cluster` section and nothing else, so it can be given to any verb, or
pasted into a job.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

import phalanx
from phalanx.blocks.operator import Collective
from phalanx.comm.agree import Facts
from phalanx.config import calibration, clusters
from phalanx.config.calibration import (
    Assessment,
    Calibration,
    ComputeCalibration,
    LinkCalibration,
    Measurement,
    Provenance,
    assess,
)
from phalanx.config.cluster import Accelerator, Cluster, Link
from phalanx.config.fields import get, leaves
from phalanx.cost.fit import FitRow, Precision, median_error
from phalanx.data.files import Progress, silent, stderr_progress
from phalanx.errors import JobError
from phalanx.launch.process_group import process_group
from phalanx.launch.ranks import Ranks
from phalanx.machine import compute
from phalanx.machine import links as comm
from phalanx.machine.compute import Measured
from phalanx.machine.links import Fitted, chosen
from phalanx.pictures.panels import device_svg, link_svg
from phalanx.train.agreement import agree
from phalanx.units import aligned, counted, duration

HEADER = "# This machine as `phalanx bench` measured it: the cluster that `cluster=local` means."
MEASURED = ("accelerator.", "host.", "intra.", "inter.", "sharing.", "calibration.", "devices_per_node")
"""Prefixes of the fields that belong to the device they were measured on."""


def fields_of(path: Path) -> dict[str, Any]:
    """Returns the fields of the file by dotted path; none where there is no file. Raises JobError for a file that is
    wrong, before anything is measured."""
    if not path.exists():
        return {}
    try:
        return clusters.local_fields(path)
    except JobError as error:
        raise JobError([*error.problems, f"correct or delete {path}, or write elsewhere: --out FILE"]) from None


def of_device(known: Mapping[str, Any], device: str, name: str = "") -> dict[str, Any]:
    """Returns the fields without those measured on another kind of device, or on an accelerator of another name."""
    if known.get("device", device) != device:
        return {key: value for key, value in known.items() if not key.startswith(MEASURED)}
    if name and known.get("accelerator.name", name) != name:
        return {
            k: value
            for k, value in known.items()
            if not k.startswith(("accelerator.", "host.", "calibration.compute."))
        }
    return dict(known)


def write(path: Path, fields: Mapping[str, Any], what: str, fact: str) -> None:
    """Replaces the file by these fields, under the facts of this measurement (`what`: compute or comm) and those of the
    other one. Raises JobError where it cannot be written."""
    facts = {**_facts(path), what: fact}
    lines = [HEADER, *(f"# {name}: {text}" for name, text in sorted(facts.items()))]
    body = yaml.safe_dump({"cluster": _nested(fields)}, sort_keys=False, allow_unicode=True, width=1000)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("\n".join(lines) + "\n" + body, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}") from None


def _facts(path: Path) -> dict[str, str]:
    """Returns the comment at the top for each measurement."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    comments = (line.removeprefix("# ").partition(": ") for line in lines if line.startswith("# "))
    return {name: text for name, _, text in comments if name in ("compute", "comm")}


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Nests the fields in the order of the dataclasses."""
    nested: dict[str, Any] = {}
    for path in sorted(fields, key=list(leaves(Cluster)).index):
        *sections, name = path.split(".")
        at = nested
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = fields[path]
    return nested


# The date, machine and software versions of a measurement.
def provenance() -> Provenance:
    """Returns today's date, this machine and the versions of phalanx, torch and Python."""
    torch = importlib.metadata.version("torch")
    return Provenance(
        date=time.strftime("%Y-%m-%d"),
        host=calibration.host_name(),
        processor=calibration.processor(),
        cores=calibration.core_count(),
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
        for row in self.rows:
            figures = duration(row.measured, DIGITS), duration(row.fitted, DIGITS), f"{row.error:+.1%}"
            table.append((row.kind.replace("_", "-"), row.shape, *figures, "" if row.used else "not fitted"))
        quality = self.assessment.line(), f"median error of the fit: {self.error:.1%}"
        return "\n".join([self.setting, "", *aligned(table, "llrrrl"), "", *self.lines, *quality])

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
        f"launch overhead: {found.launch_us:.3g} µs per kernel",
        f"host: copies of {measured.host.link_gbs:.4g} GB/s, AdamW's update at {measured.host.update_gbs:.4g} GB/s",
        f"disk of {measured.folder}: {measured.host.disk_gbs:.4g} GB/s, read and written by turns, "
        f"{measured.host.disk_gib:,.4g} GiB free"
        if measured.folder
        else "disk: not measured: no file could be made in the folder of temporary files",
    ]
    if shared.processes:
        lines += [
            f"dispatch: {found.host_us:.3g} µs per operation, {found.product_us:.3g} µs more per matrix product",
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
            f"{one.group.ranks} ranks, {of}: latency {one.link.latency_us:.4g} µs, {one.link.gbs:.4g} GB/s, "
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


def _short(value: Any) -> Any:
    """Returns a figure rounded to DIGITS, a name as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


TIMEOUT_S = 120.0
"""Seconds that a collective may wait for a peer. The longest call, a product of one thread, takes a few."""


def compute_report(
    ranks: Ranks,
    device: torch.device,
    threads: int,
    *,
    precision: Precision,
    quick: bool,
    known: Mapping[str, Any],
    store: Store | None = None,
) -> CalibrationReport:
    """Measures one device while all ranks do the same. `known` are the fields of the cluster's file; `store` is that of
    ranks that have met."""
    on_node = ranks.local_world or 1
    known = of_device(known, device.type, compute.look_up(device, on_node).name)
    ceiling = known.get("accelerator.ceiling", 1.0)
    options = {"--precision": precision, "--quick": quick}
    with _measuring(ranks, device, threads, options, store) as progress:
        measured = compute.measure(device, precision, on_node, quick, ceiling, progress)
    return of_compute(measured, known, device.type, f"{_processes(ranks, threads)}, {precision} on {device.type}")


def comm_report(
    ranks: Ranks,
    device: torch.device,
    threads: int,
    *,
    collectives: Sequence[Collective],
    quick: bool,
    store: Store | None = None,
) -> CalibrationReport:
    """Measures the links between the ranks. Raises JobError where there is one rank (comm.per_node_of)."""
    per_node = comm.per_node_of(ranks)
    options = {"--collectives": list(collectives), "--quick": quick}
    with _measuring(ranks, device, threads, options, store) as progress:
        fits = comm.measure(ranks, device, collectives, quick, progress)
    backend = "nccl" if device.type == "cuda" else "gloo"
    name, setting = compute.look_up(device, per_node).name, f"collectives of {backend}, {_processes(ranks, threads)}"
    return of_comm(fits, per_node, device.type, name, setting)


@contextmanager
def _measuring(
    ranks: Ranks, device: torch.device, threads: int, options: Facts, store: Store | None
) -> Iterator[Progress]:
    """Sets the threads and joins the process group for the block, and gives its progress, which rank 0 shows. Raises
    JobError if ranks differ in the `options`, RunError if they differ in versions or settings."""
    progress_of_rank = stderr_progress() if ranks.rank == 0 else nullcontext(silent)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        group = process_group(ranks, device=device, timeout_s=TIMEOUT_S, store=store)
        with group if ranks.world > 1 else nullcontext(), progress_of_rank as progress:
            agree(options, device)
            yield progress
    finally:
        torch.set_num_threads(before)


def _processes(ranks: Ranks, threads: int) -> str:
    return f"{ranks.world} process{'' if ranks.world == 1 else 'es'} of {counted(threads, 'thread')}"
