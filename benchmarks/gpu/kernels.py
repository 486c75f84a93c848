"""Where a step's time goes on the device, by kind of kernel: a profile of two steps, compiled where they can be.

The optimizer's kernels, and those of the gradients' norm, are those that the host launches in its phases.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from benchmarks.gpu import commands, shapes
from benchmarks.gpu.commands import CaseError
from benchmarks.gpu.part import Case, Part, SkippedError
from benchmarks.gpu.results import Outcome, Row, reason
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.throughput import LIMIT_S, WARM_UP

STEPS = 2
KINDS = {
    "communication": r"^nccl",
    "attention": r"flash|fmha|sdpa|attention",
    "optimizer": r"multi_tensor_apply|fused_?adam",
    "products": r"gemm|cutlass|nvjet|cublas|matmul|grouped_mm|^sm\d+_xmma",
    "compiled": r"^triton_",
    "reductions": r"reduce|norm|softmax|scan|sort|index|scatter|gather",
    "copies": r"^mem(cpy|set)",
    "elementwise": r"elementwise",
}
"""Kinds by what kernels' names contain, in lower case; the first that does. What none does is "others"."""
OF_THE_UPDATE, LAUNCHES = ("exchange", "optimizer"), ("cuda_runtime", "cuda_driver")
"""Phases of the host in a trace of `phalanx train`, and the categories of its launches."""


def cases(setting: Setting) -> list[Case]:
    several = [*shapes.OTHERS, *(shape for shape in shapes.GPT if shape.name in ("350M", "1.3B"))]
    chosen = [shapes.TINY] if setting.quick else several
    return [Case(shape.name, partial(measure, setting, shape)) for shape in chosen]


def measure(setting: Setting, shape: Shape) -> dict[str, Any]:
    """Returns milliseconds per step and launches by kind. Raises SkippedError if the shape does not fit, or on a CPU,
    whose profiles have no kernels; or as training."""
    fit = shapes.fitting(setting, shape)
    if isinstance(fit, str):
        raise SkippedError(fit)
    first = 2 if setting.quick else WARM_UP
    profiled = f"train.profile.steps={first},{first + STEPS - 1}"
    words = shapes.training(setting, shape, *fit[0], profiled)
    try:
        # A rehearsal compiles in the part about throughput.
        compiled = [] if setting.quick else ["train.compile=true"]
        events = commands.traced([*words, *compiled], limit_s=LIMIT_S)
    except CaseError as error:
        if "train.compile=true: " not in str(error):
            raise
        events = commands.traced(words, limit_s=LIMIT_S)  # what cannot be compiled
    found = by_kind(events)
    if not found:
        raise SkippedError("a CPU's profile has no kernels")
    return {**found, "command": commands.shown(commands.phalanx("train", *words))}


def by_kind(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns, from a trace of STEPS steps, milliseconds per step from the first kernel to the last, of them idle, and
    milliseconds and launches by kind; empty if there are no kernels."""
    timed = [event for event in events if "dur" in event]
    updates = [span(event) for event in timed if event.get("cat") == "phase" and event["name"] in OF_THE_UPDATE]
    launched = {correlation(event): span(event)[0] for event in timed if event.get("cat") in LAUNCHES}
    spans = list[tuple[float, float, str]]()
    for event in timed:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind, at = kind_of(str(event["name"])), launched.get(correlation(event), -1.0)
            updates_here = kind != "communication" and any(start <= at < end for start, end in updates)
            spans.append((*span(event), "optimizer" if updates_here else kind))
    if not spans:
        return {}
    times, launches, busy, reached = defaultdict[str, float](float), defaultdict[str, int](int), 0.0, 0.0
    for start, end, kind in sorted(spans):
        times[kind] += (end - start) / 1000 / STEPS
        launches[kind] += 1
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - min(start for start, _, _ in spans)
    return {
        "step_ms": whole / 1000 / STEPS,
        "idle_ms": (whole - busy) / 1000 / STEPS,
        "kinds_ms": dict(sorted(times.items(), key=lambda item: -item[1])),
        "launches": {kind: round(count / STEPS) for kind, count in launches.items()},
    }


def span(event: Mapping[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def correlation(event: Mapping[str, Any]) -> object:
    """Returns what a kernel and its launch have in common."""
    return (event.get("args") or {}).get("correlation", event.get("ts"))


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), "others")


def table(outcomes: Mapping[str, Outcome]) -> list[Row]:
    kinds = [*KINDS, "others"]
    rows: list[Row] = [("shape, ms per step (launches)", "step", "idle", *kinds)]
    for name, found in outcomes.items():
        if why := reason(found):
            rows.append((name, why))
            continue
        cells = [
            f"{found['kinds_ms'][kind]:.1f} ({found['launches'][kind]})" if kind in found["kinds_ms"] else ""
            for kind in kinds
        ]
        rows.append((name, f"{found['step_ms']:.1f}", f"{found['idle_ms']:.1f}", *cells))
    return rows


PART = Part("kernels", "Kernels of a step, by kind", cases, table)
