"""The allocator's peak (torch.cuda.max_memory_allocated) beside the predicted one, by shape and layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu import commands, shapes
from benchmarks.gpu.part import Case, Part, SkippedError
from benchmarks.gpu.results import Outcome, Row, reason
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.shapes import Shape

LIMIT_S = 300.0
STEPS = 3
"""Steps per case: the first creates the optimizer's state, the second has all tensors."""
MAX_MEMORY_FRACTION = 0.92
"""Fraction of a device's memory above which a case is skipped: torch's context and fragmentation take the rest."""
SINGLE_DEVICE = {
    "nothing recomputed": ["layout.micro_batch=4"],
    "recompute=selective": ["layout.micro_batch=4", "layout.recompute=selective"],
    "recompute=full": ["layout.micro_batch=4", "layout.recompute=full"],
    "loss_chunk=1024": ["layout.micro_batch=4", "layout.loss_chunk=1024"],
    "accumulation=4": ["layout.micro_batch=1", "layout.accumulation=4"],
}
"""Layouts of one device."""


def cases(setting: Setting) -> list[Case]:
    chosen = [shapes.TINY] if setting.quick else [s for s in shapes.GPT if s.name in ("125M", "350M", "1.3B")]
    layouts = {"recompute=full": SINGLE_DEVICE["recompute=full"]} if setting.quick else SINGLE_DEVICE
    return [
        Case(f"{shape.name}, {name}", partial(measure, setting, shape, words))
        for shape in chosen
        for name, words in layouts.items()
    ]


def room(setting: Setting, shape: Shape, layout: list[str], ranks: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the prediction and the words of a training. Raises SkippedError if the device has too little memory."""
    prediction = shapes.predict(setting, shape, *layout, ranks=ranks)
    peak = prediction["memory"]["peak"]
    if peak > MAX_MEMORY_FRACTION * setting.memory:
        raise SkippedError(f"{peak / 2**30:.1f} GiB predicted, the device has {setting.memory / 2**30:.1f} GiB")
    return prediction, shapes.training(setting, shape, *layout)


def measure(setting: Setting, shape: Shape, layout: list[str]) -> dict[str, Any]:
    """Returns bytes of one device. Raises SkippedError if the device has too little memory, or as training."""
    prediction, words = room(setting, shape, layout, 1)
    rows = commands.train(words, steps=STEPS, limit_s=LIMIT_S)
    return {
        "measured": rows[-1]["memory"],
        "predicted": shapes.tensors(prediction),
        "predicted_parts": prediction["memory"],
        "command": commands.shown(commands.phalanx("train", *words)),
    }


def table(outcomes: Mapping[str, Outcome]) -> list[Row]:
    rows: list[Row] = [("shape and layout", "measured GiB", "predicted GiB", "error")]
    for name, found in outcomes.items():
        if why := reason(found):
            rows.append((name, why))
            continue
        measured, predicted = found["measured"], found["predicted"]
        rows.append((name, f"{measured / 2**30:.2f}", f"{predicted / 2**30:.2f}", f"{predicted / measured - 1:+.1%}"))
    return rows


PART = Part("memory", "Memory: the allocator's peak beside the predicted one", cases, table)
