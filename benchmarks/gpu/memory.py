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


def together(ranks: int) -> dict[str, list[str]]:
    """Returns the layouts of `ranks` devices."""
    data = ["layout.micro_batch=2"]
    cut = {"DDP": [f"layout.dp_replicate={ranks}"], "TP, SP": [f"layout.tp={ranks}", "layout.sp=true"]}
    cut |= {f"ZeRO-{stage}": [f"layout.dp_shard={ranks}", f"layout.zero={stage}"] for stage in (1, 2, 3)}
    cut |= {"1F1B": [f"layout.pp={ranks}", f"layout.accumulation={2 * ranks}"], "ring": [f"layout.cp={ranks}"]}
    return {f"{name} on {ranks}": [*data, *words] for name, words in cut.items()}


def cases(setting: Setting) -> list[Case]:
    chosen = [shapes.TINY] if setting.quick else [s for s in shapes.GPT if s.name in ("125M", "350M", "1.3B")]
    layouts = {name: (words, 1) for name, words in SINGLE_DEVICE.items()}
    if setting.quick:
        layouts = {"recompute=full": layouts["recompute=full"]}
    elif setting.gpus > 1:
        ranks = 2 if setting.gpus < 4 else 4
        layouts |= {name: (words, ranks) for name, words in together(ranks).items()}
    return [
        Case(f"{shape.name}, {name}", partial(measure, setting, shape, words, ranks))
        for shape in chosen
        for name, (words, ranks) in layouts.items()
    ]


def measure(setting: Setting, shape: Shape, layout: list[str], ranks: int) -> dict[str, Any]:
    """Returns bytes on the first rank. Raises SkippedError if the device has too little memory, or as training."""
    prediction = shapes.predict(setting, shape, *layout, ranks=ranks)
    tensors, peak = shapes.tensors(prediction), prediction["memory"]["peak"]
    if peak > MAX_MEMORY_FRACTION * setting.memory:
        raise SkippedError(f"{peak / 2**30:.1f} GiB predicted, the device has {setting.memory / 2**30:.1f} GiB")
    words = shapes.training(setting, shape, *layout)
    rows = commands.train(words, steps=STEPS, limit_s=LIMIT_S)
    first = prediction["memory_by_rank"][0]
    return {
        "measured": rows[-1]["memory"],
        "predicted": first["peak"] - first["reserved"],
        "predicted_largest_rank": tensors,
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


PART = Part("memory", "Memory: the allocator's peak on the first rank beside the predicted one", cases, table)
