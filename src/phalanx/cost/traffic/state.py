"""Bytes that a rank sends for its state in a step: gradients that are summed, parameters that are gathered.

With D bytes of parameters on N ranks: DDP 2 D (N-1)/N; ZeRO-1 and ZeRO-2 the same in a reduce-scatter and an
all-gather; ZeRO-3 one more all-gather if parameters are resharded after the forward pass (Rajbhandari et al. 2020,
section 7). This file adds what these leave out: padding, gathers per micro-batch, parameters that are not resharded,
and parameters that several ranks hold. With a second copy inside the node (hpZ) only the first all-gather of a step
goes over all N ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from phalanx.blocks.state import state_messages
from phalanx.config.job import Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.memory.state import WIDTHS
from phalanx.cost.traffic.matrices import Instance, instances_of, matrix_traffic
from phalanx.cost.traffic.parameters import HeldParameter, LayerRun
from phalanx.cost.traffic.passes import RankPasses
from phalanx.cost.traffic.table import Table
from phalanx.optimizers.catalogue import entry_of
from phalanx.optimizers.entry import Granularity
from phalanx.partition.buckets import granular_cut
from phalanx.partition.matrices import ShardRanges
from phalanx.partition.second_copy import is_copied, near_ranks
from phalanx.partition.tensor_slices import PUSH_BYTES, REPLY_BYTES, STOP_MESSAGE_BYTES, in_buckets
from phalanx.partition.wire import Format, sent_as, wire_bytes


@dataclass(frozen=True)
class Spread:
    """The sharding of one rank's state, and the bytes per element in which it is sent."""

    layout: Layout
    width: int
    """Bytes per element of a parameter."""
    gradient_width: int
    """Bytes per element of a gradient while it is summed over data ranks."""
    master_width: int
    """Bytes per element of the optimizer's copy of a parameter."""
    shard_rank: int
    """Index of the rank in dp_shard × cp."""
    tp_rank: int
    granularity: Granularity
    """Where the optimizer lets shards end."""
    serves: bool
    """Whether the rank is of the first replica, which serves parameters with sync=asp."""
    share: float
    """How many parts of a step its replica computes."""

    @classmethod
    def of(
        cls, layout: Layout, precision: str, gradients: str, rank: int, *, optimizer: Optimizer, share: float = 1
    ) -> Spread:
        """Returns the spread of a rank of all of the layout's; `precision` and `gradients` are `train`'s."""
        width = WIDTHS[precision]
        # Half precisions have fp32 master weights.
        widths = width, 4 if gradients == "fp32" else width, max(width, 4)
        place = rank // layout.tp % layout.shard_ranks, rank % layout.tp
        serves = rank // (layout.tp * layout.shard_ranks) % layout.dp_replicate == 0
        return cls(layout, *widths, *place, entry_of(optimizer.name).granularity, serves, share)

    @property
    def shard(self) -> tuple[str, int]:
        """The axis that shards state, and its number of ranks."""
        return "dp_shard" if self.layout.cp == 1 else "dp_shard_cp", self.layout.shard_ranks

    @property
    def replicas(self) -> int:
        """Number of replicas that sum their gradients."""
        return self.layout.dp_replicate if self.layout.independent_replicas == 1 else 1

    def over(self, parameter: HeldParameter) -> tuple[str, int, int]:
        """Returns the axis that shards a parameter's state, its number of ranks, and this rank's index among them."""
        if parameter.expert and self.layout.ep > 1:
            return "edp", self.layout.shard_ranks // self.layout.ep, self.shard_rank // self.layout.ep
        return *self.shard, self.shard_rank

    def near(self, axis: str) -> int:
        """Returns the number of ranks of an axis that keep a second copy of its parameters together; 0 without one."""
        return near_ranks(self.layout, experts=axis == "edp") if is_copied(self.layout) else 0


