"""The layers of every stage of a case's pipeline, for time and memory alike; which rank holds which stages is said by
in_flight.py."""

from __future__ import annotations

from functools import lru_cache

from phalanx.cost.case import Case
from phalanx.cost.in_flight import Flight, flights
from phalanx.job.stages import even, written_stages


def placed(case: Case) -> tuple[tuple[range, ...], tuple[Flight, ...]]:
    """The layers of every stage, and what every rank holds of the stages: `case.stages`, else those of
    `layout.pp_cut`, else as even as can be. Raises JobError where pp_cut or the schedule do not fit."""
    layout = case.layout
    ranks = flights(layout, case.batch.accumulation)
    return case.stages or _cut(layout.pp_cut, ranks[0].stages, case.model.n_layers), ranks


@lru_cache(1024)
def _cut(text: str, stages: int, layers: int) -> tuple[range, ...]:
    return written_stages(text, stages, layers) if text else even(layers, stages)
