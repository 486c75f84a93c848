"""Seconds of communication of one block, of a stage boundary and of the state, and how much of it nothing hides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from phalanx.config.layout import Layout
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.link import RankGroup, dispatch_seconds, seconds


@lru_cache(1000)
def group(layout: Layout, axis: str) -> RankGroup:
    """The ranks of an axis: `tp` innermost, then `ring` and `ulysses` of cp, `ep`, dp_shard, dp_replicate, pp; `shard`
    is dp_shard × cp, `edp` those that hold the same experts."""
    tp, cp, shard = layout.tp, layout.cp, layout.dp_shard
    ulysses_inside = layout.cp_inner == "ulysses"
    return {
        "tp": RankGroup(tp),
        "ulysses": RankGroup(layout.cp_ulysses, tp if ulysses_inside else tp * layout.ring),
        "ring": RankGroup(layout.ring, tp * layout.cp_ulysses if ulysses_inside else tp),
        "ep": RankGroup(layout.ep, tp),
        "edp": RankGroup(layout.shard_ranks // layout.ep or 1, tp * layout.ep),
        "shard": RankGroup(cp * shard, tp),
        "replicate": RankGroup(layout.dp_replicate, tp * cp * shard),
        "pp": RankGroup(layout.pp, tp * cp * shard * layout.dp_replicate),
    }[axis]


@dataclass(frozen=True)
class BlockTraffic:
    """Seconds of one block's collectives for a micro-batch, if nothing hid them."""

    tp_forward: float = 0.0
    tp_backward: float = 0.0
    tp_regather: float = 0.0
    ring_forward: float = 0.0
    """Keys and values around the ring: beside attention."""
    ring_backward: float = 0.0
    cp_forward: float = 0.0
    """Ulysses: before and after attention."""
    cp_backward: float = 0.0
    ep_forward: float = 0.0
    ep_backward: float = 0.0


def block_traffic(spec: StepSpec, moe: bool) -> BlockTraffic:
    """A dense block's, or a block's with experts."""
    model, layout, cluster = spec.model, spec.layout, spec.cluster
    tokens = spec.batch.micro_batch * model.seq_len / layout.cp
    hidden = tokens * model.d_model * spec.width
    tp = group(layout, "tp")
    if layout.sp:
        pair = seconds(cluster, "all_gather", hidden, tp) + seconds(cluster, "reduce_scatter", hidden, tp)
    else:
        pair = seconds(cluster, "all_reduce", hidden, tp)
    regather = seconds(cluster, "all_gather", hidden, tp) if layout.sp and layout.sp_regather else 0.0
    # A rank's share of keys and values, both, in numbers of two bytes; gradients come back beside them.
    kv_heads = max(model.kv_heads // layout.tp, 1)
    keys = 2 * tokens * kv_heads * model.head_size * spec.width
    hop = seconds(cluster, "send", keys, RankGroup(2, group(layout, "ring").stride)) if layout.ring > 1 else 0.0
    heads = (2 * model.n_heads / layout.tp + 2 * kv_heads) * model.head_size * tokens * spec.width
    ulysses = seconds(cluster, "all_to_all", heads, group(layout, "ulysses"))
    exchange = 0.0
    if moe:
        folds = spec.framework.ep_folds
        # Where tensor ranks share every expert, each of them sends all tokens.
        sent = tokens / (layout.tp if folds and layout.sp else 1)
        experts = RankGroup(layout.ep) if folds else group(layout, "ep")
        row = spec.width * model.d_model
        exchange = 2 * dispatch_seconds(cluster, sent, row, model.moe.top_k, experts, once=spec.framework.ep_once)
    return BlockTraffic(
        tp_forward=2 * pair,
        tp_backward=2 * pair,
        tp_regather=2 * regather,
        ring_forward=(layout.ring - 1) * hop,
        ring_backward=2 * (layout.ring - 1) * hop,
        cp_forward=ulysses,
        cp_backward=ulysses,
        ep_forward=exchange,
        ep_backward=exchange,
    )


def boundary_seconds(spec: StepSpec) -> float:
    """One micro-batch's hidden states from a stage to the next."""
    model, layout = spec.model, spec.layout
    if layout.pp == 1:
        return 0.0
    numbers = spec.batch.micro_batch * model.seq_len / layout.cp * model.d_model
    if layout.sp or spec.framework.pp_scatters:
        numbers /= layout.tp
    stride = group(layout, "pp").stride
    return seconds(spec.cluster, "send", numbers * spec.width, RankGroup(2, stride))
