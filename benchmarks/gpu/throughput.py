"""Tokens per second and MFU of training, with and without compile, beside a plain torch loop and peers.

All contenders of a shape process the same micro-batches of random tokens. MFU is model FLOPs (forward and backward,
without recomputation: PaLM, appendix B) per second over the device's peak that `phalanx train` looks up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu import commands, nanogpt, shapes, torchtitan_llama
from benchmarks.gpu.commands import CaseError
from benchmarks.gpu.part import Case, Part, SkippedError
from benchmarks.gpu.results import Outcome, Row, reason
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.shapes import Shape

LIMIT_S = 900.0
WARM_UP = 8
"""Excluded steps: compilation, the allocator's first blocks, rising clocks."""
STEPS = 20
"""Steps measured after them."""
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""Environment on a CPU, without compilation, which would take a minute per model."""


def cases(setting: Setting) -> list[Case]:
    found = []
    chosen = [shapes.TINY, *shapes.TINY_OTHERS] if setting.quick else [*shapes.OTHERS, *shapes.GPT]
    for shape in chosen:
        for compiled in (False, True):
            measures = {"phalanx": partial(ours, setting, shape, compiled)}
            if compiled and setting.device == "cuda":
                measures["phalanx in fp8"] = partial(ours, setting, shape, compiled, "++train.precision=fp8")
            for name, (kind, module, missing) in CONTENDERS.items():
                if shape.kind == kind:
                    measures[name] = partial(loop, setting, shape, compiled, module, missing)
            end = ", compiled" if compiled else ""
            found += [Case(f"{shape.name}, {name}{end}", measure) for name, measure in measures.items()]
    return found


def ours(setting: Setting, shape: Shape, compiled: bool, *more: str) -> dict[str, Any]:
    """Runs `phalanx train` on one device. Raises SkippedError if the shape does not fit or cannot be
    compiled, if the device has no fp8, or as training."""
    layout, prediction = _room(setting, shape)
    own = (*layout, f"train.compile={str(compiled).lower()}", *more)
    words, began = shapes.training(setting, shape, *own), time.time()
    try:
        rows = commands.train(words, steps=_steps(setting), limit_s=LIMIT_S, env=_environment(setting))
    except CaseError as error:
        if not any(refused in str(error) for refused in ("train.compile=true: ", "has no products in fp8")):
            raise
        raise SkippedError(str(error)) from None
    last = rows[-1]
    figures = _figures([row["step_time_s"] for row in rows], setting, shape, prediction, layout, last["memory"])
    predicted = shapes.predict(setting, shape, *own)["step_time_s"] if shapes.known(setting.name) else None
    peak = last["tflops"] / last["mfu"] if last["mfu"] else None
    command = commands.shown(commands.phalanx("train", *words))
    start = rows[0]["time"] - rows[0]["step_time_s"] - began
    return {**figures, "predicted_step_s": predicted, "peak_tflops": peak, "start_s": start, "command": command}


def loop(setting: Setting, shape: Shape, compiled: bool, module: str, missing: Callable[[], str]) -> dict[str, Any]:
    """Runs a program of benchmarks/gpu that trains the shape in the plain loop."""
    if why := missing():
        raise SkippedError(why)
    layout, prediction = _room(setting, shape)
    if "layout.recompute=full" in layout:
        raise SkippedError("fits with recomputation alone, which the loop does not have")
    words = [*shape.flags, "--batch", str(_batch(layout)), "--steps", str(_steps(setting)), "--device", setting.device]
    argv = commands.program(module, *words, *(["--compile"] if compiled else []))
    said = commands.answer(argv, limit_s=LIMIT_S, env=_environment(setting))
    figures = _figures(said["seconds"], setting, shape, prediction, layout, said["memory"])
    return {**figures, "command": commands.shown(argv)}


CONTENDERS: Mapping[str, tuple[str, str, Callable[[], str]]] = {
    "plain loop": ("GPT", "plain_gpt", str),
    "nanoGPT": ("GPT", "nanogpt", nanogpt.missing),
    "torchtitan's parts": ("llama3-8b", "torchtitan_llama", torchtitan_llama.missing),
}
"""By name, the kind of model that each trains, its program, and why it cannot be measured, empty if it can."""


def _room(setting: Setting, shape: Shape) -> tuple[list[str], dict[str, Any]]:
    fit = shapes.fitting(setting, shape)
    if isinstance(fit, str):
        raise SkippedError(fit)
    return fit


def _batch(layout: Sequence[str]) -> int:
    return next(int(word.split("=")[1]) for word in layout if word.startswith("layout.micro_batch="))


def _steps(setting: Setting) -> int:
    return 3 if setting.quick else WARM_UP + STEPS


def _environment(setting: Setting) -> dict[str, str]:
    return {} if setting.device == "cuda" else CPU_ENVIRONMENT


def _figures(
    seconds: Sequence[float],
    setting: Setting,
    shape: Shape,
    prediction: dict[str, Any],
    layout: Sequence[str],
    memory: int,
) -> dict[str, Any]:
    """Returns the figures of the median step after the warm-up."""
    step = statistics.median(seconds[1 if setting.quick else WARM_UP :])
    return {
        "step_s": step,
        "first_step_s": seconds[0],
        "tokens_per_s": _batch(layout) * shape.seq_len / step,
        "tflops": prediction["model_flops"] / step / 1e12,
        "memory": memory,
        "layout": " ".join(layout),
    }


def table(outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Returns the table. `beside` is the tokens/s of a row over those of Phalanx in bf16 with the same shape."""
    head = ("tokens/s", "beside", "TFLOP/s", "MFU", "step ms", "predicted ms", "peak GiB", "start s", "first step s")
    rows: list[Row] = [("shape and contender", *head, "")]
    peak = next((found["peak_tflops"] for found in outcomes.values() if found.get("peak_tflops")), None)
    for name, found in outcomes.items():
        if why := reason(found):
            rows.append((name, why))
            continue
        mfu = f"{found['tflops'] / peak:.1%}" if peak else ""
        predicted, start = found.get("predicted_step_s"), found.get("start_s")
        shape, end = name.rsplit(", ", 2 if name.endswith(", compiled") else 1)[0], ", compiled" * name.endswith("ed")
        own = outcomes.get(f"{shape}, phalanx{end}", {}).get("tokens_per_s")
        rows.append(
            (
                name,
                f"{found['tokens_per_s']:,.0f}",
                f"{found['tokens_per_s'] / own:.2f}" if own else "",
                f"{found['tflops']:.3g}",
                mfu,
                f"{found['step_s'] * 1e3:.1f}",
                f"{predicted * 1e3:.1f}" if predicted else "",
                f"{found['memory'] / 2**30:.1f}",
                f"{start:.1f}" if start else "",
                f"{found['first_step_s']:.1f}",
                found["layout"].replace("layout.", "").replace("train.", ""),
            )
        )
    return rows


PART = Part("throughput", "Throughput of training on one device", cases, table)
