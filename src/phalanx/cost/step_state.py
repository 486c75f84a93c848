"""Seconds of what a step does with its state: collectives that reduce gradients and gather parameters, once per step or
per block; the optimizer; and copies of what lies in host memory or in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

from phalanx.axes.catalogue import agreement
from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.parameters import block_weights
from phalanx.config.cluster import Accelerator, Cluster, HostShare
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.communication import PURPOSES, RankGroup, group, load, seconds, state_messages
from phalanx.cost.compression import compressed
from phalanx.cost.exposed import added, larger
from phalanx.cost.held import Content, LayerKind, ParameterCounts
from phalanx.cost.kernels import rate, stream_seconds
from phalanx.cost.matrices import matrix_seconds
from phalanx.cost.rank_memory import StepParts
from phalanx.cost.spec import Framework, StepSpec
from phalanx.errors import JobError
from phalanx.optimizers.catalogue import OptimizerCosts, entry_of, optimizer_costs, own_width
from phalanx.partition import derived

PARTS = 16
"""Parts in which parameters are updated and go up, of a large model: the last one's copy is not hidden."""


def require_host(cluster: Cluster, layout: Layout) -> None:
    """Raises JobError if a layout offloads and a figure of the host that its prediction needs is not known."""
    missing = [name for name in derived.figures(layout) if not getattr(cluster.host, name)]
    if missing:
        fields = " and ".join(f"cluster.host.{name}" for name in missing)
        part = "the disks of the devices' host" if missing == ["disk_gbs"] else "the devices' host"
        raise JobError(
            f"cluster: layout.offload={layout.offload} uses {part}, about which nothing is known; set {fields}, name "
            "a machine that is known, such as cluster=dgx-h100, or measure this one with `phalanx bench compute` and "
            "say cluster=local"
        )


def host_update_seconds(host: HostShare, costs: OptimizerCosts, updated: Any, clipped: Any) -> Any:
    """Returns the seconds in which a device's share of the host updates `updated` parameters, and clips gradients that
    have `clipped` bytes to be read: numbers or arrays."""
    return (updated * costs.moved_on_cpu + clipped) / (host.update_gbs * 1e9)


@dataclass(frozen=True)
class HostWork:
    """Seconds of an offloaded optimizer beside the device: two copy engines and the host's processors."""

    down: float
    """Copying gradients to the host."""
    update: float
    up: float
    """Copying parameters to the device."""
    backward: float
    """The last micro-batch's backward pass, which makes the gradients of `blocks` blocks one after the other."""
    blocks: int
    files: float = 0.0
    """Reading and writing state in files, in `buffers` parts."""
    buffers: int = 1

    @property
    def late(self) -> tuple[float, float]:
        """The seconds by which gradients arrive after the backward pass, and parameters after the update."""
        return _excess(self.down, self.backward, self.blocks), _excess(self.up, self.updating, PARTS)

    @property
    def late_files(self) -> float:
        """The seconds that files add to the update: the first part is read before it, the last written after it."""
        return _excess(self.files, self.update, self.buffers)

    @property
    def updating(self) -> float:
        """The seconds of the update, with those of files beside it."""
        return self.update + self.late_files

    def copies_down(self) -> list[tuple[float, float]]:
        """Returns start and seconds of each copy of gradients, from the start of the backward pass on."""
        return _one_by_one(self.down, self.backward, self.blocks)

    def copies_up(self) -> list[tuple[float, float]]:
        """Returns start and seconds of each copy of parameters, from the start of the update on."""
        return _one_by_one(self.up, self.updating, PARTS)


