"""The inter-operator choice: pipeline stages and the sub-mesh of each, by dynamic programming over the plans of the
integer program (Zheng et al. 2022, section 5).

The graph is that of one micro-batch. Its operators are gathered into a few layers in their order; a stage is a run of
layers, and takes 2^k devices of a node or whole nodes. A step of B micro-batches takes the sum of the stages' times and
B - 1 times the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from phalanx.config.cluster import Cluster
from phalanx.cost.communication import RankGroup, seconds
from phalanx.errors import DoesNotFitError
from phalanx.graph.operators import GraphOperator, OperatorGraph, source
from phalanx.graph.solve import GraphPlan, GraphTooLargeError, solve
from phalanx.graph.strategies import GraphMesh, compute_seconds, meshes, strategies
from phalanx.partition.cut import cut

MOST_LAYERS = 8
"""Layers into which operators are gathered: Alpa's users choose a like number."""


@dataclass(frozen=True)
class PipelinePlan:
    """Stages in their order, each a plan of its part of the graph on its part of the devices."""

    stages: tuple[GraphPlan, ...]
    micro_batches: int
    sends: tuple[float, ...]
    """Seconds per micro-batch in which each stage receives its inputs and returns their gradients."""

    @property
    def stage_seconds(self) -> list[float]:
        return [plan.cost.seconds + send for plan, send in zip(self.stages, self.sends, strict=True)]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.stage_seconds) + (self.micro_batches - 1) * max(self.stage_seconds)

    @property
    def devices(self) -> int:
        return sum(plan.mesh.devices for plan in self.stages)


def layers_of(graph: OperatorGraph, cluster: Cluster, most: int = MOST_LAYERS) -> list[list[GraphOperator]]:
    """Returns the operators in at most so many runs of about equal computation. A block is not torn; parameters and
    inputs belong to the run that first uses them."""
    units: list[list[GraphOperator]] = []
    alone = GraphMesh(cluster, (1,))
    for each in graph.operators:
        if each.kind in ("parameter", "input"):
            continue
        bias = bool(units) and each.name == f"{units[-1][-1].name}.bias"  # the exporter's, which stays with its product
        if not units or not (bias or (each.block and units[-1][-1].block == each.block)):
            units.append([])
        units[-1].append(each)
    costs = [sum(sum(compute_seconds(graph, each, alone)) for each in unit) for unit in units]
    blocks = sum(unit[0].block != "" for unit in units)
    count = next((each for each in range(most, 1, -1) if blocks % each == 0), most) if blocks >= most else most
    layers = [
        [each for unit in units[run.start : run.stop] for each in unit] for run in cut(costs, min(count, len(units)))
    ]
    owner: dict[str, int] = {}
    for number, layer in enumerate(layers):
        for each in layer:
            for name in each.inputs:
                if graph.by_name[name].kind in ("parameter", "input"):
                    owner.setdefault(name, number)
    place = {each.name: number for number, layer in enumerate(layers) for each in layer} | owner
    return [[each for each in graph.operators if place.get(each.name) == number] for number in range(len(layers))]


def part_of(graph: OperatorGraph, layers: Sequence[Sequence[GraphOperator]]) -> OperatorGraph:
    """Returns a run of layers as a graph; what comes from before is its input."""
    chosen = [each for layer in layers for each in layer]
    own = {each.name for each in chosen}
    outside = dict.fromkeys(name for each in chosen for name in each.inputs if name not in own)
    given = [source(name, "input", graph.by_name[name].shape, dtype=graph.by_name[name].dtype) for name in outside]
    return OperatorGraph(graph.name, (*given, *chosen), graph.notes, frozenset(outside) & graph.differentiated)


def sizes_of(devices: int, near: int) -> list[int]:
    """Returns the sizes of sub-meshes that tile the devices: powers of two inside a node, and whole nodes."""
    inside = [size for size in (2**power for power in range(near.bit_length())) if size <= near and near % size == 0]
    nodes = [near * 2**power for power in range(1, 32) if near * 2**power <= devices]
    return sorted({*(size for size in (*inside, *nodes) if devices % size == 0), devices})


