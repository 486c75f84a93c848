"""Seconds of the state's collectives, once per step or per block: reducing gradients and gathering parameters; and of
the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from phalanx.blocks.state import PURPOSES, state_messages
from phalanx.config.cluster import Accelerator, Cluster
from phalanx.config.layout import Layout
from phalanx.cost.frameworks.framework import Framework
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.communication import group
from phalanx.cost.time.kernel import rate, stream_seconds
from phalanx.cost.time.link import RankGroup, load, seconds
from phalanx.cost.time.offload_time import HostWork, host_update_seconds, host_work
from phalanx.optimizers.catalogue import OptimizerCosts, entry_of, offloaded_bytes, optimizer_costs, own_width
from phalanx.partition.second_copy import is_copied
from phalanx.partition.tiers import gathers_parameters, is_offloaded
from phalanx.partition.wire import wire_width

GATHERS = ("gather", "regather")
"""The purposes of messages of parameters."""
ENCODED_BYTES, DECODED_BYTES = 37, 21
"""Bytes that move in memory per element: for its code (magnitudes, their maximum, division, rounding, each a pass over
fp32, and the code), and for its number (the code, a product in fp32, the copy)."""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters on a tensor rank, before the data ranks shard them: dense ones, and those of routed experts."""

    dense: int
    experts: int
    trained_dense: int
    """The dense ones that training changes: all, or adapters."""
    trained_experts: int

    @property
    def trained(self) -> int:
        return self.trained_dense + self.trained_experts

    def sent(self, layout: Layout, number: str) -> tuple[int, int]:
        """Returns the numbers, dense and of experts, in messages of parameters or gradients: ZeRO-3 gathers also what
        training leaves as it is."""
        if number == "parameter" and is_zero3(layout):
            return self.dense, self.experts
        return self.trained_dense, self.trained_experts


@dataclass(frozen=True)
class StateSeconds:
    """Seconds of the data-parallel collectives of one rank's parameters, without overlap."""

    gather: float = 0.0
    """Seconds of gathering the parameters once."""
    regather: float = 0.0
    """Seconds of gathering them again in the same step (ZeRO-3): less from a second copy."""
    reduce: float = 0.0
    """Seconds of reducing the gradients once."""
    fetch: float = 0.0
    """Seconds of copying this rank's share of the parameters from the host, before they are gathered."""


@lru_cache(50_000)
def state_seconds(spec: StepSpec, held: ParameterCounts, parts: int = 1) -> StateSeconds:
    """Returns the seconds of gathering and reducing the state of the parameters, in `parts` messages."""
    layout = spec.layout
    widths, device = wire_widths(layout, spec.framework, spec.products, spec.width), spec.cluster.accelerator
    codes = conversion_seconds(device, layout)
    totals = {"gather": 0.0, "regather": 0.0, "reduce": 0.0, "sum": 0.0}
    # Without ep the experts' parameters are in the messages of the rest of their block.
    together = layout.ep == 1
    for number in ("parameter", "gradient"):
        dense, experts = held.sent(layout, number)
        for numbers, among in (
            (dense + together * experts, groups(layout)),
            (0 if together else experts, groups(layout, experts=True)),
        ):
            ranks = among["shard"].ranks
            sizes = {name: numbers / parts / ranks * width for name, width in widths.items()}
            coded = layout.quantise_gradients != "none"
            for message in state_messages(ranks, **sizes, near=near_of(layout, among), coded=coded):
                if (message.purpose in GATHERS) == (number == "parameter"):
                    once = seconds(spec.cluster, message.collective, message.size, among[message.among])
                    totals[message.purpose] += parts * once + numbers * codes[message.purpose]
    fetch = fetch_seconds(spec, *held.sent(layout, "parameter"))
    return StateSeconds(totals["gather"], totals["regather"], totals["reduce"] + totals["sum"], fetch)


