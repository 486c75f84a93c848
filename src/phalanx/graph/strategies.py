"""The strategies of an operator on a mesh, and what each costs: its computation, its memory, and what it takes to bring
tensors from the form in which one operator leaves them into that in which the next one needs them.

On each axis of the mesh an operator splits one letter, or computes the same on all ranks. A split letter that the
output lacks leaves a partial sum on each rank. The backward pass is dual: the gradient of a partial sum is replicated,
and that of a replicated input is a partial sum if the letter that is split is none of its own (Xu et al. 2021, GSPMD).
All seconds are those of phalanx.cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import product
from math import prod

from phalanx.config.cluster import Cluster
from phalanx.cost.communication import Collective, RankGroup, seconds, sent_bytes
from phalanx.cost.kernels import product_seconds, rate, stream_seconds
from phalanx.graph.operators import WIDTHS, GraphOperator, OperatorGraph

Place = int | str
"""A tensor on one axis: split along a dimension, "R" replicated, "P" a partial sum on each rank."""
Form = tuple[Place, ...]
"""A tensor on all axes, outermost first; a dimension split on two is split on the outer one first, as DTensor does."""
Both = tuple[Form, Form]
"""The form of a tensor and that of its gradient, which is empty where an operator has none to give."""
STATE_BYTES = 16
"""Bytes of a parameter with its gradient and Adam's state, mixed precision: 2 + 2 + 12 (Rajbhandari et al. 2020)."""


@dataclass(frozen=True)
class GraphMesh:
    """Devices in rows: the last axis is innermost."""

    cluster: Cluster
    sizes: tuple[int, ...]
    direct: bool = True
    """Whether splits move to another dimension by an all-to-all; DTensor gathers and cuts on CPUs."""

    @cached_property
    def groups(self) -> tuple[RankGroup, ...]:
        return tuple(RankGroup(size, prod(self.sizes[axis + 1 :])) for axis, size in enumerate(self.sizes))

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    def __str__(self) -> str:
        return " × ".join(map(str, self.sizes))


@dataclass(frozen=True)
class Change:
    """One collective that brings a tensor from one form into another; without one it is cut or already there."""

    before: Form
    after: Form
    axis: int
    collective: Collective | None
    payload: float


