"""Seconds of the state's collectives, once per step or per block: reducing gradients and gathering parameters; and of
the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from phalanx.blocks.state import state_messages
from phalanx.config.cluster import Accelerator
from phalanx.config.layout import Layout
from phalanx.cost.frameworks.framework import Framework
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.communication import group
from phalanx.cost.time.kernel import rate, stream_seconds
from phalanx.cost.time.link import RankGroup, load, seconds
from phalanx.optimizers.catalogue import entry_of
from phalanx.optimizers.facts import OptimizerCosts, optimizer_costs

CLIP_BYTES = 8
"""Bytes that clipping moves per gradient: the norm reads it, and it is set to zero after the step."""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters on a tensor rank, before the data ranks shard them: dense ones, and those of routed experts."""

    dense: int
    experts: int = 0


@dataclass(frozen=True)
class StateSeconds:
    """Seconds of the data-parallel collectives of one rank's parameters, without overlap."""

    gather: float = 0.0
    """Seconds of gathering the parameters once."""
    reduce: float = 0.0
    """Seconds of reducing the gradients once."""


@lru_cache(50_000)
def state_seconds(spec: StepSpec, held: ParameterCounts, parts: int = 1) -> StateSeconds:
    """Returns the seconds of gathering and reducing the state of the parameters, in `parts` messages."""
    layout, widths = spec.layout, state_widths(spec.framework, spec.products, spec.width)
    totals, replicas = {"parameter": 0.0, "gradient": 0.0}, group(layout, "replicate")
    # Without ep the experts' parameters are in the messages of the rest of their block.
    together = layout.ep == 1
    for numbers, shard in (
        (held.dense + together * held.experts, group(layout, "shard")),
        (0 if together else held.experts, group(layout, "edp")),
    ):
        for message in state_messages(numbers / parts / shard.ranks, shard.ranks):
            among = shard if message.among == "shard" else replicas
            payload = message.elements * widths[message.number]
            totals[message.number] += parts * seconds(spec.cluster, message.collective, payload, among)
    return StateSeconds(totals["parameter"], totals["gradient"])


def state_widths(framework: Framework, products: str, width: int) -> dict[str, int]:
    """Returns the bytes per element of a parameter and of a gradient between data ranks."""
    narrow = framework.gathers_narrow and products in ("fp8", "fp4")
    return {"parameter": 1 if narrow else width, "gradient": framework.memory_profile.gradient_bytes or width}


def duplicated_stages_seconds(spec: StepSpec, held: ParameterCounts) -> float:
    """Returns the seconds of summing the gradients of duplicated stages (DualPipe) over their two pipeline ranks, after
    the data ranks have reduced theirs: for the most distant pair."""
    layout, ranks = spec.layout, group(spec.layout, "pp")
    mine = held.dense / layout.shard_ranks + held.experts / group(layout, "edp").ranks
    width = state_widths(spec.framework, spec.products, spec.width)["gradient"]
    return seconds(spec.cluster, "all_reduce", mine * width, RankGroup(2, ranks.stride * (ranks.ranks - 1)))


def interference(spec: StepSpec, held: ParameterCounts, messages: int) -> float:
    """Returns the slowdown, minus one, of a product during the state's collectives in `messages` messages."""
    axis = "shard" if spec.layout.shard_ranks > 1 else "replicate"
    each = (held.dense + held.experts) * spec.width / messages
    return (spec.framework.interference - 1) * load(spec.cluster, group(spec.layout, axis), each)


def optimizer_seconds(spec: StepSpec, held: ParameterCounts) -> float:
    """Returns the seconds of the optimizer over the parameters that a rank updates, and of clipping."""
    layout = spec.layout
    updated = held.dense / layout.shard_ranks + held.experts / group(layout, "edp").ranks
    clipped = updated if layout.zero > 1 and layout.shard_ranks > 1 else held.dense + held.experts
    return update_seconds(spec.cluster.accelerator, costs_of(spec), updated, clipped)


def costs_of(spec: StepSpec) -> OptimizerCosts:
    """Returns what the optimizer of a step takes per parameter, without products of whole matrices, which depend on
    their shapes (matrix_time.py)."""
    costs = optimizer_costs(spec.optimizer, spec.model, spec.width)
    return replace(costs, flops=0.0) if entry_of(spec.optimizer.name).needs_whole_matrices else costs


def update_seconds(device: Accelerator, costs: OptimizerCosts, updated: Any, clipped: Any) -> Any:
    """Returns the seconds of updating `updated` parameters, and of clipping `clipped` gradients: numbers or arrays."""
    moving = stream_seconds(device, updated * costs.moved + clipped * CLIP_BYTES, 10)
    return moving + updated * costs.flops / rate(device, "fp32") if costs.flops else moving


def summing_seconds(device: Accelerator, framework: Framework, width: int, held: Any, micro_batches: Any) -> Any:
    """Returns the seconds per micro-batch of adding the gradients of `held` parameters to those of the micro-batches
    before, of which the first has none: numbers or arrays."""
    moved = held * state_widths(framework, "", width)["gradient"] * framework.sum_passes
    return stream_seconds(device, moved, 0) * (micro_batches - 1) / micro_batches


def is_zero3(layout: Layout) -> bool:
    return layout.shard_ranks > 1 and layout.zero == 3
