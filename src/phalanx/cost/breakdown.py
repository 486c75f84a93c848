"""A prediction as text: the lines that a terminal shows, and the document of `--json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.cost.prediction import Prediction
from phalanx.cost.spec import StepSpec
from phalanx.units import gib

_BAR = 40  # characters of all bars of a breakdown together
MOMENTS = {"loss": "at the loss", "backward": "in the backward pass", "optimizer": "in the optimizer step"}
"""The moments of peak memory (RankMemory.moment) as a message names them."""


def subject(spec: StepSpec, devices: int) -> str:
    """Names the model and the machine: "llama3-70b on 64 × h100-80gb (dgx-h100:8)"."""
    machine = f"{devices:,} × {spec.cluster.accelerator.name}"
    return f"{spec.model.preset or 'model'} on {machine} ({spec.cluster.preset or 'own cluster'})"


def time_lines(prediction: Prediction) -> list[str]:
    """Returns where the time of a step goes: one line per part that takes at least a thousandth of it."""
    step = prediction.step_time_s
    return _bars({name: spent for name, spent in prediction.parts.items() if spent > 1e-3 * step}, duration)


def memory_lines(prediction: Prediction) -> list[str]:
    """Returns the peak memory of the fullest rank in one line, then one line per part."""
    fullest = prediction.fullest
    rank = f", pipeline rank {prediction.memory.index(fullest)}" if len(prediction.memory) > 1 else ""
    compared, verdict = ("of", "fits") if prediction.fits else ("exceeds", "does not fit")
    whole = (
        f"peak memory {gib(fullest.peak)} ({MOMENTS[fullest.moment]}{rank}) {compared} {gib(prediction.memory_limit)}: "
        f"{verdict}"
    )
    return [whole, *_bars({name: size for name, size in fullest.parts() if size}, gib)]


def duration(seconds: float) -> str:
    """Formats the time of a step to four digits: "13.70 s", "14.2 ms"."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:#.4g} s"


def document(prediction: Prediction) -> dict[str, Any]:
    """Returns the figures of `--json` (docs/predict.md), in seconds, bytes and FLOPs."""
    fullest = prediction.fullest
    low, high = prediction.spread
    least, most = prediction.memory_spread
    return {
        "step_time_s": prediction.step_time_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "tflops_per_device": prediction.tflops_per_device,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "bubble": prediction.bubble,
        "exposed_comm_s": prediction.parts.exposed,
        "time_s": dict(prediction.parts.items()),
        "memory": {**dict(fullest.parts()), "peak": fullest.peak},
        "memory_by_rank": [{**dict(rank.parts()), "peak": rank.peak} for rank in prediction.memory],
        "memory_limit": prediction.memory_limit,
        "fits": prediction.fits,
        "interval": {
            "step_time_s": [low * prediction.step_time_s, high * prediction.step_time_s],
            "peak": [least * fullest.peak, most * fullest.peak],
        },
        "model_flops": prediction.model_flops,
        "hardware_flops": prediction.hardware_flops,
    }


def _bars(values: dict[str, float], shown: Callable[[float], str]) -> list[str]:
    """Returns one line per value: name, value, share and a bar."""
    whole = sum(values.values())
    return [
        f"  {name:<20} {shown(value):>9}  {value / whole:>4.0%}  {'█' * round(_BAR * value / whole)}".rstrip()
        for name, value in values.items()
    ]