def fetch_seconds(spec: StepSpec, dense: float, experts: float) -> float:
    """Returns the seconds of copying this rank's share of some parameters from the host; 0 if they are on the
    device."""
    if not is_offloaded(spec.layout, "parameters"):
        return 0.0
    share = dense / spec.layout.shard_ranks + experts / group(spec.layout, "edp").ranks
    return share * spec.width / (spec.cluster.host.link_gbs * 1e9)


def groups(layout: Layout, *, experts: bool = False) -> dict[str, RankGroup]:
    """Returns the ranks of the state's messages (StateMessage.among), for experts that ep distributes or the rest."""
    shard, near = ("edp", "edp_hpz") if experts else ("shard", "hpz")
    names = {"shard": shard, "near": near, "across": f"{near}_across", "replicas": "summed"}
    return {among: group(layout, name) for among, name in names.items()}


def near_of(layout: Layout, among: Mapping[str, RankGroup]) -> int:
    """Returns how many of these ranks keep a second copy together; 0 without one."""
    return among["near"].ranks if is_copied(layout) else 0


def state_widths(framework: Framework, products: str, width: int) -> dict[str, int]:
    """Returns the bytes per element of a parameter and of a gradient between data ranks."""
    narrow = framework.gathers_narrow and products in ("fp8", "fp4")
    return {"parameter": 1 if narrow else width, "gradient": framework.memory_profile.gradient_bytes or width}


def wire_widths(layout: Layout, framework: Framework, products: str, width: int) -> dict[str, float]:
    """Returns the bytes per element in which parameters are gathered, gradients reduced, and their sums summed over
    replicas."""
    widths = state_widths(framework, products, width)
    gradient = widths["gradient"]
    return {
        "gathered": wire_width(layout.quantise_weights, widths["parameter"]),
        "reduced": wire_width(layout.quantise_gradients, gradient),
        "summed": gradient,
    }


def conversion_seconds(device: Accelerator, layout: Layout) -> dict[str, float]:
    """Returns the seconds per element of making codes and numbers of each other, by the messages' purpose."""
    found: dict[str, float] = dict.fromkeys(PURPOSES, 0.0)
    if layout.quantise_weights != "none":
        found["gather"] = stream_seconds(device, ENCODED_BYTES / layout.shard_ranks + DECODED_BYTES, 0)
        found["regather"] = found["gather"]
    if layout.quantise_gradients != "none":
        # Half of it with each of two messages inside and across nodes, the second of which is short.
        hops = 2 if is_copied(layout) else 1
        found["reduce"] = stream_seconds(device, ENCODED_BYTES + DECODED_BYTES, 0) / hops
    return found


def duplicated_stages_seconds(spec: StepSpec, held: ParameterCounts) -> float:
    """Returns the seconds of summing the gradients of duplicated stages (DualPipe) over their two pipeline ranks, after
    the data ranks have reduced theirs: for the most distant pair."""
    layout, ranks = spec.layout, group(spec.layout, "pp")
    mine = held.trained_dense / layout.shard_ranks + held.trained_experts / group(layout, "edp").ranks
    width = state_widths(spec.framework, spec.products, spec.width)["gradient"]
    return seconds(spec.cluster, "all_reduce", mine * width, RankGroup(2, ranks.stride * (ranks.ranks - 1)))


def synchronization_seconds(spec: StepSpec, held: ParameterCounts) -> float:
    """Returns the seconds per step of replicas that train by themselves, in which nothing computes. They average the
    optimizer's parameters every `layout.sync_every` steps (local SGD, DiLoCo), or each sends its gradients to a server
    and waits for parameters (asynchronous SGD), whose link is taken to be free. 0 if they sum gradients."""
    layout = spec.layout
    if layout.independent_replicas == 1:
        return 0.0
    if layout.sync == "asp":
        widths = state_widths(spec.framework, spec.products, spec.width)["gradient"], spec.width
        server = RankGroup(2, group(layout, "replicate").stride)
        return sum(seconds(spec.cluster, "send", updated_parameters(spec, held) * width, server) for width in widths)
    averaged = updated_parameters(spec, held) * own_width(spec.width)
    return seconds(spec.cluster, "all_reduce", averaged, group(layout, "replicate")) / layout.sync_every