def host_work(
    spec: StepSpec, updated: float, widths: tuple[int, int], state: float, backward: float, update: float
) -> HostWork:
    """Returns the work of an offloaded optimizer.

    Args:
        updated: parameters that the rank updates.
        widths: bytes of a gradient and of a parameter.
        state: bytes of the optimizer's state per parameter.
        backward: seconds of the last micro-batch's backward pass, beside which gradients come down.
        update: seconds of the host's update, beside which parameters go up.
    """
    rate = spec.cluster.host.link_gbs * 1e9
    down, up = (updated * width / rate for width in widths)
    if derived.is_offloaded(spec.layout, "parameters"):
        up = 0.0  # they go up when they are gathered
    files = 0.0
    if derived.tier_of(spec.layout, "optimizer") == "disk":
        files = 2 * updated * state / (spec.cluster.host.disk_gbs * 1e9)
    parts = max(1, ceil(updated * state / derived.BUFFER_BYTES))
    return HostWork(down, update, up, backward, max(2, spec.model.n_layers // spec.layout.pp), files, parts)


def _one_by_one(copies: float, work: float, parts: int) -> list[tuple[float, float]]:
    """Returns start and seconds of copies in equal parts, each as soon as `work` has made it and the one before is
    through: they end `_excess` seconds after the work."""
    found, free = list[tuple[float, float]](), 0.0
    for part in range(parts):
        start = larger(free, work * (part + 1) / parts)
        found.append((start, copies / parts))
        free = start + copies / parts
    return found


def exposed_swaps(spec: StepSpec, kind: LayerKind, forward: float, backward: float) -> tuple[float, float]:
    """Returns the seconds that copies of a block's activations add to the passes of a micro-batch, which take `forward`
    and `backward` seconds in an equal block beside it. A CPU copies with the cores that compute."""
    copied = _parts_of(spec).kinds[kind].kept / (spec.cluster.host.link_gbs * 1e9)
    slowdown = 1.0 if spec.cluster.accelerator.host_us else 0.0
    return added(copied, forward, slowdown), added(copied, backward, slowdown)


@lru_cache(1024)
def _parts_of(spec: StepSpec) -> StepParts:
    return StepParts(spec)


def _excess(copies: float, work: float, parts: int) -> float:
    """Returns the seconds by which copies in equal parts outlast the work that makes these one after the other."""
    return larger(copies - work * (1 - 1 / parts), copies / parts)


ENDS = 3
"""Tensors outside the blocks: embedding, last norm, head."""
GATHERS = ("gather", "regather")
"""The purposes of messages of parameters."""
ENCODED_BYTES, DECODED_BYTES = 37, 21
"""Bytes that move in memory per element: for its code (magnitudes, their maximum, division, rounding, each a pass over
fp32, and the code), and for its number (the code, a product in fp32, the copy)."""
LOW_RANK_BYTES = 76
"""Those of PowerSGD: a gradient with its error is made twice (12 bytes each) and read by two thin products (4 each),
and what the projection leaves is subtracted (12) and kept (12); then the sum is made (4) and copied (8), with its
casts (8). The products' FLOPs, 8 x rank per element, are hidden by these."""
FP8_ENCODED_BYTES, FP8_DECODED_BYTES = 9, 7
"""Those in fp8: its row's maximum, the product with the scale, the cast; and the cast back, the product."""


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
    late: float = 0.0
    """Seconds of sums over replicas that follow the backward pass."""


@lru_cache(50_000)
def state_seconds(spec: StepSpec, held: ParameterCounts, parts: int = 1) -> StateSeconds:
    """Returns the seconds of gathering and reducing the state of the parameters, in `parts` messages."""
    layout = spec.layout
    if spec.framework.broadcasts and not derived.gathers_parameters(layout):
        return _owned_seconds(spec, held, parts)
    widths = wire_widths(layout, spec.framework, spec.products, spec.width, spec.model)
    device = spec.cluster.accelerator
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
    # Late sums follow the backward pass (synchronization_seconds).
    beside = 0.0 if sums_late(spec) else totals["sum"]
    return StateSeconds(totals["gather"], totals["regather"], totals["reduce"] + beside, fetch, totals["sum"] - beside)


def sums_late(spec: StepSpec) -> bool:
    """Returns whether replicas sum their gradients after the backward pass."""
    layout = spec.layout
    of_shards = layout.shard_ranks > 1 or derived.gathers_parameters(layout)
    return spec.framework.sums_late or (layout.compression != "none" and of_shards)


def _owned_seconds(spec: StepSpec, held: ParameterCounts, parts: int) -> StateSeconds:
    """Returns the seconds of gradients that all data ranks sum, and of broadcasts by the owners of whole tensors: a
    broadcast passes all ranks one after the other, so that many owners cost more than their bytes."""
    layout, ranks = spec.layout, group(spec.layout, "shard")
    widths = state_widths(spec.framework, spec.products, spec.width)
    tensors = sum(
        not weight.name.endswith(("wk.weight", "wv.weight"))  # those programs have one matrix for all three
        for kind in block_kinds(spec.model)
        for weight in block_weights(spec.model, kind)
    )
    owners = min(ranks.ranks, ceil(tensors / layout.pp) + ENDS)
    own = sum(held.sent(layout, "parameter")) * widths["parameter"] / owners
    summed = sum(held.sent(layout, "gradient")) * widths["gradient"] / parts
    everyone = RankGroup(ranks.ranks * layout.summed_replicas, ranks.stride)
    return StateSeconds(
        gather=owners * seconds(spec.cluster, "broadcast", own, ranks),
        reduce=parts * seconds(spec.cluster, "all_reduce", summed, everyone),
    )


def fetch_seconds(spec: StepSpec, dense: float, experts: float) -> float:
    """Returns the seconds of copying this rank's share of some parameters from the host; 0 if they are on the
    device."""
    if not derived.is_offloaded(spec.layout, "parameters"):
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
    return among["near"].ranks if derived.is_copied(layout) else 0


def state_widths(framework: Framework, products: str, width: int) -> dict[str, int]:
    """Returns the bytes per element of a parameter and of a gradient between data ranks."""
    narrow = framework.gathers_narrow and products in ("fp8", "fp4")
    return {"parameter": 1 if narrow else width, "gradient": framework.memory_profile.gradient_bytes or width}


def wire_widths(
    layout: Layout, framework: Framework, products: str, width: int, model: ModelConfig
) -> dict[str, float]:
    """Returns the bytes per element in which parameters are gathered, gradients reduced, and their sums summed over
    replicas."""
    widths = state_widths(framework, products, width)
    gradient = widths["gradient"]
    sent = 1.0 if layout.compression == "none" else compressed(model, layout, gradient).sent
    return {
        "gathered": derived.wire_width(layout.quantise_weights, widths["parameter"]),
        "reduced": derived.wire_width(layout.quantise_gradients, gradient),
        "summed": ((framework.sums_late and framework.memory_profile.parameter_bytes) or gradient) * sent,
    }


def conversion_seconds(device: Accelerator, layout: Layout) -> dict[str, float]:
    """Returns the seconds per element of making codes and numbers of each other, by the messages' purpose."""
    found: dict[str, float] = dict.fromkeys(PURPOSES, 0.0)
    if layout.quantise_weights != "none":
        narrow = layout.quantise_weights == "fp8"
        there, back = (FP8_ENCODED_BYTES, FP8_DECODED_BYTES) if narrow else (ENCODED_BYTES, DECODED_BYTES)
        found["gather"] = stream_seconds(device, there / layout.shard_ranks + back, 0)
        found["regather"] = found["gather"]
    if layout.quantise_gradients != "none":
        # Half of it with each of two messages inside and across nodes, the second of which is short.
        hops = 2 if derived.is_copied(layout) else 1
        found["reduce"] = stream_seconds(device, ENCODED_BYTES + DECODED_BYTES, 0) / hops
    if layout.compression != "none" and layout.summed_replicas > 1:
        moved = LOW_RANK_BYTES
        if layout.compression != "powersgd":  # all are sent, and come; a share is summed, and sent again
            moved = ENCODED_BYTES + 2 * DECODED_BYTES + ENCODED_BYTES / layout.summed_replicas
        found["sum"] = stream_seconds(device, moved, 0) / layout.shard_ranks
    return found


def duplicated_stages_seconds(spec: StepSpec, held: ParameterCounts) -> float:
    """Returns the seconds of summing the gradients of duplicated stages (DualPipe) over their two pipeline ranks, after
    the data ranks have reduced theirs: for the most distant pair."""
    ranks = group(spec.layout, "pp")
    mine = updated_parameters(spec, held)
    width = state_widths(spec.framework, spec.products, spec.width)["gradient"]
    return seconds(spec.cluster, "all_reduce", mine * width, RankGroup(2, ranks.stride * (ranks.ranks - 1)))


def synchronization_seconds(spec: StepSpec, held: ParameterCounts) -> float:
    """Returns the seconds per step of replicas that train by themselves, in which nothing computes. They average the
    optimizer's parameters every `layout.sync_every` steps (local SGD, DiLoCo), or each sends its gradients to a server
    and waits for parameters (asynchronous SGD), whose link is taken to be free. If they sum gradients, what follows
    the backward pass: compressed sums of shards."""
    layout = spec.layout
    if layout.independent_replicas == 1:
        return state_seconds(spec, held).late if sums_late(spec) else 0.0
    if layout.sync == "asp":
        widths = state_widths(spec.framework, spec.products, spec.width)["gradient"], spec.width
        server = RankGroup(2, group(layout, "replicate").stride)
        return sum(seconds(spec.cluster, "send", updated_parameters(spec, held) * width, server) for width in widths)
    averaged = updated_parameters(spec, held) * own_width(spec.width)
    share, messages = agreement(layout)
    each = (seconds(spec.cluster, collective, n * averaged, group(layout, "independent")) for collective, n in messages)
    return share * sum(each)


def interference(spec: StepSpec, held: ParameterCounts, messages: int) -> float:
    """Returns the slowdown, minus one, of a product during the state's collectives in `messages` messages."""
    axis = "shard" if spec.layout.shard_ranks > 1 else "summed"
    each = sum(held.sent(spec.layout, "parameter")) * spec.width / messages
    return (spec.framework.interference - 1) * load(spec.cluster, group(spec.layout, axis), each)


def optimizer_seconds(spec: StepSpec, held: ParameterCounts, content: Content) -> float:
    """Returns the seconds of the optimizer over the parameters that a rank with `content` updates, and of clipping."""
    layout, updated = spec.layout, updated_parameters(spec, held)
    clipped = updated if layout.zero > 1 and layout.shard_ranks > 1 else held.trained
    clips = clip_bytes(spec.framework, spec.width)
    seconds = update_seconds(spec.cluster, layout, costs_of(spec), updated, clipped, clips)
    return (seconds + matrix_seconds(spec, content)) * (spec.batch.accumulation if derived.stashes(layout) else 1)


def updated_parameters(spec: StepSpec, held: ParameterCounts) -> float:
    """Returns the parameters that a rank updates."""
    return held.trained_dense / spec.layout.shard_ranks + held.trained_experts / group(spec.layout, "edp").ranks


def offloaded_work(spec: StepSpec, held: ParameterCounts, backward: float, update: float) -> HostWork | None:
    """Returns the host's part of a step: gradients that come down beside the last micro-batch's `backward` pass, the
    `update`, and parameters that go up beside it; None without an offloaded optimizer. All times are in seconds."""
    if not derived.is_offloaded(spec.layout, "optimizer"):
        return None
    widths = spec.framework.memory_profile.gradient_bytes or spec.width, spec.width
    stored = spec.framework.memory_profile.parameter_bytes or spec.width
    costs = optimizer_costs(spec.optimizer, spec.model, stored)
    state = costs.state + costs.copied
    return host_work(spec, updated_parameters(spec, held), widths, state, backward, update)


def costs_of(spec: StepSpec) -> OptimizerCosts:
    """Returns what the optimizer of a step takes per parameter, without products of whole matrices, which depend on
    their shapes (matrices.py)."""
    costs = optimizer_costs(spec.optimizer, spec.model, spec.width, spec.more)
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
    if derived.is_offloaded(layout, "optimizer"):
        return host_update_seconds(cluster.host, costs, updated, updated * clips)
    moved = costs.moved_on_cpu if cluster.device == "cpu" else costs.moved
    moving = stream_seconds(device, updated * moved + clipped * clips, 10)
    return moving + updated * costs.flops / rate(device, "fp32") if costs.flops else moving


def summing_seconds(device: Accelerator, framework: Framework, width: int, held: Any, micro_batches: Any) -> Any:
    """Returns the seconds per micro-batch of adding the gradients of `held` parameters to those of the micro-batches
    before, of which the first has none: numbers or arrays."""
    moved = held * state_widths(framework, "", width)["gradient"] * framework.sum_passes
    return stream_seconds(device, moved, 0) * (micro_batches - 1) / micro_batches