def state_traffic(runs: Sequence[LayerRun], spread: Spread, work: RankPasses, model: ModelConfig) -> Table:
    """Returns the bytes that a rank with `runs` sends in one step for all of its state."""
    table, layout = Table(), spread.layout
    instances: list[Instance] = []
    if layout.zero == 3 and layout.shard_ranks > 1:
        updated, width = _fsdp(table, runs, spread, work), spread.width
        if spread.granularity == "matrix":
            instances = [_by_rows(layer, parameter, spread) for layer, parameter in instances_of(runs)]
    elif layout.shard_ranks * spread.replicas > 1:
        instances, width = _buckets(table, runs, spread, work), spread.gradient_width
        updated = Counter[HeldParameter]()
        for each in instances:
            updated[each.held] += each.ranges.held(each.rank)
    else:
        updated, width = Counter[HeldParameter](), spread.width
        for run in runs:
            for parameter in run.held:
                updated[parameter] += 0 if parameter.frozen else run.times * parameter.size
        if spread.granularity == "matrix":
            instances = [_by_rows(layer, parameter, spread) for layer, parameter in instances_of(runs)]
    _partials(table, updated, layout, width)
    if spread.granularity == "matrix":
        matrix_traffic(table, instances, model, spread.master_width, layout.tp, spread.tp_rank)
    if layout.sync == "asp":
        every = Table()
        every.take(table, spread.share)
        if spread.serves:
            answered = layout.dp_replicate - spread.share
            every.note("dp_replicate", "send", answered * (REPLY_BYTES + updated.total() * spread.width))
        else:
            every.note("dp_replicate", "send", spread.share * (PUSH_BYTES + updated.total() * spread.gradient_width))
        return every
    if layout.independent_replicas > 1:
        # Every sync_every steps all replicas synchronize and average their optimizers' parameters.
        replicas, share = layout.dp_replicate, 1 / layout.sync_every
        table.add("dp_replicate", "all_gather", replicas * STOP_MESSAGE_BYTES, replicas, share)
        table.add("dp_replicate", "all_reduce", updated.total() * spread.master_width, replicas, share)
    return table


def _by_rows(layer: int, parameter: HeldParameter, spread: Spread) -> Instance:
    """Returns a parameter that FSDP shards, or that is not sharded."""
    axis, ranks, rank = spread.over(parameter)
    return Instance(layer, parameter, axis, ranks, rank, parameter.ranges(ranks))


def _fsdp(table: Table, runs: Sequence[LayerRun], spread: Spread, work: RankPasses) -> Counter[HeldParameter]:
    """Adds FSDP's and HSDP's traffic. Returns, for each parameter, the elements that this rank updates, summed over
    equal layers and tiles."""
    updated, layout = Counter[HeldParameter](), spread.layout
    lost = _mistargeted(runs, layout, work)
    for run in runs:
        again = len(lost & set(run.layers))
        for parameter in run.held:
            axis, ranks, rank = spread.over(parameter)
            ranges = parameter.ranges(ranks)
            gathers = run.times * _gathers(parameter, spread, work, run.full)
            gathers += again if parameter.group in ("block", "experts") else 0
            often = {"gather": run.times, "regather": gathers - run.times}
            if not parameter.frozen:
                often |= {"reduce": run.times * _reductions(parameter, layout, work), "sum": run.times}
            weights, gradients = layout.quantise_weights, layout.quantise_gradients
            formats = sent_as(parameter.shape, weights), sent_as(parameter.shape, gradients)
            _send(table, spread, axis, ranges.each, ranks, formats, **often)
            if parameter.frozen:
                continue
            updated[parameter] += run.times * ranges.held(rank)
    return updated


def _gathers(parameter: HeldParameter, spread: Spread, work: RankPasses, full: bool) -> int:
    """Returns how often FSDP gathers a parameter in a step; `full`: its block is fully recomputed. A pipeline without
    resharding keeps it until the end of the step."""
    layout = spread.layout
    if parameter.group == "around":
        return work.renewals if layout.pp == 1 or layout.reshard else 1
    passes = work.passes[parameter.users[0]]
    if not layout.reshard:
        return passes.forward if layout.pp == 1 else 1
    if parameter.group == "rows":
        return passes.forward
    # Recomputation of a block reshards its tiles once more, except the last one, at which it ends.
    repeated = full and parameter.group == "tile"
    return passes.forward + passes.backward * (2 if repeated else 1)


def _reductions(parameter: HeldParameter, layout: Layout, work: RankPasses) -> int:
    """Returns how often its gradients are reduced. Outside a pipeline's blocks they wait for several stages."""
    if layout.accumulate == "local" or (parameter.group == "around" and layout.pp > 1):
        return 1
    return work.passes[parameter.users[0]].ends