def pipeline(
    graph: OperatorGraph,
    cluster: Cluster,
    devices: int,
    limit: float,
    micro_batches: int,
    most: int = MOST_LAYERS,
) -> PipelinePlan:
    """Returns the fastest stages. Raises DoesNotFitError if no plan fits."""
    layers = layers_of(graph, cluster, most)
    total = len(layers)
    sizes = sizes_of(devices, cluster.joined)
    same = graph.representatives
    failures: list[GraphTooLargeError] = []
    known: dict[object, GraphPlan | None] = {}

    @cache
    def least(name: str, size: int) -> float:
        each, tried = graph.by_name[name], meshes(cluster, size)
        return min(option.cost.seconds for mesh in tried for option in strategies(graph, each, mesh))

    def bound(begin: int, end: int, size: int) -> float:
        fraction = size / devices * total
        # A stage with a fraction of the devices has about that fraction of the layers: others are never balanced.
        if not (fraction / 1.5 <= end - begin <= max(1.0, 1.5 * fraction)) and size != devices:
            return inf
        return sum(least(same[each.name], size) for layer in layers[begin:end] for each in layer)

    @cache
    def best(begin: int, end: int, size: int) -> tuple[GraphPlan, float] | None:
        part = part_of(graph, layers[begin:end])
        found: GraphPlan | None = None
        flight = min(micro_batches, devices // size)
        key = size, _signature(part, same)
        if key in known:
            found = known[key]
            if found is not None:
                found = _moved(found, part, same)
        else:
            for mesh in meshes(cluster, size):
                try:
                    plan = solve(part, mesh, limit, in_flight=flight, overlaps=False)
                except GraphTooLargeError as error:
                    failures.append(error)
                    continue
                if found is None or plan.cost.seconds < found.cost.seconds:
                    found = plan
            known[key] = found
        if found is None:
            return None
        near = RankGroup(2, min(size, cluster.joined) if devices > cluster.joined and size >= cluster.joined else 1)
        arrives = sum(part.by_name[name].nbytes for name in part.received) / size
        return found, 2 * seconds(cluster, "send", arrives, near)

    # Lower bounds stand for the stages' seconds, until the best stages are none but solved ones.
    table = {
        (begin, end, size): bound(begin, end, size)
        for begin in range(total)
        for end in range(begin + 1, total + 1)
        for size in sizes
        if (size == devices) == (begin == 0 and end == total)
    }
    solved = set[tuple[int, int, int]]()
    while True:
        chosen = _fastest(table, total, devices, micro_batches)
        if not chosen:
            none = DoesNotFitError(f"no stages of {total} layers take {devices} devices")
            raise min(failures, key=lambda each: each.needed, default=none)
        if solved >= {*chosen}:
            break
        for at in chosen:
            each = best(*at)
            table[at] = inf if each is None else each[0].cost.seconds + each[1]
            solved.add(at)
    found = [each for cut_at in chosen if (each := best(*cut_at))]
    return PipelinePlan(tuple(plan for plan, _ in found), micro_batches, tuple(send for _, send in found))


def _fastest(
    table: dict[tuple[int, int, int], float], layers: int, devices: int, micro_batches: int
) -> list[tuple[int, int, int]]:
    """Returns the stages of the shortest step; none if there are no such stages."""
    best_seconds, chosen = inf, list[tuple[int, int, int]]()
    for slowest in sorted({*table.values()} - {inf}):
        if slowest * micro_batches >= best_seconds:
            break
        spent, cuts = _cheapest(table, layers, devices, slowest)
        if spent + (micro_batches - 1) * slowest < best_seconds:
            best_seconds, chosen = spent + (micro_batches - 1) * slowest, cuts
    return chosen


def _cheapest(
    table: dict[tuple[int, int, int], float], layers: int, devices: int, slowest: float
) -> tuple[float, list[tuple[int, int, int]]]:
    """Returns the least sum of the stages' seconds with none above `slowest`, and the stages."""
    least: dict[tuple[int, int], tuple[float, list[tuple[int, int, int]]]] = {(0, 0): (0.0, [])}
    for (begin, end, size), spent in sorted(table.items()):
        if spent > slowest * (1 + 1e-9):
            continue
        for (at, used), (before, cuts) in list(least.items()):
            if at != begin or used + size > devices:
                continue
            key = end, used + size
            if key not in least or before + spent < least[key][0]:
                least[key] = before + spent, [*cuts, (begin, end, size)]
    return least.get((layers, devices), (inf, []))


def _signature(part: OperatorGraph, same: dict[str, str]) -> object:
    return tuple(
        (same[each.name], each.kind) if each.name in same and each.name not in part.received else each.shape
        for each in part.operators
    )


def _moved(plan: GraphPlan, part: OperatorGraph, same: dict[str, str]) -> GraphPlan:
    """Returns the plan of a like part for this one: operators stand in the same order."""
    strategies = [plan.chosen[each.name] for each in plan.graph.operators]
    chosen = {each.name: strategy for each, strategy in zip(part.operators, strategies, strict=True)}
    return replace(plan, graph=part, chosen=chosen)
