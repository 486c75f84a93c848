"""A prediction as text: the lines that a terminal shows, and the document of `--json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config.job import Job
from phalanx.config.model import ModelConfig
from phalanx.config.precision import HALF
from phalanx.config.presets import CATALOGUE
from phalanx.cost.generation_time import generation
from phalanx.cost.prediction import Parts, Prediction
from phalanx.cost.rank_memory import RankMemory
from phalanx.cost.spec import StepSpec
from phalanx.units import counted, gib

_BAR = 40  # characters of all bars of a breakdown together
MOMENTS = {
    "loss": "at the loss",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "generation": "while completions are generated",
}
"""The moments of peak memory (RankMemory.moment) as a message names them."""


def subject(of: StepSpec | Job, devices: int) -> str:
    """Names the model and the machine: "llama3-70b on 64 × h100-80gb (dgx-h100:8)"; a job without a cluster has
    ranks only."""
    model, device, cluster = model_name(of.model), of.cluster.accelerator.name, of.cluster.preset or "own cluster"
    machine = f"{devices:,} × {device} ({cluster})" if device else counted(devices, "rank")
    return f"{model}{'' if model == of.model.preset else ','} on {machine}"


def model_name(model: ModelConfig) -> str:
    """Names a model: its preset, also with another depth or width than its own, or its size."""
    size = f"{counted(model.n_layers, 'layer')}, {model.d_model} wide"
    known = CATALOGUE.get(model.preset)
    if known and (model.n_layers, model.d_model) != (known.model.n_layers, known.model.d_model):
        return f"{model.preset} with {size}"
    return model.preset or size


FASTER = 2.0
"""Factor from which a faster number format of products is named."""


def slow_format(spec: StepSpec) -> str:
    """Says how much faster the devices multiply in a half precision than in the fp32 of `spec`, or returns nothing."""
    device = spec.cluster.accelerator
    name, half = next(((name, peak) for name in HALF if (peak := getattr(device, f"{name}_tflops"))), ("", 0.0))
    if spec.products != "fp32" or half < FASTER * device.fp32_tflops or not name:
        return ""
    at = f" at {device.fp32_tflops:.3g} TFLOP/s" if device.fp32_tflops else ""
    return f"in fp32 a device multiplies{at}, in {name} at {half:.3g}: train.precision={name}"


def completions_line(spec: StepSpec) -> str:
    """Says what is generated per batch of completions, by what rates, and what is not predicted; or nothing."""
    if not (made := generation(spec)):
        return ""
    return (
        f"{made.prompts} prompts of {made.prompt_tokens} tokens × {spec.batch.global_batch // made.prompts} of "
        f"{made.new_tokens} new ones, at most, per batch of {counted(made.updates, 'step')}: prompts "
        f"{duration(made.prompts_s)}, decoding {duration(made.decoding_s)} ({made.texts} texts at once, "
        f"{made.tokens_per_s:,.0f} tokens/s per group of ranks, cache {gib(made.cache)}), scoring "
        f"{duration(made.scoring_s)}; rewards are not predicted"
    )


def time_lines(prediction: Prediction) -> list[str]:
    """Returns where the time of a step goes: one line per part that takes at least a thousandth of it."""
    step = prediction.step_time_s
    return _bars({name: spent for name, spent in prediction.parts.items() if spent > 1e-3 * step}, duration)


def memory_lines(prediction: Prediction) -> list[str]:
    """Returns the peak memory of the fullest rank in one line, then one line per part."""
    fullest = prediction.fullest
    rank = f", pipeline rank {prediction.memory.index(fullest)}" if len(prediction.memory) > 1 else ""
    limit, exceeds = gib(prediction.memory_limit), fullest.needed > prediction.memory_limit
    size = fullest.needed if exceeds else fullest.peak
    whole = f"peak memory {gib(size)} ({MOMENTS[fullest.moment]}{rank}) "
    if exceeds:
        whole += f"exceeds {limit}: does not fit"
    elif prediction.verdict == "tight":
        whole += f"of {limit}: tight, needs {gib(fullest.needed)} and up to {gib(prediction.upper_memory)}"
    else:
        whole += f"of {limit}: fits"
    tiers = [_tier_line(tier, *sizes) for tier, sizes in prediction.tiers.items() if tier != "device"]
    return [whole, *_bars({name: size for name, size in fullest.parts() if size}, gib), *tiers]


def _tier_line(tier: str, most: int, limit: float) -> str:
    """Returns the memory of a tier beside the device in one line."""
    if not limit:
        return f"{tier}: {gib(most)} per device"
    compared, verdict = ("exceeds", "does not fit") if most > limit else ("of", "fits")
    return f"{tier}: {gib(most)} {compared} {gib(limit)} per device: {verdict}"


def duration(seconds: float) -> str:
    """Formats the time of a step to four digits: "13.70 s", "14.2 ms"."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:#.4g} s"


