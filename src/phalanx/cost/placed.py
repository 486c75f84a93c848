"""What each rank of a case's pipeline has of the model, for time and memory alike. Which rank holds which stages
is read off the schedule (in_flight.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from phalanx.cost.case import Case
from phalanx.cost.held import BlockKind, block_kinds
from phalanx.cost.in_flight import Flight, flights
from phalanx.job.model import Model
from phalanx.job.recompute import written
from phalanx.job.stages import even, written_stages


@dataclass(frozen=True)
class Content:
    """What a pipeline rank, or one stage, has of the model, in blocks of each kind."""

    kinds: tuple[tuple[BlockKind, int], ...]
    embedding: bool
    head: bool
    share: float = 1.0
    """Of the micro-batches, those that pass each of its stages."""

    @property
    def blocks(self) -> int:
        return sum(many for _, many in self.kinds)

    @property
    def moe(self) -> int:
        """Blocks with experts."""
        return sum(many for kind, many in self.kinds if kind.experts)

    @property
    def dense(self) -> int:
        return self.blocks - self.moe


def contents(case: Case) -> tuple[Content, ...]:
    """What each pipeline rank has."""
    stages, ranks = placed(case)
    recomputes = written(case.layout)
    return tuple(_content(case.model, recomputes, stages, rank.held, rank.share) for rank in ranks)


def content_of(case: Case, stages: Sequence[range], held: Sequence[int], share: float = 1.0) -> Content:
    """What is in some of the `stages` by their numbers."""
    return _content(case.model, written(case.layout), tuple(stages), tuple(held), share)


@lru_cache(10_000)
def _content(model: Model, recomputes: str, stages: tuple[range, ...], held: tuple[int, ...], share: float) -> Content:
    every = block_kinds(model, recomputes)
    kinds = Counter(every[layer] for stage in held for layer in stages[stage])
    return Content(tuple(sorted(kinds.items())), 0 in held, len(stages) - 1 in held, share)


def placed(case: Case) -> tuple[tuple[range, ...], tuple[Flight, ...]]:
    """The layers of every stage, and what every rank holds of the stages. Raises JobError where pp_cut or the schedule
    do not fit."""
    ranks = flights(case.layout, case.batch.accumulation)
    return stages_of_case(case, ranks[0].stages), ranks


def stages_of_case(case: Case, stages: int) -> tuple[range, ...]:
    """The layers of each of so many stages: `case.stages`, else those of `layout.pp_cut`, else as even as can be.
    Raises JobError where pp_cut does not fit."""
    return case.stages or _cut(case.layout.pp_cut if case.layout.pp > 1 else "", stages, case.model.n_layers)


@lru_cache(1024)
def _cut(text: str, stages: int, layers: int) -> tuple[range, ...]:
    return written_stages(text, stages, layers) if text else even(layers, stages)
