"""`phalanx bench` on the device: its matrix products, attention, streams and small kernels, and its links."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu import commands
from benchmarks.gpu.part import Case, Part
from benchmarks.gpu.results import Outcome, Row, reason
from benchmarks.gpu.setting import Setting

LIMIT_S = 900.0


def cases(setting: Setting) -> list[Case]:
    precisions = ["bf16", "fp32"] if setting.device == "cuda" and not setting.quick else [setting.precision]
    found = [
        Case(f"compute, {precision}", partial(measure, setting, "compute", "--precision", precision))
        for precision in precisions
    ]
    if setting.gpus > 1:
        found.append(Case(f"comm, {setting.gpus} GPUs", partial(measure, setting, "comm")))
    return found


def measure(setting: Setting, verb: str, *words: str) -> dict[str, Any]:
    """Returns the fitted cluster and every measured point. Raises CaseError if the command fails."""
    options = ["--device", setting.device, "--no-save", "--json", *(["--quick"] if setting.quick else [])]
    alone = ["--nproc-per-node", "1"] if verb == "compute" else []
    argv = commands.phalanx("bench", verb, *words, *alone, *options)
    report = commands.answer(argv, limit_s=LIMIT_S)
    kept = {key: report[key] for key in ("setting", "cluster", "median_error", "points")}
    return {**kept, "command": commands.shown(argv)}


def table(outcomes: Mapping[str, Outcome]) -> list[Row]:
    rows: list[Row] = [("measured", "median error of the fit", "largest error", "the cluster that fits")]
    for name, found in outcomes.items():
        if why := reason(found):
            rows.append((name, why))
            continue
        worst = max(abs(point["error"]) for point in found["points"] if point["used"])
        fields = ", ".join(f"{path} {_short(value)}" for path, value in found["cluster"].items())
        rows.append((name, f"{found['median_error']:.1%}", f"{worst:.1%}", fields))
    return rows


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


PART = Part("compute", "Kernels and links: phalanx bench", cases, table)
