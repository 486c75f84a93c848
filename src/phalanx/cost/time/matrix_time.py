"""Seconds of updating whole matrices (Muon): orthogonalising them, and sending their pieces to owners and back."""

from __future__ import annotations

from phalanx.cost.matrices import is_whole, matrix_work, travelling
from phalanx.cost.placed import Content
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.communication import group
from phalanx.cost.time.kernel import product_seconds
from phalanx.cost.time.link import RankGroup, seconds
from phalanx.optimizers.matrices import ITERATIONS, newton_schulz_products


def matrix_seconds(spec: StepSpec, content: Content) -> float:
    """Returns the seconds of the busiest of the ranks with `content`; 0 for an optimizer that updates elements."""
    if not is_whole(spec.optimizer.name):
        return 0.0
    layout, kinds = spec.layout, tuple(content.of_kind.items())
    products = "bf16" if spec.optimizer.newton_schulz == "bf16" else "fp32"
    total = 0.0
    for work in matrix_work(spec.model, layout, kinds):
        for shape, number in work.owned:
            total += ITERATIONS * sum(
                product_seconds(spec.cluster.accelerator, products, *sizes, number)
                for sizes in newton_schulz_products(*shape)
            )
        ends = content.embedding, content.head
        share = travelling(spec.model, layout, kinds, ends, spec.width, work)
        mine = work.elements / work.ranks * max(4, spec.width)
        among = group(layout, "edp" if work.experts else "shard")
        total += _both_ways(spec, mine * share, among, work.rounds)
        if work.tp > 1:
            total += _both_ways(spec, mine, group(layout, "tp"), work.rounds)
    return total


def _both_ways(spec: StepSpec, payload: float, among: RankGroup, rounds: int) -> float:
    """Returns the seconds of sending `payload` bytes to owners and back, in some rounds."""
    return 2 * rounds * seconds(spec.cluster, "all_to_all", payload / rounds, among)
