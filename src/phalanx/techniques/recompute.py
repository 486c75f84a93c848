"""Recomputation: activations that the backward pass computes again instead of keeping them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.config.job import Job
from phalanx.errors import JobError
from phalanx.partition.derived import modes, written
from phalanx.techniques.technique import Problem, Technique


def _problems(job: Job) -> Iterator[Problem]:
    """Yields the problems of recomputation that is stated per layer."""
    layout = job.layout
    if layout.tiles > 1 and "mlp" in (layout.recompute, *re.findall(r"[a-z]+", layout.recompute_cut)):
        yield (
            "layout.recompute_cut" if layout.recompute_cut else "layout.recompute",
            f"mlp would gather the {layout.tiles} tiles of MLPs again and keep them whole; nearest legal: "
            "recompute=products, recompute=full, or tiles=1",
        )
    if not layout.recompute_cut:
        return
    if layout.recompute != "none":
        yield (
            "layout.recompute_cut",
            f"sets recomputation per layer, recompute={layout.recompute} for all layers; nearest legal: "
            "recompute=none, or no recompute_cut",
        )
    try:
        modes(layout.recompute_cut, job.model.n_layers)
    except JobError as error:
        yield from (("layout.recompute_cut", problem) for problem in error.problems)


RECOMPUTE = Technique(
    "activations recomputed in the backward pass",
    "Chen et al. 2016; Korthikanti et al. 2022, section 5",
    is_on=lambda job: written(job.layout) != "none",
    fields=("layout.recompute", "layout.recompute_cut"),
    layout_problems=_problems,
    apply="phalanx.parallel.apply:apply_recompute",
    layouts=(
        "accumulation=2,recompute=full,loss_chunk=24",
        "recompute_cut=1*full+1*selective+1*products+1*none",
        "recompute=0.4,tp=2,sp=true",
    ),
    combined=("recompute=products", "recompute=mlp", "recompute=selective", "recompute=full"),
)
