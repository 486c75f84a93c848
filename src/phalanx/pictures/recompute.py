"""A picture of recomputation: time of a step against memory of the fullest rank, and memory against layers, for every
mode and for mixtures of two of them over the layers (`phalanx predict JOB --svg FILE --picture recompute`)."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.job import Job
from phalanx.cost.breakdown import subject
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import Mode, RecomputeRun
from phalanx.pictures.canvas import Panel
from phalanx.pictures.canvas import svg as panels

_MIXED: tuple[tuple[Mode, Mode], ...] = (
    ("none", "products"),
    ("none", "full"),
    ("products", "full"),
    ("none", "selective"),
)
"""The modes of a line: of the last layers, and of the first."""
_PLACES = 8
"""Parts into which a line divides the layers."""


def svg(job: Job, spec: StepSpec) -> str:
    """Returns the picture of a job's recomputation, whatever its own is, as an SVG document."""
    layers = spec.model.n_layers
    numbers = sorted({round(layers * place / _PLACES) for place in range(_PLACES + 1)})
    costs: dict[str, list[tuple[float, float]]] = {}
    needs: dict[str, list[tuple[float, float]]] = {}
    for rest, first in _MIXED:
        name = f"{rest} to {first}"
        costs[name], needs[name] = [], []
        for number in numbers:
            runs = [RecomputeRun(number, first), RecomputeRun(layers - number, rest)]
            cut = "+".join(str(run) for run in runs if run.layers)
            found = predict(replace(spec, layout=replace(spec.layout, recompute="none", recompute_cut=cut)))
            memory = found.fullest.peak / 2**30
            costs[name].append((memory, found.step_time_s))
            needs[name].append((number, memory))
    device = spec.cluster.accelerator.memory_gib
    title = subject(job, spec.layout.world) + (f", {device:g} GiB each" if device else "")
    memory = "memory of the fullest rank, GiB"
    ends = {name: line[-1] for name, line in costs.items()}
    return panels(
        title,
        [
            Panel("a line goes from one mode to another", memory, "time of a step, s", costs, ends),
            Panel("first layers with the second mode", "layers", memory, needs),
        ],
    )
