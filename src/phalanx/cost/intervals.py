"""The interval of a prediction, between which eight of ten published steps lie, and how sure it is in words.

The factors are in intervals.yaml; benchmarks/intervals.py fits them to published steps, each predicted without what
was fitted to its own source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from phalanx.blocks.parameters import count
from phalanx.cost.spec import StepSpec

INTERVALS = Path(__file__).with_name("intervals.yaml")
Factors = tuple[float, float]
Class = tuple[str, str, str]


@dataclass(frozen=True)
class FittedInterval:
    """Factors on a prediction, and where they come from."""

    factors: Factors
    rows: int
    sources: int


@cache
def _written() -> dict[str, Any]:
    return yaml.safe_load(INTERVALS.read_text(encoding="utf-8"))


@cache
def _intervals() -> dict[Class, FittedInterval]:
    return {
        (kind, fit, layout): FittedInterval((low, high), rows, sources)
        for kind, fit, layout, low, high, rows, sources in _written()["intervals"]
    }


def _class(spec: StepSpec) -> Class:
    """Returns the class of a step that has an interval: of a program that was fitted, if there are enough rows of its
    kind, and of a layout that was filled in."""
    kind = "experts" if spec.model.moe.n_experts else "dense"
    fits = ("fitted", "unfitted") if spec.fitted else ("unfitted",)
    layouts = ("any",) if spec.given else ("filled in", "any")
    return next(one for fit in fits for layout in layouts if (one := (kind, fit, layout)) in _intervals())


def time_factors(spec: StepSpec) -> Factors:
    """Returns the factors on the seconds of a step."""
    low, high = _intervals()[_class(spec)].factors
    return low / spec.framework.widened, high * spec.framework.widened


def memory_factors() -> Factors:
    """Returns the factors on the peak memory."""
    low, high, *_ = _written()["memory_interval"]
    return low, high


def sureness(spec: StepSpec) -> str:
    """Says how sure the time of a step is, and why."""
    (kind, fit, layout), (low, high) = (found := _class(spec)), time_factors(spec)
    interval, largest = _intervals()[found], _written()["largest"]
    program, device = spec.framework.name, spec.cluster.accelerator.name or "these devices"
    what = "models with experts" if kind == "experts" else "dense models"
    what += ", layout or batch filled in" * (layout != "any")
    if fit == "fitted":
        why = f"{program} was fitted on {device}; {interval.rows} other published steps of fitted programs, {what}"
    else:
        why = (
            f"{program} was not fitted on {device}; {interval.rows} published steps, {what}, of {interval.sources} "
            "sources, each predicted without its own"
        )
    beyond = [
        f"{name} beyond the {largest[name]:,} of the largest"
        for name, number in (("parameters", count(spec.model)), ("devices", spec.layout.world))
        if number > largest[name]
    ]
    described = ", wider because nobody measured this machine" if spec.framework.widened > 1 else ""
    more = f"; {' and '.join(beyond)}, where nothing was measured" if beyond else ""
    return f"{low - 1:+.0%} to {high - 1:+.0%} holds eight of ten: {why}{described}{more}"
