"""Seconds of updating whole matrices (Muon): orthogonalising them, and sending their pieces to owners and back."""

from __future__ import annotations

from phalanx.cost.matrices import Owned, matrix_work
from phalanx.cost.placed import Content
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.communication import group
from phalanx.cost.time.kernel import product_seconds
from phalanx.cost.time.link import RankGroup, seconds
from phalanx.optimizers.entry import ITERATIONS, newton_schulz_products


def matrix_seconds(spec: StepSpec, content: Content) -> float:
    """Returns the seconds of the busiest of the ranks with `content`; 0 for an optimizer that updates elements."""
    total = 0.0
    for work in matrix_work(spec, tuple(content.of_kind.items()), (content.embedding, content.head)):
        total += max(_orthogonal_seconds(spec, owned) for owned in work.owned)
        mine = work.elements / work.ranks * max(4, spec.width)
        among = group(spec.layout, "edp" if work.experts else "shard")
        total += _both_ways(spec, mine * work.moved, among, work.rounds)
        if work.tp > 1:
            total += _both_ways(spec, mine, group(spec.layout, "tp"), work.rounds)
    return total


def _orthogonal_seconds(spec: StepSpec, owned: Owned) -> float:
    """Returns the seconds of orthogonalising some matrices."""
    device, products = spec.cluster.accelerator, "bf16" if spec.optimizer.newton_schulz == "bf16" else "fp32"
    return ITERATIONS * sum(
        product_seconds(device, products, *sizes, number)
        for shape, number in owned
        for sizes in newton_schulz_products(*shape)
    )


def _both_ways(spec: StepSpec, payload: float, among: RankGroup, rounds: int) -> float:
    """Returns the seconds of sending `payload` bytes to owners and back, in some rounds."""
    return 2 * rounds * seconds(spec.cluster, "all_to_all", payload / rounds, among)
