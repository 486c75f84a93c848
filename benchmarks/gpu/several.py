"""Every way to divide a model over 2, 4 and 8 GPUs of one machine: step time and memory beside the predicted ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu import commands, memory, shapes
from benchmarks.gpu.part import Case, Part
from benchmarks.gpu.results import Outcome, Row, reason
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.throughput import LIMIT_S, STEPS, WARM_UP

COUNTS = (2, 4, 8)
DENSE = {
    "DDP": ["layout.dp_replicate={0}"],
    "ZeRO-1": ["layout.dp_shard={0}", "layout.zero=1"],
    "ZeRO-2": ["layout.dp_shard={0}", "layout.zero=2"],
    "FSDP": ["layout.dp_shard={0}", "layout.zero=3"],
    "TP, SP": ["layout.tp={0}", "layout.sp=true"],
    "1F1B": ["layout.pp={0}", "layout.accumulation=16"],
    "ring": ["layout.cp={0}"],
    "Ulysses": ["layout.cp={0}", "layout.cp_ulysses={0}"],
}
EXPERTS = {"EP": ["layout.dp_shard={0}", "layout.ep={0}", "layout.zero=3"]}
"""Layouts of {0} ranks, of a GPT and of a mixture."""


def together(ranks: int, layouts: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns the words of each layout on `ranks` devices."""
    return {
        f"{name} on {ranks}": ["layout.micro_batch=2", *(word.format(ranks) for word in words)]
        for name, words in layouts.items()
    }


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of as many ranks as there are GPUs; a CPU rehearses them with two."""
    dense, mixture = (shapes.TINY, shapes.TINY_OTHERS[1]) if setting.quick else (shapes.GPT[3], shapes.OTHERS[1])
    chosen = [(dense, DENSE), (mixture, EXPERTS)]
    counts = [count for count in COUNTS if count <= setting.gpus] if setting.device == "cuda" else [2]
    return [
        Case(f"{shape.name}, {name}", partial(measure, setting, shape, words, ranks))
        for ranks in counts
        for shape, layouts in chosen
        for name, words in together(ranks, layouts).items()
    ]


def measure(setting: Setting, shape: Shape, layout: list[str], ranks: int) -> dict[str, Any]:
    """Returns seconds and bytes of a training on `ranks` devices. Raises SkippedError if they have too little memory,
    or as training."""
    prediction, words = memory.room(setting, shape, layout, ranks)
    warm_up, steps = (1, 2) if setting.quick else (WARM_UP, STEPS)
    rows = commands.train(words, steps=warm_up + steps, limit_s=LIMIT_S)
    step, last = statistics.median(row["step_time_s"] for row in rows[warm_up:]), rows[-1]
    tokens = prediction["tps_total"] * prediction["step_time_s"]
    return {
        "ranks": ranks,
        "step_s": step,
        "predicted_step_s": prediction["step_time_s"] if shapes.known(setting.name) else None,
        "predicted_exposed_s": prediction["exposed_comm_s"],
        "tokens_per_s": tokens / step,
        "mfu": last["mfu"],
        "memory": last["memory"] if setting.device == "cuda" else None,  # of a CPU: the whole process
        "predicted_memory": shapes.tensors_of(prediction["memory_by_rank"][0]),
        "command": commands.shown(commands.phalanx("train", *words)),
    }


def table(outcomes: Mapping[str, Outcome]) -> list[Row]:
    rows: list[Row] = [
        ("shape and layout", "tokens/s", "MFU", "step ms", "predicted ms", "error", "GiB", "predicted GiB", "error")
    ]
    for name, found in outcomes.items():
        if why := reason(found):
            rows.append((name, why))
            continue
        step, predicted = found["step_s"], found["predicted_step_s"]
        measured, bytes_predicted = found["memory"], found["predicted_memory"]
        rows.append(
            (
                name,
                f"{found['tokens_per_s']:,.0f}",
                f"{found['mfu']:.1%}" if found["mfu"] else "",
                f"{step * 1e3:.1f}",
                f"{predicted * 1e3:.1f}" if predicted else "",
                f"{predicted / step - 1:+.1%}" if predicted else "",
                f"{measured / 2**30:.2f}" if measured else "",
                f"{bytes_predicted / 2**30:.2f}",
                f"{bytes_predicted / measured - 1:+.1%}" if measured else "",
            )
        )
    return rows


PART = Part("several", "Several GPUs: a step and the first rank's peak beside the predicted ones", cases, table)