def interference(spec: StepSpec, held: ParameterCounts, messages: int) -> float:
    """Returns the slowdown, minus one, of a product during the state's collectives in `messages` messages."""
    axis = "shard" if spec.layout.shard_ranks > 1 else "summed"
    each = sum(held.sent(spec.layout, "parameter")) * spec.width / messages
    return (spec.framework.interference - 1) * load(spec.cluster, group(spec.layout, axis), each)


def optimizer_seconds(spec: StepSpec, held: ParameterCounts) -> float:
    """Returns the seconds of the optimizer over the parameters that a rank updates, and of clipping."""
    layout, updated = spec.layout, updated_parameters(spec, held)
    clipped = updated if layout.zero > 1 and layout.shard_ranks > 1 else held.trained
    clips = clip_bytes(spec.framework, spec.width)
    return update_seconds(spec.cluster, layout, costs_of(spec), updated, clipped, clips)


def updated_parameters(spec: StepSpec, held: ParameterCounts) -> float:
    """Returns the parameters that a rank updates."""
    return held.trained_dense / spec.layout.shard_ranks + held.trained_experts / group(spec.layout, "edp").ranks


def offloaded_work(spec: StepSpec, held: ParameterCounts, backward: float, update: float) -> HostWork | None:
    """Returns the host's part of a step: gradients that come down beside the last micro-batch's `backward` pass, the
    `update`, and parameters that go up beside it; None without an offloaded optimizer. All times are in seconds."""
    if not is_offloaded(spec.layout, "optimizer"):
        return None
    widths = spec.framework.memory_profile.gradient_bytes or spec.width, spec.width
    stored = spec.framework.memory_profile.parameter_bytes or spec.width
    state = offloaded_bytes(optimizer_costs(spec.optimizer, spec.model, stored).state, stored)
    return host_work(spec, updated_parameters(spec, held), widths, state, backward, update)


def costs_of(spec: StepSpec) -> OptimizerCosts:
    """Returns what the optimizer of a step takes per parameter, without products of whole matrices, which depend on
    their shapes (matrix_time.py)."""
    costs = optimizer_costs(spec.optimizer, spec.model, spec.width)
    return replace(costs, flops=0.0) if entry_of(spec.optimizer.name).needs_whole_matrices else costs


def clip_bytes(framework: Framework, width: int) -> int:
    """Returns the bytes that clipping moves per gradient, of parameters of `width` bytes."""
    return framework.clip_bytes or 2 * state_widths(framework, "", width)["gradient"]


def update_seconds(
    cluster: Cluster, layout: Layout, costs: OptimizerCosts, updated: Any, clipped: Any, clips: int
) -> Any:
    """Returns the seconds of updating `updated` parameters, and of clipping `clipped` gradients of `clips` bytes each:
    numbers or arrays. An offloaded optimizer clips what it updates."""
    device = cluster.accelerator
    if is_offloaded(layout, "optimizer"):
        return host_update_seconds(cluster.host, costs, updated, updated * clips)
    moved = costs.moved_on_cpu if cluster.device == "cpu" else costs.moved
    moving = stream_seconds(device, updated * moved + clipped * clips, 10)
    return moving + updated * costs.flops / rate(device, "fp32") if costs.flops else moving


def summing_seconds(device: Accelerator, framework: Framework, width: int, held: Any, micro_batches: Any) -> Any:
    """Returns the seconds per micro-batch of adding the gradients of `held` parameters to those of the micro-batches
    before, of which the first has none: numbers or arrays."""
    moved = held * state_widths(framework, "", width)["gradient"] * framework.sum_passes
    return stream_seconds(device, moved, 0) * (micro_batches - 1) / micro_batches


def is_zero3(layout: Layout) -> bool:
    return gathers_parameters(layout)
