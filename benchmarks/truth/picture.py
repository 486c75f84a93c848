"""Predicted against measured time and memory: one point per row on logarithmic axes, one colour per source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.truth.grades import GradedRow, by
from phalanx.pictures.elements import COLOURS, NEUTRAL, document, heading, text

_SIDE, _LEFT, _TOP, _GAP, _BOTTOM, _LEGEND = 420, 70, 64, 90, 60, 18
_BAND = 0.1
"""Relative error of the band around the diagonal."""
NAMES = {
    "bigscience_v100": "BigScience, V100",
    "bloom_bigscience_a100": "BLOOM, A100",
    "korthikanti2022_table5": "Korthikanti et al. 2022",
    "internlm_a100": "InternLM, A100",
    "llm_foundry_mpt": "LLM Foundry, MPT",
    "maxtext_trillium": "MaxText, TPU v6e",
    "nemo_automodel": "NeMo AutoModel",
    "maxtext_tpu_gpu": "MaxText, TPU and GPU",
    "megatron_core_h100_readme": "Megatron-Core, H100",
    "megatron_moe_modelzoo": "Megatron MoE model zoo",
    "mlperf_training_llm": "MLPerf Training",
    "narayanan2021": "Narayanan et al. 2021",
    "nemo_megatron_bridge": "NeMo Megatron Bridge",
    "nvidia_dgxc_benchmarking": "NVIDIA DGX Cloud",
    "papers_misc": "other papers",
    "simumax_b200_measured": "SimuMax, B200",
    "vtrain_a100_measured": "vTrain, A100",
    "zero_bubble_2401.10241": "Qi et al. 2024, zero bubble",
}
"""Names of the tables of published measurements by their files; another one goes by its file's words."""
_SHAPES = ("circle", "square")
"""Marks: sources beyond the number of colours have another shape."""


@dataclass(frozen=True)
class AccuracyPanel:
    """One pair of axes with its points."""

    title: str
    unit: str
    points: dict[str, list[tuple[float, float]]]
    """Measured and predicted values by source."""


def svg(found: Sequence[GradedRow], title: str = "predicted against measured") -> str:
    """Returns the pictures as an SVG document. Raises ValueError if nothing was measured."""
    panels = [panel for panel in (_times(found), _memory(found)) if panel.points]
    if not panels:
        raise ValueError("no row with a measured time or memory")
    return scatter(panels, title)


def scatter(panels: Sequence[AccuracyPanel], title: str) -> str:
    """Returns the panels side by side under one legend, as an SVG document."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.points))
    legend = -(-len(names) // 4) * _LEGEND
    width = _LEFT + len(panels) * (_SIDE + _GAP)
    height = _TOP + legend + _SIDE + _BOTTOM
    parts = [heading(16, 22, title)]
    for number, name in enumerate(names):
        x, y = 22 + number % 4 * (width - 40) / 4, 44 + number // 4 * _LEGEND
        parts.append(_mark(x, y - 4, names, name, 4))
        parts.append(text(x + 10, y, NAMES.get(name, name.replace("_", " "))))
    for number, panel in enumerate(panels):
        parts.append(f"<g transform='translate({_LEFT + number * (_SIDE + _GAP)} {_TOP + legend})'>")
        parts += [*_drawn(panel, names), "</g>"]
    return document(title, width, height, parts)


def _times(found: Sequence[GradedRow]) -> AccuracyPanel:
    points = {
        name: [(row.measured_s, row.predicted_s) for row in group if row.measured_s]
        for name, group in by(found, lambda row: row.source).items()
    }
    return AccuracyPanel("step time", "s", {name: series for name, series in points.items() if series})


def _memory(found: Sequence[GradedRow]) -> AccuracyPanel:
    points = {
        name: [
            (row.measured_bytes / 2**30, row.predicted_bytes / 2**30)
            for row in group
            if row.measured_bytes and row.predicted_bytes
        ]
        for name, group in by(found, lambda row: row.source).items()
    }
    shown = {name: series for name, series in points.items() if series}
    return AccuracyPanel("memory of the fullest device", "GiB", shown)


def _drawn(panel: AccuracyPanel, names: Sequence[str]) -> list[str]:
    values = [value for series in panel.points.values() for point in series for value in point]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * _SIDE

    parts = [f"<text x='{_SIDE / 2}' y='-10' text-anchor='middle' font-weight='600'>{panel.title}</text>"]
    off = math.log10(1 + _BAND) / (high - low) * _SIDE
    corners = f"0,{_SIDE} 0,{_SIDE - off:.1f} {_SIDE - off:.1f},0 {_SIDE},0 {_SIDE},{off:.1f} {off:.1f},{_SIDE}"
    parts.append(f"<polygon points='{corners}' fill='{NEUTRAL}' fill-opacity='.15'/>")
    parts.append(f"<line x1='0' y1='{_SIDE}' x2='{_SIDE}' y2='0' stroke='{NEUTRAL}'/>")
    for tick in _ticks(low, high):
        x, y = at(tick), _SIDE - at(tick)
        parts.append(f"<line x1='{x:.1f}' y1='0' x2='{x:.1f}' y2='{_SIDE}' stroke='{NEUTRAL}' stroke-opacity='.2'/>")
        parts.append(f"<line x1='0' y1='{y:.1f}' x2='{_SIDE}' y2='{y:.1f}' stroke='{NEUTRAL}' stroke-opacity='.2'/>")
        parts.append(f"<text x='{x:.1f}' y='{_SIDE + 16}' text-anchor='middle'>{tick:g}</text>")
        parts.append(f"<text x='-6' y='{y + 4:.1f}' text-anchor='end'>{tick:g}</text>")
    parts.append(f"<text x='{_SIDE / 2}' y='{_SIDE + 40}' text-anchor='middle'>measured, {panel.unit}</text>")
    parts.append(
        f"<text transform='translate(-48 {_SIDE / 2}) rotate(-90)' text-anchor='middle'>predicted, {panel.unit} "
        f"(grey: within {_BAND:.0%})</text>"
    )
    for name, series in panel.points.items():
        parts += [_mark(at(measured), _SIDE - at(predicted), names, name, 2.5) for measured, predicted in series]
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten, or the powers alone if these are many."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    steps = (1, 2, 5) if high - low < 2.5 else (1,)
    every = [step * 10.0**power for power in powers for step in steps]
    return [tick for tick in every if low <= math.log10(tick) <= high]


def _mark(x: float, y: float, names: Sequence[str], name: str, size: float) -> str:
    number = names.index(name)
    colour = COLOURS[number % len(COLOURS)]
    if number // len(COLOURS) % len(_SHAPES) == 0:
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{size}' fill='{colour}' fill-opacity='.7'/>"
    corner = f"x='{x - size:.1f}' y='{y - size:.1f}' width='{2 * size}' height='{2 * size}'"
    return f"<rect {corner} fill='{colour}' fill-opacity='.7'/>"
