"""The part of the model on each rank of a pipeline, for time and memory alike. Which rank holds which stages is read
off the schedule (in_flight.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from phalanx.blocks.kinds import BlockKind
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.held import LayerKind, layer_kinds
from phalanx.cost.memory.in_flight import Flight, flights
from phalanx.cost.spec import StepSpec
from phalanx.partition.recompute import written
from phalanx.partition.stages import even, written_stages
from phalanx.partition.tiers import offloaded_layers


@dataclass(frozen=True)
class Content:
    """The part of the model on a pipeline rank, or in one stage, in blocks of each kind."""

    kinds: tuple[tuple[LayerKind, int], ...]
    embedding: bool
    head: bool
    share: float = 1.0
    """Share of the micro-batches that pass each of its stages."""
    swapped: tuple[tuple[LayerKind, int], ...] = ()
    """Those of its blocks whose activations leave the device."""

    @property
    def blocks(self) -> int:
        return sum(number for _, number in self.kinds)

    @property
    def of_kind(self) -> dict[BlockKind, int]:
        """The number of blocks of each kind, whatever they recompute."""
        counts: dict[BlockKind, int] = {}
        for kind, number in self.kinds:
            counts[kind.block] = counts.get(kind.block, 0) + number
        return counts


def contents(spec: StepSpec) -> tuple[Content, ...]:
    """Returns the contents of each pipeline rank."""
    stages, ranks = placed(spec)
    return tuple(_content(spec.model, *_options(spec.layout, stages), stages, rank.held, rank.share) for rank in ranks)


def content_of(spec: StepSpec, stages: Sequence[range], held: Sequence[int]) -> Content:
    """Returns the contents of some of the `stages`, given by their numbers in `held`."""
    return _content(spec.model, *_options(spec.layout, stages), tuple(stages), tuple(held), share=1.0)


def _options(layout: Layout, stages: Sequence[range]) -> tuple[str, tuple[range, ...]]:
    """Returns recomputation as the layout states it, and the layers of each stage whose activations it offloads."""
    return written(layout), tuple(offloaded_layers(layout, stage) for stage in stages)


@lru_cache(10_000)
def _content(
    model: ModelConfig,
    recomputes: str,
    away: tuple[range, ...],
    stages: tuple[range, ...],
    held: tuple[int, ...],
    share: float,
) -> Content:
    every = layer_kinds(model, recomputes)
    kinds, swapped = (
        tuple(sorted(Counter(every[layer] for stage in held for layer in layers[stage]).items()))
        for layers in (stages, away)
    )
    return Content(kinds, 0 in held, len(stages) - 1 in held, share, swapped)


def placed(spec: StepSpec) -> tuple[tuple[range, ...], tuple[Flight, ...]]:
    """Returns the layers of every stage, and the stages and micro-batches in flight of every rank. Raises JobError if
    pp_cut or the schedule does not fit."""
    ranks = flights(spec.layout, spec.batch.accumulation)
    return stages_of_case(spec, ranks[0].stages), ranks


def stages_of_case(spec: StepSpec, stages: int) -> tuple[range, ...]:
    """Returns the layers of each of `stages` stages: `spec.stages`, else those of `layout.pp_cut`, else as even as
    possible. Raises JobError if pp_cut does not fit."""
    return spec.stages or _cut(spec.layout.pp_cut if spec.layout.pp > 1 else "", stages, spec.model.n_layers)


@lru_cache(1024)
def _cut(text: str, stages: int, layers: int) -> tuple[range, ...]:
    return written_stages(text, stages, layers) if text else even(layers, stages)
