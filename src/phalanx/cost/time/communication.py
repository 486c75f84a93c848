"""Seconds of the operators' messages: the table of phalanx.blocks, priced on the links of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from phalanx.blocks.ends import boundary
from phalanx.blocks.operator import Message, Operator
from phalanx.blocks.place import Place, place_of
from phalanx.config.layout import Layout, Recompute
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.link import RankGroup, dispatch_seconds, occupancy, seconds
from phalanx.partition.second_copy import near_ranks


@lru_cache(1000)
def group(layout: Layout, axis: str) -> RankGroup:
    """Returns the ranks of an axis: `tp` innermost, then `ring` and `ulysses` of cp, `ep`, dp_shard, dp_replicate, pp;
    `shard` is dp_shard × cp, `edp` the ranks that hold the same experts; `hpz` and `edp_hpz` are parts of them that
    keep a second copy of the parameters together, `hpz_across` and `edp_hpz_across` the ranks at one place of these.
    `summed` are the replicas that sum their gradients in every step: one where each trains by itself."""
    tp, cp, shard = layout.tp, layout.cp, layout.dp_shard
    ulysses_inside = layout.cp_inner == "ulysses"
    return {
        "tp": RankGroup(tp),
        "ulysses": RankGroup(layout.cp_ulysses, tp if ulysses_inside else tp * layout.ring),
        "ring": RankGroup(layout.ring, tp * layout.cp_ulysses if ulysses_inside else tp),
        "cp": RankGroup(cp, tp),
        "ep": RankGroup(layout.ep, tp),
        "edp": RankGroup(layout.shard_ranks // layout.ep or 1, tp * layout.ep),
        "shard": RankGroup(cp * shard, tp),
        "hpz": RankGroup(near_ranks(layout), tp),
        "edp_hpz": RankGroup(near_ranks(layout, experts=True), tp * layout.ep),
        "hpz_across": RankGroup(cp * shard // near_ranks(layout), tp * near_ranks(layout)),
        "edp_hpz_across": RankGroup(cp * shard // near_ranks(layout), tp * near_ranks(layout)),
        "replicate": RankGroup(layout.dp_replicate, tp * cp * shard),
        "summed": RankGroup(layout.dp_replicate // layout.independent_replicas, tp * cp * shard),
        "pp": RankGroup(layout.pp, tp * cp * shard * layout.dp_replicate),
    }[axis]


@dataclass(frozen=True)
class MessageSeconds:
    """Seconds of the collectives of some operators for a micro-batch, without overlap."""

    forward: float = 0.0
    again: float = 0.0
    """Seconds in a repeated forward pass."""
    backward: float = 0.0
    occupancy: float = 0.0
    """Share of the bandwidth between neighbouring devices that these messages use while in flight."""

    def __add__(self, other: MessageSeconds) -> MessageSeconds:
        return MessageSeconds(
            self.forward + other.forward,
            self.again + other.again,
            self.backward + other.backward,
            max(self.occupancy, other.occupancy),
        )


NO_MESSAGES = MessageSeconds()
Kind = str
"""An axis of the ledger (tp, cp, ep), or the computation that a message overlaps."""


def place(spec: StepSpec, layout: Layout | None = None) -> Place:
    """Returns the place of a rank of a spec, in another layout if one is given."""
    return place_of(
        spec.model,
        layout or spec.layout,
        spec.batch.micro_batch,
        width=spec.width,
        narrow=spec.products in ("fp8", "fp4"),
        profile=spec.framework.memory_profile,
    )


def messages_seconds(
    spec: StepSpec, place: Place, operators: Iterable[Operator], modes: Sequence[Recompute] = ("none",)
) -> list[dict[Kind, MessageSeconds]]:
    """Returns, for each recomputation mode, the seconds of the operators' messages by axis; messages that overlap
    attention or weight gradients have these as keys instead."""
    by_mode: list[dict[Kind, MessageSeconds]] = [{} for _ in modes]
    for message in (message for operator in operators for message in operator.messages):
        once = message_seconds(spec, place, message)
        if not once:
            continue
        kind = message.ledger_axis if message.beside == "nothing" else message.beside
        load = occupancy(spec.cluster, place.bytes_of(message), once) if message.axis == "ring" else 0.0
        for mode, so_far in zip(modes, by_mode, strict=True):
            more = MessageSeconds(once * message.forward, once * message.again(mode), once * message.back(mode), load)
            so_far[kind] = so_far[kind] + more if kind in so_far else more
    return by_mode


def message_seconds(spec: StepSpec, place: Place, message: Message) -> float:
    """Returns the seconds of one message without overlap."""
    cluster, framework, layout = spec.cluster, spec.framework, spec.layout
    if message.axis == "pp":
        ranks = RankGroup(2, group(layout, "pp").stride)
    elif place.ranks_of(message) == 1 or (framework.ep_once and message.axis == "ep" and not message.copies):
        # Such a dispatch sends the numbers of its rows in its own kernel (DeepEP's notify_dispatch).
        return 0.0
    elif message.copies:
        folds = framework.ep_folds
        # If tensor ranks share every expert, each of them sends all tokens.
        sent = place.tokens / (place.tp if folds and place.sp else 1)
        ranks = RankGroup(place.ep) if folds else group(layout, "ep")
        row = place.bytes_of(message) / (place.tokens * message.copies)
        return dispatch_seconds(cluster, sent, row, message.copies, ranks, once=framework.ep_once)
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
