"""Seconds and bytes of messages: of a collective over the links between the ranks of its group, of the operators'
messages (the table of phalanx.blocks), and of those that carry parameters and gradients.

alpha-beta: each message costs a latency and its bytes over the bandwidth (Thakur et al. 2005, section 2). Ranks on one
node communicate over `intra`, others over `inter`; a group uses one network card per rank on a node. NCCL's choice
(src/graph/tuning.cc): rings for large tensors, trees for small ones, and reduction in the switch if it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, log2
from typing import Any, Literal, NamedTuple, get_args

from phalanx.blocks.operator import Collective, Message, Operator, Place, place_of
from phalanx.blocks.residual import boundary
from phalanx.config.cluster import Cluster, Link
from phalanx.config.layout import Layout, Recompute
from phalanx.cost.exposed import quotient, smaller
from phalanx.cost.kernels import stream_seconds
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import gathers_parameters, near_ranks
from phalanx.partition.document_sample import document_work


def sent_bytes(collective: Collective, payload: float, ranks: int) -> float:
    """Returns the bytes that each of `ranks` ranks sends for a collective over a tensor of `payload` bytes.

    `payload` is the whole tensor: an all-gather's output, a reduce-scatter's input. An all-reduce is a reduce-scatter
    and an all-gather: 2 D (P-1)/P (Thakur et al. 2005, sections 4.2 and 4.5); a broadcast counts as a scatter and an
    all-gather, on average over the ranks. `send` is one message, counted by its sender.
    """
    if collective == "send":
        return payload
    passes = 2 if collective in ("all_reduce", "broadcast") else 1
    return passes * payload * (ranks - 1) / ranks


START_US = 20.0
"""Microseconds before the first byte of a collective moves: its kernel, and the synchronization of the ranks (NCCL's 1
MB all-reduce on two A100 takes 45 us, of which 5 are for the bytes: vTrain's tables)."""
INTRA_STEP = 0.65
"""Latency of a step of a ring inside a node relative to that of a single message: chunks are pipelined."""
INTER_STEP = 1.4
"""Latency of a step of a ring across nodes relative to a message over the network: all steps wait for the slowest, and
a rank's part is too small to be pipelined in chunks. An all-gather of 2 GB over 32 nodes of eight H100, where large
tensors reach 340 GB/s, reached 200: 17 us for each of 255 steps (NVIDIA/nccl, issue 1218)."""
MAX_CARDS = 8
"""Most devices over whose cards one tensor travels (NCCL: one channel per card)."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate: their number, and the stride between neighbours in ranks of the whole world."""

    ranks: int
    stride: int = 1

    def near(self, domain: int) -> int:
        """Returns how many of the ranks lie in one domain of neighbouring devices."""
        return max(1, min(self.ranks, domain // self.stride))


@lru_cache(100_000)
def seconds(cluster: Cluster, collective: Collective, payload: float, group: RankGroup) -> float:
    """Returns the seconds of a collective over a tensor of `payload` bytes: an all-gather's output, a reduce-scatter's
    input, a rank's part of an all-to-all. 0 for a group of one."""
    n = group.ranks
    if n == 1 or payload <= 0:
        return 0.0
    near = group.near(cluster.joined)
    nodes = ceil(n / near)
    if collective == "send":
        link = cluster.intra if group.stride < cluster.joined else cluster.inter
        slow = link.pair_gbs / link.gbs if link.pair_gbs else 1.0
        return link.latency_us * 1e-6 + payload / _bytes(link) / slow
    if collective == "all_to_all":
        return _all_to_all(cluster, payload, n, near, nodes)
    bandwidth = _bandwidth(cluster, group, near, nodes)
    step = INTER_STEP * cluster.inter.latency_us if nodes > 1 else INTRA_STEP * cluster.intra.latency_us
    hops = (n - 1) * step * 1e-6
    start = START_US * 1e-6
    share = (n - 1) / n
    if collective != "all_reduce":
        return start + hops + share * payload / bandwidth
    ring = 2 * hops + 2 * share * payload / bandwidth
    deep = 2 * (log2(nodes) * cluster.inter.latency_us + log2(near) * cluster.intra.latency_us) * 1e-6
    tree = deep + 2 * payload / (bandwidth * 0.9)
    if nodes == 1 and cluster.intra.reduces:
        switch = 4 * cluster.intra.latency_us * 1e-6 + payload / bandwidth
        return start + min(ring, tree, switch)
    return start + min(ring, tree)


def load(cluster: Cluster, group: RankGroup, payload: float) -> float:
    """Returns the `occupancy` of a group's all-gathers of `payload` bytes each."""
    spent = seconds(cluster, "all_gather", payload, group)
    return occupancy(cluster, payload * (1 - 1 / group.ranks), spent)


def occupancy(cluster: Cluster, sent: Any, spent: Any) -> Any:
    """Returns the share of the bandwidth between neighbouring devices that `sent` bytes in `spent` seconds (numbers or
    arrays) use: they slow down overlapping computation in proportion. Slow transfers over a network take few cores and
    little of the memory's bandwidth, and a ring that waits for its next step takes none."""
    return smaller(1.0, quotient(sent, spent) / _bytes(cluster.intra))


def _bytes(link: Link) -> float:
    """Returns the bytes per second of large messages; infinite for a link that is not described."""
    return link.gbs * link.reached * 1e9 or inf


def _bandwidth(cluster: Cluster, group: RankGroup, near: int, nodes: int) -> float:
    """Returns the bytes per second that pass each rank of a ring."""
    inside = _bytes(cluster.intra)
    if cluster.intra.pair_gbs:
        inside = min(inside, (near - 1 or 1) * cluster.intra.pair_gbs * cluster.intra.reached * 1e9)
    if nodes == 1:
        return inside
    outside = _bytes(cluster.inter) * min(near, MAX_CARDS)
    if cluster.pod and group.ranks * group.stride > cluster.pod:
        # A ring leaves a pod once, however many of its ranks are there.
        outside /= max(1.0, cluster.oversubscription * group.stride / cluster.pod)
    return min(inside, outside) if near > 1 else outside


def _all_to_all(cluster: Cluster, payload: float, n: int, near: int, nodes: int) -> float:
    """Returns the seconds in which every rank sends a part to every other, beyond its node over its own card."""
    part = payload / n
    return _exchange(cluster, nodes, (near - 1) * part, (n - near) * part)


def _exchange(cluster: Cluster, nodes: int, inside: float, outside: float) -> float:
    """Returns the seconds in which every rank sends `inside` bytes within its node and `outside` bytes beyond."""
    far = outside / _bytes(cluster.inter) if nodes > 1 else 0.0
    latency = cluster.inter.latency_us if nodes > 1 else cluster.intra.latency_us
    return (START_US + 2 * latency) * 1e-6 + max(inside / _bytes(cluster.intra), far)


@lru_cache(100_000)
def dispatch_seconds(
    cluster: Cluster,
    tokens: float,
    width: float,
    copies: float,
    group: RankGroup,
    *,
    once: Literal[False, "node", "rank"],
) -> float:
    """Returns the seconds of sending tokens of `width` bytes to `copies` experts each, balanced over `group`.

    `once` per node: a token crosses the network once to each node that has some of its experts, where it is forwarded
    (DeepEP, HybridEP; DeepSeek-V3, section 3.2.2), and within a node once to each device; once per rank: wherever that
    is; otherwise once per expert."""
    n = group.ranks
    if n == 1 or tokens <= 0:
        return 0.0
    near = group.near(cluster.joined)
    nodes = ceil(n / near)
    if not once:
        return _all_to_all(cluster, tokens * width * copies, n, near, nodes)
    if once == "rank":
        return _all_to_all(cluster, tokens * width * n * (1 - (1 - 1 / n) ** copies), n, near, nodes)
    reached = nodes * (1 - (1 - 1 / nodes) ** copies)
    devices = n * (1 - (1 - 1 / n) ** copies)
    inside = tokens * width * devices * (near - 1) / near
    return _exchange(cluster, nodes, inside, tokens * width * reached * (nodes - 1) / nodes)


@lru_cache(1000)
def group(layout: Layout, axis: str) -> RankGroup:
    """Returns the ranks of an axis: `tp` innermost, then `ring` and `ulysses` of cp, `ep`, dp_shard, dp_replicate, pp;
    `shard` is dp_shard × cp, `edp` the ranks that hold the same experts; `hpz` and `edp_hpz` are parts of them that
    keep a second copy of the parameters together, `hpz_across` and `edp_hpz_across` the ranks at one place of these.
    `summed` are the replicas that sum their gradients in every step: one where each trains by itself; `independent`
    those that do not."""
    return _GROUPS[axis](layout, layout.tp, layout.tp * layout.shard_ranks)


_GROUPS: dict[str, Callable[[Layout, int, int], RankGroup]] = {
    "tp": lambda layout, tp, _: RankGroup(tp),
    "ulysses": lambda layout, tp, _: RankGroup(
        layout.cp_ulysses, tp if layout.cp_inner == "ulysses" else tp * layout.ring
    ),
    "ring": lambda layout, tp, _: RankGroup(
        layout.ring, tp * layout.cp_ulysses if layout.cp_inner == "ulysses" else tp
    ),
    "cp": lambda layout, tp, _: RankGroup(layout.cp, tp),
    "ep": lambda layout, tp, _: RankGroup(layout.ep, 1 if layout.folds else tp),
    "edp": lambda layout, tp, _: RankGroup(layout.edp, tp * layout.ep_shard),
    "shard": lambda layout, tp, _: RankGroup(layout.shard_ranks, tp),
    "hpz": lambda layout, tp, _: RankGroup(near_ranks(layout), tp),
    "edp_hpz": lambda layout, tp, _: RankGroup(near_ranks(layout, experts=True), tp * layout.ep_shard),
    "hpz_across": lambda layout, tp, _: RankGroup(layout.shard_ranks // near_ranks(layout), tp * near_ranks(layout)),
    "edp_hpz_across": lambda layout, tp, _: RankGroup(
        layout.shard_ranks // near_ranks(layout), tp * near_ranks(layout)
    ),
    "replicate": lambda layout, _, shard: RankGroup(layout.dp_replicate, shard),
    "summed": lambda layout, _, shard: RankGroup(layout.summed_replicas, shard),
    "independent": lambda layout, _, shard: RankGroup(layout.independent_replicas, shard * layout.summed_replicas),
    "pp": lambda layout, _, shard: RankGroup(layout.pp, shard * layout.dp_replicate * layout.axes.ranks),
}
"""The ranks of each axis, from a layout, its tensor ranks, and these times its ranks that shard the state."""


@dataclass(frozen=True)
class MessageSeconds:
    """Seconds of the collectives of some operators for a micro-batch, without overlap."""

    forward: float = 0.0
    again: float = 0.0
    """Seconds in a repeated forward pass."""
    backward: float = 0.0
    occupancy: float = 0.0
    """Share of the bandwidth between neighbouring devices that these messages use while in flight."""


NO_MESSAGES = MessageSeconds()
Kind = str
"""An axis of the ledger (tp, cp, ep), or the computation that a message overlaps."""


def place(spec: StepSpec, layout: Layout | None = None) -> Place:
    """Returns the place of a rank of a spec, in another layout if one is given."""
    layout, profile, sequences = layout or spec.layout, spec.framework.memory_profile, spec.batch.micro_batch
    kernel = profile.masks == "none" and not (spec.model.attention_softcap or spec.model.dropout)
    waits = 1 if gathers_parameters(layout) else spec.batch.accumulation
    return place_of(
        spec.model,
        layout,
        sequences,
        width=spec.width,
        narrow=spec.products in ("fp8", "fp4"),
        profile=profile,
        work=document_work(spec.model, layout, sequences, spec.documents, kernel=kernel, waits=waits),
    )


def messages_seconds(
    spec: StepSpec, place: Place, operators: Sequence[Operator], modes: Sequence[Recompute] = ("none",)
) -> list[dict[Kind, MessageSeconds]]:
    """Returns, for each recomputation mode, the seconds of the operators' messages by axis; messages that overlap
    attention or weight gradients have these as keys instead."""
    # Others send nothing again, mlp but for what it repeats.
    sending = ("full", "selective", "mlp") if any(one.repeated for one in operators) else ("full", "selective")
    alike: list[Recompute] = [mode if mode in sending else "none" for mode in modes]
    by_mode: dict[Recompute, dict[Kind, list[float]]] = {mode: {} for mode in alike}
    for operator, message in ((one, message) for one in operators for message in one.messages):
        once = message_seconds(spec, place, message) * _repeats(spec, operator, message)
        if not once:
            continue
        kind = message.ledger_axis if message.beside == "nothing" else message.beside
        load = occupancy(spec.cluster, place.bytes_of(message), once) if message.axis == "ring" else 0.0
        for mode, so_far in by_mode.items():
            own, sums = operator.mode(mode), so_far.setdefault(kind, [0.0] * 4)
            sums[0] += once * message.forward
            sums[1] += once * message.again(own)
            sums[2] += once * message.back(own)
            sums[3] = max(sums[3], load)
    found = {mode: {kind: MessageSeconds(*sums) for kind, sums in so_far.items()} for mode, so_far in by_mode.items()}
    return [found[mode] for mode in alike]


def _repeats(spec: StepSpec, operator: Operator, message: Message) -> int:
    """Returns how many matrices send the message for themselves: the input of matrices that tensor ranks divide by
    columns is gathered in the forward pass, and its gradient reduced in the backward pass."""
    of_input = message.axis == "tp" and (message.collective == "all_gather") == (message.forward > 0)
    if not spec.framework.gathers_each or not of_input:
        return 1
    return max(1, sum(len(weight.shape) == 2 for weight in operator.weights))


def message_seconds(spec: StepSpec, place: Place, message: Message) -> float:
    """Returns the seconds of one message without overlap."""
    cluster, framework, layout = spec.cluster, spec.framework, spec.layout
    if message.axis == "pp":
        ranks = RankGroup(2, group(layout, "pp").stride)
    elif place.ranks_of(message) == 1:
        return 0.0
    elif framework.ep_once and message.axis == "ep" and message.number == "index":
        # Such a dispatch sends the numbers of its rows in its own kernel (DeepEP's notify_dispatch), or a map.
        ranks = RankGroup(place.ep_shard * place.routed_share)
        read = ranks.ranks * place.tokens / place.routed_share * place.model.moe.n_experts * framework.ep_maps
        return seconds(cluster, "all_gather", read, ranks) + stream_seconds(cluster.accelerator, read) if read else 0.0
    elif message.copies:
        # Expert ranks that fold have tensor ranks among them, of which each sends its own tokens.
        ranks = RankGroup(place.ep_shard * place.routed_share) if framework.ep_folds else group(layout, "ep")
        sent = place.tokens / place.routed_share
        row = place.bytes_of(message) / (sent * message.copies)
        several = [ranks]
        if place.ep_nodes > 1:  # inside groups first, then between them
            near = ranks.ranks // place.ep_nodes
            several = [RankGroup(near, ranks.stride), RankGroup(place.ep_nodes, ranks.stride * near)]
        once = framework.ep_once and ("node" if framework.ep_forwards else "rank")
        return sum(dispatch_seconds(cluster, sent, row, message.copies, each, once=once) for each in several)
    elif message.collective == "send":
        ranks = RankGroup(2, group(layout, message.axis).stride)
    else:
        ranks = group(layout, message.axis)
    return seconds(cluster, message.collective, place.bytes_of(message), ranks)


def collectives(place: Place, operators: Iterable[Operator]) -> float:
    """Returns the number of collectives that the host launches in the forward pass of some operators."""
    return sum(
        message.forward
        for operator in operators
        for message in operator.messages
        if message.axis != "pp" and place.ranks_of(message) > 1
    )


def boundary_bytes(spec: StepSpec) -> float:
    """Returns the bytes of one micro-batch's hidden states that a rank sends to the next stage."""
    here = place(spec)
    whole = here.bytes_of(boundary(here))
    return whole / here.tp if spec.framework.pp_scatters and not here.sp else whole


def boundary_seconds(spec: StepSpec, one: int, other: int) -> float:
    """Returns the seconds of sending one micro-batch's hidden states from a pipeline rank to another: inside a domain
    of neighbouring devices if both have theirs there."""
    joined, stride = spec.cluster.joined, group(spec.layout, "pp").stride
    crosses = one * stride // joined != other * stride // joined
    return seconds(spec.cluster, "send", boundary_bytes(spec), RankGroup(2, joined if crosses else 1))


Purpose = Literal["gather", "regather", "reduce", "sum"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


class StateMessage(NamedTuple):
    """One collective over the state."""

    purpose: Purpose
    collective: Collective
    among: Literal["shard", "near", "across", "replicas"]
    """`near`: the ranks of `shard` that keep a second copy of the parameters, those of a node; `across`: the ranks at
    the same place of every node."""
    size: Any
    """Bytes of the whole tensor: a number, or an array."""


def state_messages(
    ranks: Any, *, gathered: Any, reduced: Any, summed: Any, near: Any = 0, coded: bool = False
) -> tuple[StateMessage, ...]:
    """Returns the messages of parameters that `ranks` ranks share: the all-gather of the parameters, the one by which
    they are gathered again in the same step, the reduce-scatter of their gradients, and the replicas' sum.

    `gathered`, `reduced` and `summed` are the bytes, padding included, in which one rank's share of the parameters is
    gathered, one of the gradients reduced, and one summed over replicas. `near`: the ranks that keep a second copy
    together, from which parameters are gathered again; 0 without one. `coded`: gradients are sent as codes, which no
    reduce-scatter sums: an all-to-all inside the node, if it is known, and one across nodes."""
    whole = reduced * ranks
    if not coded:
        reductions = [StateMessage("reduce", "reduce_scatter", "shard", whole)]
    elif near:
        inside = StateMessage("reduce", "all_to_all", "near", whole)
        reductions = [inside, StateMessage("reduce", "all_to_all", "across", whole / near)]
    else:
        reductions = [StateMessage("reduce", "all_to_all", "shard", whole)]
    return (
        StateMessage("gather", "all_gather", "shard", gathered * ranks),
        StateMessage("regather", "all_gather", "near" if near else "shard", gathered * ranks),
        *reductions,
        StateMessage("sum", "all_reduce", "replicas", summed),
    )