@dataclass(frozen=True)
class Cost:
    seconds: float = 0.0
    sent: float = 0.0
    """Bytes that each device sends."""
    memory: float = 0.0
    backward: float = 0.0
    """Seconds of computation in the backward pass."""
    behind: float = 0.0
    """Seconds of sums of parameters' gradients, which go on while the backward pass computes."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.sent + other.sent,
            self.memory + other.memory,
            self.backward + other.backward,
            self.behind + other.behind,
        )

    def times(self, count: float) -> Cost:
        return Cost(*(count * each for each in (self.seconds, self.sent, self.memory, self.backward, self.behind)))


@dataclass(frozen=True)
class Strategy:
    """One way to split an operator over the axes of the mesh."""

    split: tuple[str | None, ...]
    """The letter on each axis, or None."""
    output: Both
    demands: tuple[Both, ...]
    """The forms of its inputs."""
    cost: Cost

    def words(self, each: GraphOperator) -> str:
        """Returns the strategy in words: `f | P(h)`: letter f on the first axis, partial sums over h on the second."""
        summed = each.summed
        return " | ".join("-" if one is None else f"P({one})" if one in summed else one for one in self.split)


def places(form: Form, sizes: tuple[int, ...]) -> dict[int, int]:
    """Returns the number of parts of each split dimension."""
    found: dict[int, int] = {}
    for place, size in zip(form, sizes, strict=True):
        if isinstance(place, int):
            found[place] = found.get(place, 1) * size
    return found


def divides(form: Form, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    return all(shape[dimension] % parts == 0 for dimension, parts in places(form, sizes).items())


def local_bytes(nbytes: float, form: Form, sizes: tuple[int, ...]) -> float:
    return nbytes / prod(places(form, sizes).values())


@lru_cache(200_000)
def path(mesh: GraphMesh, shape: tuple[int, ...], nbytes: float, before: Form, after: Form) -> tuple[Change, ...]:
    """Returns the fastest changes, one axis at a time, from one form into another: Dijkstra's search through the forms
    that have each axis as it is, as it should be, or replicated. An axis may change along a dimension only while no
    axis inside it splits that dimension."""
    choices = [
        {old, new, "R"} - ({"P"} if new != "P" and old != "P" else set())
        for old, new in zip(before, after, strict=True)
    ]
    queue: list[tuple[float, int, Form, tuple[Change, ...]]] = [(0.0, 0, before, ())]
    done, count = set[Form](), 0
    while queue:
        spent, _, form, changes = heappop(queue)
        if form == after:
            return changes
        if form in done:
            continue
        done.add(form)
        for axis, old in enumerate(form):
            for new in choices[axis] - {old, "P"}:
                touched = {place for place in (old, new) if isinstance(place, int)}
                following = (*form[:axis], new, *form[axis + 1 :])
                if touched & set(form[axis + 1 :]) or not divides(following, shape, mesh.sizes):
                    continue
                change = _change(mesh, nbytes, form, following, axis)
                count += 1
                # A cut is free; of equally fast ways the shortest is taken.
                heappush(queue, (spent + change_seconds(mesh, change) + 1e-12, count, following, (*changes, change)))
    raise AssertionError(f"no way from {before} to {after}")


def _change(mesh: GraphMesh, nbytes: float, before: Form, after: Form, axis: int) -> Change:
    here, old, new = local_bytes(nbytes, before, mesh.sizes), before[axis], after[axis]
    size = mesh.sizes[axis]
    if old == "P":
        return Change(before, after, axis, "all_reduce" if new == "R" else "reduce_scatter", here)
    if old == "R":
        return Change(before, after, axis, None, 0.0)
    if new == "R" or not mesh.direct:
        return Change(before, after, axis, "all_gather", here * size)
    return Change(before, after, axis, "all_to_all", here)


def change_seconds(mesh: GraphMesh, change: Change) -> float:
    return (
        seconds(mesh.cluster, change.collective, change.payload, mesh.groups[change.axis]) if change.collective else 0.0
    )


@lru_cache(500_000)
def resharding(
    mesh: GraphMesh, shape: tuple[int, ...], nbytes: float, given: Both, wanted: Both, graded: bool, late: bool = False
) -> Cost:
    """Returns what an edge costs: the tensor forward, its gradient backward if it has one, and the copy that is kept
    if the tensor had to be communicated. A `late` gradient is not needed before the end of the backward pass."""
    forward = path(mesh, shape, nbytes, given[0], wanted[0])
    backward = path(mesh, shape, nbytes, wanted[1], given[1]) if graded and wanted[1] else ()
    every = [change for change in (*forward, *backward) if change.collective]
    return Cost(
        sum(change_seconds(mesh, change) for change in every),
        sum(sent_bytes(one.collective, one.payload, mesh.sizes[one.axis]) for one in every if one.collective),
        local_bytes(nbytes, wanted[0], mesh.sizes) if any(change.collective for change in forward) else 0.0,
        0.0,
        change_seconds(mesh, backward[-1]) if late and backward else 0.0,
    )


def strategies(graph: OperatorGraph, each: GraphOperator, mesh: GraphMesh) -> list[Strategy]:
    """Returns the legal strategies of an operator, without those that another one of the same forms beats."""
    options = [None, *(letter for letter in each.letters if letter not in each.whole and each.sizes[letter] > 1)]
    found: dict[tuple[Both, tuple[Both, ...]], Strategy] = {}
    for split in product(options, repeat=len(mesh.sizes)):
        strategy = strategy_of(graph, each, mesh, split)
        key = (strategy.output, strategy.demands) if strategy else None
        if strategy and key and (key not in found or strategy.cost.seconds < found[key].cost.seconds):
            found[key] = strategy
    return list(found.values())


def strategy_of(
    graph: OperatorGraph, each: GraphOperator, mesh: GraphMesh, split: tuple[str | None, ...]
) -> Strategy | None:
    """Returns the strategy that splits these letters, or None if the operator cannot be split like this."""
    parts: dict[str, int] = {}
    for letter, size in zip(split, mesh.sizes, strict=True):
        if letter is not None:
            parts[letter] = parts.get(letter, 1) * size
    if any(each.sizes[letter] % number for letter, number in parts.items()):
        return None
    try:
        output = _both(each, each.output, split, summed=True)
        demands = tuple(_both(each, term, split, summed=False) for term in each.terms)
        if each.name not in graph.differentiated:
            demands = tuple((form, ()) for form, _ in demands)
    except ValueError:
        return None
    return Strategy(split, output, demands, _cost(graph, each, mesh, parts, output[0]))


def _both(each: GraphOperator, term: tuple[str, ...], split: tuple[str | None, ...], *, summed: bool) -> Both:
    forward, backward = list[Place](), list[Place]()
    for letter in split:
        place = None if letter is None else each.dimension(term, letter)
        if place is not None:
            forward.append(place)
            backward.append(place)
        else:
            partial = letter is not None
            forward.append("P" if partial and summed else "R")
            backward.append("P" if partial and not summed else "R")
    return tuple(forward), tuple(backward)


def _cost(graph: OperatorGraph, each: GraphOperator, mesh: GraphMesh, parts: dict[str, int], output: Form) -> Cost:
    here = local_bytes(each.nbytes, output, mesh.sizes)
    if each.kind == "parameter":
        return Cost(memory=here * STATE_BYTES / WIDTHS[each.dtype])
    if each.kind == "input":
        return Cost(memory=here)
    graded = each.name in graph.differentiated
    if each.kind == "view":
        return Cost()
    forward, backward = compute_seconds(graph, each, mesh, parts)
    # A partial sum is not kept: what it is reduced to is, where it is used.
    return Cost(forward + backward, 0.0, here if graded and "P" not in output else 0.0, backward)


def compute_seconds(
    graph: OperatorGraph, each: GraphOperator, mesh: GraphMesh, parts: Mapping[str, int] = {}
) -> tuple[float, float]:
    """Returns the seconds of an operator's part in the forward and in the backward pass."""
    device = mesh.cluster.accelerator
    kind = "bf16" if each.dtype in ("bf16", "fp16") else "fp32"
    gradients = sum(name in graph.differentiated for name in each.inputs)
    sizes = {letter: each.sizes[letter] // parts.get(letter, 1) for letter in each.letters}
    multiplied = is_product(each)
    if multiplied:
        first, second = ({*"".join(term)} for term in each.terms)
        out = {*"".join(each.output)}
        m, n, k, count = (
            prod(sizes[letter] for letter in letters)
            for letters in (first & out - second, second & out - first, first & second - out, first & second & out)
        )
        forward, found = product_seconds(device, kind, m, n, k, count), 0.0
        if graph.by_name[each.inputs[0]].name in graph.differentiated:
            found += product_seconds(device, kind, m, k, n, count)
        if graph.by_name[each.inputs[1]].name in graph.differentiated:
            found += product_seconds(device, kind, k, n, m, count)
        return forward, found
    moved = each.moved
    if moved is None:
        moved = 0.0
        for name, term in zip((*each.inputs, None), (*each.terms, each.output), strict=True):
            of = graph.by_name[name] if name is not None else each
            moved += of.nbytes / prod(parts.get(letter, 1) for group in term for letter in group)
    else:
        moved /= prod(parts.values())
    once = max(stream_seconds(device, moved, 1), (each.flops or 0.0) / prod(parts.values()) / rate(device, kind))
    return once, once * min(gradients, 2)


def is_product(each: GraphOperator) -> bool:
    """Returns whether it is a product of two inputs, whose FLOPs follow from its letters."""
    if each.flops is not None or each.kind != "compute" or len(each.terms) != 2 or not each.summed:
        return False
    return not each.whole and all(
        letter in "".join(each.terms[0]) and letter in "".join(each.terms[1]) for letter in each.summed
    )


def meshes(cluster: Cluster, devices: int, direct: bool = True) -> Iterator[GraphMesh]:
    """Returns meshes of so many devices: one row, and two dimensions whose inner one is a node or half of it; within a
    node two devices, or half of them."""
    near = cluster.joined
    yield GraphMesh(cluster, (devices,), direct)
    for size in sorted({2, devices // 2} if devices <= near else {near, near // 2}):
        if 1 < size < devices and devices % size == 0:
            yield GraphMesh(cluster, (devices // size, size), direct)
