"""Cases for the tests of the simulation, from one line each."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.clusters import cluster_of
from phalanx.config.layout_line import parse
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.job_spec import stages
from phalanx.cost.spec import Framework, StepSpec
from phalanx.partition import derived as batch


def spec(
    line: str,
    accumulation: int,
    model: str = "llama3-70b",
    cluster: str = "dgx-h100:8",
    framework: Framework = PHALANX,
) -> StepSpec:
    """A layout with so many micro-batches of one sequence, cut as `phalanx train` cuts it."""
    shape = replace(PRESETS[model], vocab_size=PRESETS[model].vocab_size or 256)
    layout = replace(parse(line), micro_batch=1, accumulation=accumulation)
    solved = batch.solve(accumulation * layout.data_ranks, layout)
    return StepSpec(shape, cluster_of(cluster), layout, solved, "bf16", 2, framework, stages(shape, layout))
