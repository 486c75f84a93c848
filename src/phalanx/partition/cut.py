"""Where the layers of a model are cut into pipeline stages: so that the slowest stage is as fast as it can be.

A step of a pipeline takes as long as its slowest stage lets it. The last stage has the head and the loss besides its
layers, so equal numbers of layers are not equal work: with a vocabulary of 50,257 the head of GPT-2 (768 wide) costs as
much as four to five of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.blocks.flops import block_flops_per_token, head_flops_per_token
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.partition.stages import ranges, written_stages

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
StageCost = Callable[[int, Places, Places], Floats]
"""Of a stage, with the layers from the first of these to before the second, by broadcasting."""

ROUNDING = 1e-9
"""Relative difference up to which two costs count as equal: sums of floats differ by their order."""


class LayerCosts(NamedTuple):
    """What a token costs in each part of a model, in any one unit."""

    layers: Sequence[float]
    first: float = 0
    """What the first stage does besides its layers."""
    last: float = 0
    """What the last stage does besides its layers."""


def layer_costs(model: ModelConfig, vocab: int | None = None) -> LayerCosts:
    """Forward FLOPs a token of every block and of the head. The backward pass costs twice that of each.

    The embedding is a look-up, memory traffic without a multiplication, and counts nothing. `vocab` is the tokenizer's
    vocabulary, where the model leaves it open; raises JobError where nothing says it."""
    blocks = [block_flops_per_token(model, layer) for layer in range(model.n_layers)]
    return LayerCosts(blocks, 0, head_flops_per_token(model, vocab))


def stages_of(model: ModelConfig, layout: Layout, stages: int, vocab: int | None = None) -> tuple[range, ...]:
    """The layers of each of `stages` stages: `layout.pp_cut`'s where it is written, else by cost.

    Raises JobError where the model has too few layers, or where pp_cut does not fit the model or the stages."""
    if layout.pp_cut:
        return written_stages(layout.pp_cut, stages, model.n_layers)
    costs = layer_costs(model, vocab)
    return cut(costs.layers, stages, costs.first, costs.last)


def cut(costs: Sequence[float], stages: int, first: float = 0, last: float = 0) -> tuple[range, ...]:
    """Contiguous layers for each stage, at least one, so that the slowest stage costs least.

    `costs` are the layers'; `first` and `last` come on top for the first and the last stage. Of the cuts with that
    slowest stage it is the one with the smallest sum of squares, so that the rest is even too; of those the one with
    the fewest layers in the early stages, which keep the most micro-batches in flight. Dynamic programming over stages
    and layers (the linear partition problem), in stages × (layers - stages)² steps.

    Raises JobError where there are more stages than layers."""
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


def cut_by(cost: StageCost, stages: int, layers: int) -> tuple[range, ...]:
    """The same where a stage costs what `cost` says: infinity where it cannot have these layers. Empty where no cut
    goes."""
    room = layers - stages
    slowest = _best(cost, stages, room, inf, squares=False)[0]
    if slowest == inf:
        return ()
    _, sizes = _best(cost, stages, room, slowest * (1 + ROUNDING), squares=True)
    return ranges(sizes)


def stage_costs(stages: Sequence[range], costs: LayerCosts) -> list[float]:
    """What each stage costs, in the unit of `costs`."""
    found = [sum(costs.layers[layer] for layer in stage) for stage in stages]
    found[0] += costs.first
    found[-1] += costs.last
    return found


def shown(stages: Sequence[range], costs: LayerCosts) -> str:
    """One line for the log: `3 + 5 + 4 + 4 layers, slowest stage 1.07 × the mean`."""
    each = stage_costs(stages, costs)
    slowest = max(each) * len(each) / sum(each)
    return f"{' + '.join(str(len(stage)) for stage in stages)} layers, slowest stage {slowest:.2f} × the mean"


def _best(cost: StageCost, stages: int, room: int, limit: float, squares: bool) -> tuple[float, list[int]]:
    """The smallest maximum of the stages' costs, or of their squares the smallest sum, where no stage costs more than
    `limit`; and the layers of each stage.

    A stage can have `room` layers more than one, so stage s ends after s + 1 to s + 1 + room layers: rows are indexed
    by how many of the room the stages up to s have taken."""
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
        # The fewest to the stages before, among equals.
        choice = np.argmax(value <= best[:, None] * (1 + ROUNDING), axis=1)
        row = value[np.arange(room + 1), choice]
        taken.append(choice)
    sizes, used = [], room
    for choices in reversed(taken):
        sizes.append(int(1 + used - choices[used]))
        used = choices[used]
    return float(row[room]), sizes[::-1]