def _mistargeted(runs: Sequence[LayerRun], layout: Layout, work: RankPasses) -> frozenset[int]:
    """Returns the layers that are prefetched once too often: a neighbour in another stage computes last."""
    if len(work.passes) == 1 or not layout.reshard:
        return frozenset()
    of_layer = {layer: work.passes[run.held[0].users[0]] for run in runs for layer in run.layers}
    layers, mistargeted = list(of_layer), set[int]()
    for here, layer in enumerate(layers):
        before = layers[max(0, here - layout.prefetch) : here]
        after = layers[here + 1 : here + 1 + layout.prefetch]
        ahead = [of_layer[other].last_forward for other in before] + [of_layer[other].last_backward for other in after]
        if max(ahead, default=0) > of_layer[layer].last_backward:
            mistargeted.add(layer)
    return frozenset(mistargeted)


def _buckets(table: Table, runs: Sequence[LayerRun], spread: Spread, work: RankPasses) -> list[Instance]:
    """Adds the traffic of DDP, ZeRO-1 and ZeRO-2 over flat buckets. Returns every trained parameter with the ranges
    that ranks update."""
    every = [pair for pair in instances_of(runs) if not pair[1].frozen]
    found: dict[int, Instance] = {}
    together: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[str, int, int]], list[int]] = {}
    for number in reversed(range(len(every))):  # the backward pass reaches the last layers first
        parameter = every[number][1]
        together.setdefault((parameter.users, parameter.holders, spread.over(parameter)), []).append(number)
    for (users, _, over), numbers in together.items():
        axis, ranks, rank = over
        each_pass = spread.layout.accumulate == "sharded" and len(users) == 1 and ranks > 1
        reductions = work.passes[users[0]].ends if each_pass else 1
        least = spread.layout.bucket_mb * 2**20 / spread.width
        sizes = tuple(every[number][1].size for number in numbers)
        for bucket in _filled(sizes, least):
            here = [numbers[n] for n in bucket]
            named = [(every[number][1].name, every[number][1].shape) for number in here]
            starts, share = granular_cut(spread.granularity, [sizes[n] for n in bucket], named, ranks)
            # Replicas sum their shares once, when all gradients are there.
            _send(table, spread, axis, share, ranks, gather=1, reduce=reductions, sum=1)
            for number, start in zip(here, starts, strict=True):
                layer, parameter = every[number]
                ranges = ShardRanges(parameter.size, share, -start)
                found[number] = Instance(layer, parameter, axis, ranks, rank, ranges)
    return [found[number] for number in range(len(every))]


def _send(
    table: Table,
    spread: Spread,
    axis: str,
    share: int,
    ranks: int,
    formats: tuple[Format, Format] = ("none", "none"),
    **often: int,
) -> None:
    """Counts the messages of parameters of which each of `ranks` ranks has `share` elements, gathered and reduced in
    these `formats`, each message as `often` as its purpose (phalanx.blocks.state) says, 0 if it is not named."""
    near, inside = spread.near(axis), "edp_hpz" if axis == "edp" else "hpz"
    where = {
        "shard": (axis, ranks),
        "near": (inside, near),
        "across": (f"{inside}_across", ranks // max(1, near)),
        "replicas": ("dp_replicate", spread.replicas),
    }
    for message in state_messages(
        ranks,
        gathered=wire_bytes(share, formats[0], spread.width),
        reduced=wire_bytes(share, formats[1], spread.gradient_width),
        summed=share * spread.gradient_width,
        near=near,
        coded=spread.layout.quantise_gradients != "none",
    ):
        among, size = where[message.among]
        table.add(among, message.collective, message.size, size, often.get(message.purpose, 0))


@cache
def _filled(sizes: tuple[int, ...], least: float) -> tuple[tuple[int, ...], ...]:
    """Returns the buckets of parameters of these sizes, at least `least` elements in each but the last."""
    return tuple(map(tuple, in_buckets(sizes, least)))


def _partials(table: Table, updated: Counter[HeldParameter], layout: Layout, width: int) -> None:
    """Adds the sums of the gradients of parameters that several ranks hold, each of which has computed a part."""
    for parameter, elements in updated.items():
        if parameter.cut or parameter.summed:
            table.add("tp", "all_reduce", elements * width, parameter.copies)
        table.add("pp", "all_reduce", elements * width, len(parameter.holders))