def document(prediction: Prediction) -> dict[str, Any]:
    """Returns the figures of `--json` (docs/guides/predict.md), in seconds, bytes and FLOPs."""
    fullest = prediction.fullest
    low, high = prediction.spread
    least, most = prediction.memory_spread
    return {
        "step_time_s": prediction.step_time_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "tps": prediction.tokens_per_s_per_device,
        "tps_total": prediction.tokens_per_s,
        "tflops_per_device": prediction.tflops_per_device,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "bubble": prediction.bubble,
        "exposed_comm_s": prediction.parts.exposed,
        "time_s": dict(prediction.parts.items()),
        "memory": {**dict(fullest.parts()), "peak": fullest.peak},
        "memory_by_rank": [{**dict(rank.parts()), "peak": rank.peak} for rank in prediction.memory],
        "memory_limit": prediction.memory_limit,
        "memory_by_tier": {
            tier: {"bytes": most, "limit": limit or None} for tier, (most, limit) in prediction.tiers.items()
        },
        "fits": prediction.fits,
        "verdict": prediction.verdict,
        "interval": {
            "step_time_s": [low * prediction.step_time_s, high * prediction.step_time_s],
            "peak": [least * fullest.peak, most * fullest.peak],
            "sure": prediction.sure,
        },
        "model_flops": prediction.model_flops,
        "hardware_flops": prediction.hardware_flops,
        **({"generation": prediction.generation.as_dict()} if prediction.generation else {}),
    }


def _bars(values: dict[str, float], shown: Callable[[float], str]) -> list[str]:
    """Returns one line per value: name, value, share and a bar."""
    whole = sum(values.values())
    return [
        f"  {name:<20} {shown(value):>9}  {value / whole:>4.0%}  {'█' * round(_BAR * value / whole)}".rstrip()
        for name, value in values.items()
    ]


AXES: dict[str, str] = dict.fromkeys(
    ("dp_shard_cp", "edp", "hpz", "edp_hpz", "hpz_across", "edp_hpz_across"), "dp_shard"
)
"""The axis of a prediction for axes of the ledger that it has under another name."""


@dataclass(frozen=True)
class ComparedPart:
    """One part of a step, in seconds or bytes."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if the prediction has none of it."""
        return self.measured / self.predicted if self.predicted else None


def compared(predicted: Parts, measured: Mapping[str, float]) -> list[ComparedPart]:
    """Returns the parts of a step that a prediction or a measurement has, and at the end the whole step.

    `measured` are the parts of a rank's step by name: forward, backward, recompute, "AXIS exposed", "AXIS waiting",
    optimizer, data and other. Waiting along pp is the bubble; that along other axes is for slower ranks. A prediction
    knows neither waiting nor data nor other: its ranks are equal, and its data are there."""
    ours = {
        "forward": predicted.forward,
        "backward": predicted.backward,
        "recompute": predicted.recompute,
        **{f"{axis} exposed": seconds for axis, seconds in predicted.exposed.items()},
        "bubble": predicted.bubble,
        "optimizer": predicted.optimizer,
    }
    theirs: dict[str, float] = {}
    for name, seconds in measured.items():
        axis, _, kind = name.partition(" ")
        waits = "bubble" if axis == "pp" else "waiting"
        known = {"exposed": f"{AXES.get(axis, axis)} exposed", "waiting": waits}.get(kind, name)
        theirs[known] = theirs.get(known, 0.0) + seconds
    order = ["forward", "backward", "recompute"]
    order += sorted(name for name in {**ours, **theirs} if name.endswith(" exposed"))
    order += ["bubble", "waiting", "optimizer", "data", "other"]
    rows = [ComparedPart(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in order]
    rows = [row for row in rows if row.predicted or row.measured]
    return [*rows, ComparedPart("step", predicted.total, sum(theirs.values()))]


def compared_memory(predicted: RankMemory, measured: Mapping[str, int]) -> list[ComparedPart]:
    """Returns the parts of a rank's tensors at the fullest moment, in bytes, and at the end all of them.

    `measured` are the bytes by part: parameters, gradients, optimizer, activations (made in forward passes), backward
    (made in backward passes: gradients, too), communication and other. A prediction has no other."""
    passes = {"gradients", "activations", "logits", "backward"}
    rows = [
        ComparedPart(name, getattr(predicted, name, 0), measured.get(name, 0))
        for name in ("parameters", "optimizer", "communication", "other")
    ]
    ours = sum(size for name, size in predicted.parts() if name in passes)
    theirs = sum(size for name, size in measured.items() if name in passes)
    rows.insert(2, ComparedPart("activations, gradients", ours, theirs))
    rows = [row for row in rows if row.predicted or row.measured]
    return [*rows, ComparedPart("all tensors", predicted.allocated, sum(measured.values()))]
