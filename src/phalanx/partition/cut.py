"""Cuts the layers of a model into pipeline stages such that the slowest stage is as fast as possible.

The slowest stage bounds the step of a pipeline. The last stage also has the head and the loss, so equal numbers of
layers are not equal work: with a vocabulary of 50,257 the head of GPT-2 (768 wide) costs as much as four to five of its
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.parameters import block_flops_per_token, head_flops_per_token, projection_flops_per_token
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.partition.derived import ranges, written_stages
from phalanx.schedule import catalogue

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
StageCost = Callable[[int, Places, Places], Floats]
"""The cost of a stage with the layers from `begins` up to `ends`, by broadcasting."""

ROUNDING = 1e-9
"""Relative difference up to which costs count as equal, because sums of floats depend on their order."""


class LayerCosts(NamedTuple):
    """The cost per token of every block, of the first stage's embedding and of the last stage's head, in any unit."""

    layers: Sequence[float]
    first: float = 0
    """Extra cost of the first stage."""
    last: float = 0
    """Extra cost of the last stage."""


@lru_cache(1024)
def layer_costs(model: ModelConfig, vocab: int | None = None) -> LayerCosts:
    """Returns the forward FLOPs per token of every block and of the head, with that of its own of a module for a
    further token; each backward pass costs twice that. The embedding is a look-up without a multiplication and counts
    nothing. `vocab` is the tokenizer's, for a model that leaves it open; raises JobError if neither is set."""
    head = head_flops_per_token(model, vocab)
    blocks = [
        block_flops_per_token(model, layer) + head * kind.predicts for layer, kind in enumerate(block_kinds(model))
    ]
    return LayerCosts(tuple(blocks), projection_flops_per_token(model), head)


def stages_of(model: ModelConfig, layout: Layout, stages: int, vocab: int | None = None) -> tuple[range, ...]:
    """Returns the layers of each of `stages` stages: those of `layout.pp_cut` if it is set, else cut by cost. Raises
    JobError if the model has too few layers, or if pp_cut does not match the model or the stages."""
    if layout.pp_cut:
        return written_stages(layout.pp_cut, stages, model.n_layers, model.together)
    costs = layer_costs(model, vocab)
    own = model.n_layers - model.together
    units = LayerCosts((*costs.layers[:own], sum(costs.layers[own:])), costs.first, costs.last)
    found = _known_cut(tuple(units.layers), stages, units.first, units.last)
    entry = catalogue.SCHEDULES.get(layout.schedule)
    if entry is not None and entry.placement == "V" and stages == 2 * layout.pp:
        found = _evened(found, units)
    *early, last = found
    return *early, range(last.start, model.n_layers)


def cut(costs: Sequence[float], stages: int, first: float = 0, last: float = 0) -> tuple[range, ...]:
    """Returns contiguous layers for each stage, at least one, such that the slowest stage costs least.

    `costs` are per layer; `first` and `last` are added to the first and the last stage. Among equal cuts it returns the
    one with the smallest sum of squares, which is the most even; among those the one with the fewest layers in the
    early stages, which have the most micro-batches in flight. Dynamic programming over stages and layers (the linear
    partition problem) takes stages × (layers - stages)² steps. Raises JobError if there are more stages than layers.
    """
    if stages > len(costs):
        raise JobError(
            f"{stages} stages need at least as many layers, the model has {len(costs)}; nearest legal: {len(costs)} "
            "stages"
        )
    before = np.array(list(accumulate(costs, initial=0)), np.float64)
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last

    def cost(stage: int, begins: Places, ends: Places) -> Floats:
        return before[ends] - before[begins] + extra[stage]

    return cut_by(cost, stages, len(costs))


_known_cut = lru_cache(1024)(cut)


def cut_by(cost: StageCost, stages: int, layers: int) -> tuple[range, ...]:
    """Returns such a cut for stage costs given by the function `cost`, which is infinite for layers that a stage cannot
    hold; empty if no cut is possible."""
    room = layers - stages
    slowest = _best(cost, stages, room, inf, squares=False)[0]
    if slowest == inf:
        return ()
    _, sizes = _best(cost, stages, room, slowest * (1 + ROUNDING), squares=True)
    return ranges(sizes)


@lru_cache(1024)
def _evened(stages: tuple[range, ...], costs: LayerCosts) -> tuple[range, ...]:
    """Returns stages whose slowest rank costs least if rank r holds stages r and -1 - r, with layers of equal cost;
    `stages` where that is no better. A V of 1 + 2 + 2 + 1 layers would have two on one rank and four on the other."""
    ranks, mean = len(stages) // 2, sum(costs.layers) / len(costs.layers)

    def cost(rank: int, begins: Places, ends: Places) -> Floats:
        both = (ends - begins) * mean + (costs.first + costs.last if rank == 0 else 0)
        return np.where(ends - begins < 2, inf, both)

    def slowest(cut: Sequence[range]) -> float:
        each = stage_costs(cut, costs)
        return max(early + late for early, late in zip(each[:ranks], reversed(each), strict=False))

    counts = [len(layers) for layers in cut_by(cost, ranks, len(costs.layers))]
    # The first rank also has the head, in its second stage.
    early = [count - count // 2 if rank == 0 else count // 2 for rank, count in enumerate(counts)]
    late = [count - first for count, first in zip(counts, early, strict=True)]
    evened = ranges([*early, *reversed(late)])
    return evened if counts and slowest(evened) < slowest(stages) * (1 - ROUNDING) else stages


def stage_costs(stages: Sequence[range], costs: LayerCosts) -> list[float]:
    """Returns the cost of each stage, in the unit of `costs`."""
    found = [sum(costs.layers[layer] for layer in stage) for stage in stages]
    found[0] += costs.first
    found[-1] += costs.last
    return found


def describe(stages: Sequence[range], costs: LayerCosts) -> str:
    """Formats a cut for the log: `3 + 5 + 4 + 4 layers, slowest stage 1.07 × the mean`."""
    each = stage_costs(stages, costs)
    slowest = max(each) * len(each) / sum(each)
    return f"{' + '.join(str(len(stage)) for stage in stages)} layers, slowest stage {slowest:.2f} × the mean"


def _best(cost: StageCost, stages: int, room: int, limit: float, squares: bool) -> tuple[float, list[int]]:
    """Returns the smallest maximum of the stages' costs (or, with `squares`, the smallest sum of squares) with no stage
    above `limit`, and the layers of each stage.

    A stage has at most `room` layers more than one, so stage s ends after s + 1 to s + 1 + room layers: rows are
    indexed by how many of the room the stages up to s have taken.
    """
    row = np.full(room + 1, inf)
    row[0] = 0.0
    later = np.triu(np.ones((room + 1, room + 1), bool), 1)
    """By what is used and what was used before: the stages before have more than all."""
    taken: list[NDArray[np.intp]] = []
    for stage in range(stages):
        places = np.arange(stage, stage + room + 1)
        each = np.where(later, inf, cost(stage, places[None, :], np.maximum(places[:, None] + 1, places[None, :])))
        value = row + each * each if squares else np.maximum(row, each)
        value[each > limit] = inf
        best = value.min(axis=1)
        # Among equal cuts, the one with the fewest layers in the stages before.
        choice = np.argmax(value <= best[:, None] * (1 + ROUNDING), axis=1)
        row = value[np.arange(room + 1), choice]
        taken.append(choice)
    sizes, used = [], room
    for choices in reversed(taken):
        sizes.append(int(1 + used - choices[used]))
        used = choices[used]
    return float(row[room]), sizes[::-1]
