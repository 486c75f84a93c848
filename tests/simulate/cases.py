"""Cases for the tests of the simulation, from one line each."""

from __future__ import annotations

from dataclasses import replace

from phalanx.cost.case import Case
from phalanx.cost.programs import PHALANX
from phalanx.cost.software import Software
from phalanx.job import batch
from phalanx.job.clusters import cluster_of
from phalanx.job.layout_line import parse
from phalanx.job.presets import PRESETS
from phalanx.plan.case import stages


def case(
    line: str,
    accumulation: int,
    model: str = "llama3-70b",
    cluster: str = "dgx-h100:8",
    software: Software = PHALANX,
) -> Case:
    """A layout with so many micro-batches of one sequence, cut as `phalanx train` cuts it."""
    shape = replace(PRESETS[model], vocab_size=PRESETS[model].vocab_size or 256)
    layout = replace(parse(line), micro_batch=1, accumulation=accumulation)
    solved = batch.solve(accumulation * layout.data_ranks, layout)
    return Case(shape, cluster_of(cluster), layout, solved, "bf16", 2, software, stages(shape, layout))
