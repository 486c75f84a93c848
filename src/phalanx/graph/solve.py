"""The intra-operator choice: one strategy for every operator such that computation and communication together take
least time and the memory suffices, by an integer program (Zheng et al. 2022, section 4.2) that HiGHS solves.

Beyond Alpa's program, a tensor that several operators need in the same form is communicated once, and so is its
gradient, which makes Megatron's two all-reduces per block out of six. Equal blocks share their variables, so that a
model's depth changes figures of the program and not its size.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from phalanx.cost.communication import load
from phalanx.cost.frameworks import PHALANX
from phalanx.errors import DoesNotFitError, JobError
from phalanx.graph.operators import GraphOperator, OperatorGraph, json_of
from phalanx.graph.strategies import Both, Cost, GraphMesh, Strategy, resharding, strategies
from phalanx.nearest import did_you_mean
from phalanx.units import gib

Allowed = Callable[[GraphOperator, Strategy], bool]
Objective = Literal["seconds", "memory"]
GAP = 1e-6
"""Relative gap to the optimum at which HiGHS stops."""
WHOLE = 1e-6
"""Distance from a whole number at which HiGHS takes a value for one."""


@dataclass(frozen=True)
class GraphPlan:
    """A strategy for every operator of a graph on a mesh."""

    graph: OperatorGraph
    mesh: GraphMesh
    chosen: Mapping[str, Strategy]
    """By the operator's name."""
    overlaps: bool = True
    """Whether parameters' gradients are summed while the backward pass computes; stages of a pipeline wait for them in
    every micro-batch."""

    @cached_property
    def compute(self) -> Cost:
        return sum((self.chosen[each.name].cost for each in self.graph.operators), Cost())

    @cached_property
    def edges(self) -> list[tuple[GraphOperator, Both, tuple[str, ...], Cost]]:
        """Every form into which a tensor is brought, with the operators that need it."""
        found = list[tuple[GraphOperator, Both, tuple[str, ...], Cost]]()
        for each in self.graph.operators:
            wanted: dict[Both, list[str]] = defaultdict(list)
            for consumer, place in self.graph.consumers.get(each.name, ()):
                wanted[self.chosen[consumer.name].demands[place]].append(consumer.name)
            given = self.chosen[each.name].output
            if not self.graph.consumers.get(each.name):
                wanted[result_form(given)] = ["the result"]
            found += [
                (each, form, tuple(names), edge(self.graph, self.mesh, each, given, form))
                for form, names in wanted.items()
            ]
        return found

    @cached_property
    def communication(self) -> Cost:
        return sum((cost for *_, cost in self.edges), Cost())

    @cached_property
    def cost(self) -> Cost:
        """The cost of a step. Its seconds are computation plus communication, less their overlap."""
        found = self.compute + self.communication
        overlap = Overlap.of(self.graph, self.mesh)
        hidden = overlap.gain * (found.behind - overlap.exposed(found)) if self.overlaps else 0.0
        return replace(found, seconds=found.seconds - hidden)


@dataclass(frozen=True)
class Overlap:
    """How much of the sums of parameters' gradients the backward pass hides, as in `cost.exposed.step_state`: the last
    one follows it, and the others slow computation down where they take bandwidth between devices."""

    last: float
    """The part of them that follows, and of the backward pass that comes before the first."""
    gain: float
    """Seconds that a hidden second saves."""

    @classmethod
    def of(cls, graph: OperatorGraph, mesh: GraphMesh) -> Overlap:
        late = [each.nbytes for each in graph.operators if is_late(graph, each)]
        loads = [load(mesh.cluster, group, sum(late) / max(1, len(late))) for group in mesh.groups if group.ranks > 1]
        return cls(1 / max(2, len(late)), max(0.0, 1 - (PHALANX.interference - 1) * max(loads, default=0.0)))

    def exposed(self, cost: Cost) -> float:
        """Returns the seconds of a plan's sums that nothing hides."""
        return max(cost.behind * self.last, cost.behind - (1 - self.last) * cost.backward)


def is_late(graph: OperatorGraph, each: GraphOperator) -> bool:
    """Returns whether an operator's gradient is needed at the end of the backward pass alone: that of a parameter with
    one use, which is added to no other."""
    used = len(graph.consumers.get(each.name, ())) == 1
    return each.kind == "parameter" and used and each.name in graph.differentiated


class GraphTooLargeError(DoesNotFitError):
    """No plan of a mesh fits; `needed` is the least bytes per device that one needs."""

    def __init__(self, needed: float, message: str):
        super().__init__(message)
        self.needed = needed


def edge(graph: OperatorGraph, mesh: GraphMesh, each: GraphOperator, given: Both, wanted: Both) -> Cost:
    """Returns what it costs to bring an operator's output into a form."""
    if given == wanted:
        return Cost()
    graded = each.name in graph.differentiated
    return resharding(mesh, each.shape, each.nbytes, given, wanted, graded, is_late(graph, each))


def result_form(given: Both) -> Both:
    """Returns the form of a result: partial sums are reduced, what is split stays split."""
    form = tuple("R" if place == "P" else place for place in given[0])
    return form, form


def solve(
    graph: OperatorGraph,
    mesh: GraphMesh,
    limit: float = np.inf,
    allowed: Allowed | None = None,
    objective: Objective = "seconds",
    in_flight: int = 1,
    overlaps: bool = True,
) -> GraphPlan:
    """Returns the fastest plan that needs at most `limit` bytes on each device, with the activations of `in_flight`
    micro-batches. Raises DoesNotFitError with the least that any plan needs."""
    program = _Program(graph, mesh, allowed, in_flight, overlaps)
    found = program.solve(limit, objective)
    if found is None:
        least = program.solve(np.inf, "memory")
        assert least is not None, "each operator can be replicated"
        needed = least.cost
        parts: Counter[str] = Counter()
        for each in graph.operators:
            parts[
                {"parameter": "parameters, gradients and Adam's state", "input": "inputs"}.get(each.kind, "activations")
            ] += int(least.chosen[each.name].cost.memory)
        parts["gathered copies"] = int(least.communication.memory)
        said = " + ".join(f"{gib(size)} {name}" for name, size in parts.items() if size)
        raise GraphTooLargeError(
            needed.memory,
            f"{graph.name or 'the graph'} on {mesh} devices: {said} = {gib(int(needed.memory))} per device at least, "
            f"more than {gib(int(limit))}; take more devices, a smaller batch, or devices with more memory",
        )
    return found


class _Program:
    """The integer program. Its columns are the strategies of each kind of operator, and what each tensor is brought
    from and into."""

    def __init__(self, graph: OperatorGraph, mesh: GraphMesh, allowed: Allowed | None, in_flight: int, overlaps: bool):
        self.graph, self.mesh, self.in_flight, self.overlaps = graph, mesh, in_flight, overlaps
        same = graph.representatives
        self.counts = Counter(same.values())
        self.options: dict[str, list[Strategy]] = {}
        self.first: dict[str, int] = {}
        self.costs = list[Cost]()
        self.whole = list[bool]()
        self.rows = list[tuple[dict[int, float], float, float]]()
        for name, count in self.counts.items():
            each = graph.by_name[name]
            every = strategies(graph, each, mesh)
            kept = [one for one in every if allowed(each, one)] if allowed else every
            self.options[name] = kept or [one for one in every if not any(one.split)]
            self.first[name] = len(self.costs)
            self._columns([self._kept(each, one.cost).times(count) for one in self.options[name]], whole=True)
            self.rows.append((dict.fromkeys(self._of(name), 1.0), 1.0, 1.0))
        edges: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
        for each in graph.operators:
            users = graph.consumers.get(each.name, ())
            edges[same[each.name], tuple(sorted({(same[user.name], place) for user, place in users}))] += 1
        for (name, users), count in edges.items():
            self._edges(name, users, count)

    def _columns(self, costs: list[Cost], *, whole: bool) -> range:
        begin = len(self.costs)
        self.costs += costs
        self.whole += [whole] * len(costs)
        return range(begin, len(self.costs))

    def _kept(self, each: GraphOperator, cost: Cost) -> Cost:
        """Returns a cost with the memory of every micro-batch in flight."""
        return cost if each.kind == "parameter" else replace(cost, memory=cost.memory * self.in_flight)

    def _of(self, name: str) -> range:
        return range(self.first[name], self.first[name] + len(self.options[name]))

    def _edges(self, name: str, users: tuple[tuple[str, int], ...], count: int) -> None:
        each = self.graph.by_name[name]
        given: dict[Both, list[int]] = defaultdict(list)
        for column, option in zip(self._of(name), self.options[name], strict=True):
            given[option.output].append(column)
        if not users:
            for form, columns in given.items():
                cost = self._kept(each, edge(self.graph, self.mesh, each, form, result_form(form))).times(count)
                for column in columns:
                    self.costs[column] += cost
            return
        shared: dict[tuple[Both, Both], int] = {}
        for user, place in users:
            wanted: dict[Both, list[int]] = defaultdict(list)
            for column, option in zip(self._of(user), self.options[user], strict=True):
                wanted[option.demands[place]].append(column)
            pairs = {
                (one, two): self._kept(each, edge(self.graph, self.mesh, each, one, two)).times(count)
                for one in given
                for two in wanted
            }
            if not any(cost != Cost() for cost in pairs.values()):
                continue
            alone = len(users) == 1
            flows = self._columns([cost if alone else Cost() for cost in pairs.values()], whole=False)
            at = dict(zip(pairs, flows, strict=True))
            for one, columns in given.items():
                self.rows.append(({**{at[one, two]: 1.0 for two in wanted}, **dict.fromkeys(columns, -1.0)}, 0.0, 0.0))
            for two, columns in wanted.items():
                self.rows.append(({**{at[one, two]: 1.0 for one in given}, **dict.fromkeys(columns, -1.0)}, 0.0, 0.0))
            if alone:
                continue
            for pair, cost in pairs.items():
                if cost != Cost():
                    if pair not in shared:
                        (shared[pair],) = self._columns([cost], whole=False)
                    self.rows.append(({shared[pair]: 1.0, at[pair]: -1.0}, 0.0, np.inf))

    def solve(self, limit: float, objective: Objective) -> GraphPlan | None:
        try:
            scipy: Any = importlib.import_module("scipy.optimize")
            coo_array: Any = importlib.import_module("scipy.sparse").coo_array
        except ImportError:
            raise JobError("phalanx plan --graph needs scipy, for HiGHS: pip install 'phalanx[graph]'") from None
        time, _, memory, backward, behind = np.array([astuple(cost) for cost in self.costs]).T
        rows, count = list(self.rows), len(self.costs)
        if self.overlaps and (most := float(behind.sum())):
            # One more column: the part of `most` seconds that is exposed, and at least what Overlap.exposed says.
            overlap = Overlap.of(self.graph, self.mesh)
            for least in (overlap.last * behind, behind - (1 - overlap.last) * backward):
                entries = {column: -value / most for column, value in enumerate(least) if value}
                rows.append(({**entries, count: 1.0}, 0.0, np.inf))
            time, memory = np.append(time - overlap.gain * behind, overlap.gain * most), np.append(memory, 0.0)
        if limit < np.inf:
            rows.append(({column: size / limit for column, size in enumerate(memory) if size}, -np.inf, 1.0))
        places = [(row, column, value) for row, (entries, *_) in enumerate(rows) for column, value in entries.items()]
        at, columns, values = zip(*places, strict=True)
        matrix = coo_array((values, (at, columns)), shape=(len(rows), len(time))).tocsr()
        # Of equally fast plans the one with the least memory.
        wanted = memory / (memory.max() or 1.0) if objective == "memory" else time / (time.max() or 1.0)
        wanted = wanted + (
            1e-7 * memory / (memory.max() or 1.0) if objective == "seconds" else 1e-7 * time / (time.max() or 1.0)
        )
        whole = np.array([*self.whole, *[False] * (len(time) - count)], np.int8)
        given = {
            "bounds": scipy.Bounds(0, 1),
            "constraints": scipy.LinearConstraint(matrix, *np.array([row[1:] for row in rows]).T),
        }
        # Mostly the relaxed program's optimum is whole, and then it is the program's, in a quarter of the time.
        result = scipy.milp(wanted, integrality=0 * whole, **given)
        if result.x is not None and np.any(np.abs(result.x - np.rint(result.x))[whole == 1] > WHOLE):
            result = scipy.milp(wanted, integrality=whole, **given, options={"mip_rel_gap": GAP})
        if result.x is None:
            return None
        picked = {
            name: max(zip(result.x[self.first[name] :], options, strict=False), key=lambda pair: pair[0])[1]
            for name, options in self.options.items()
        }
        return GraphPlan(
            self.graph,
            self.mesh,
            {name: picked[same] for name, same in self.graph.representatives.items()},
            self.overlaps,
        )


def baselines(graph: OperatorGraph) -> dict[str, Allowed]:
    """Returns data parallelism and ZeRO-2 as restrictions: every operator splits the batch; parameters are replicated,
    or split and gathered in every step."""

    def batched(each: GraphOperator, strategy: Strategy) -> bool:
        letter = graph.batch.get(each.name)
        return all(one == letter for one in strategy.split) if letter else not any(strategy.split)

    def data(each: GraphOperator, strategy: Strategy) -> bool:
        return not any(strategy.split) if each.kind == "parameter" else batched(each, strategy)

    def zero(each: GraphOperator, strategy: Strategy) -> bool:
        return all(strategy.split) if each.kind == "parameter" else batched(each, strategy)

    return {"data parallel": data, "ZeRO-2": zero}


def by_hand(graph: OperatorGraph, mesh: GraphMesh, splits: Mapping[str, Sequence[str | None]]) -> Allowed:
    """Returns a plan of the user's as a restriction: the letter that each operator splits on each axis, None where it
    does not, by the operator's name or a pattern of names (`layers.*.up`); a later one wins. The other operators are
    free. Equal operators of equal blocks are split alike.

    Raises JobError with every name that no operator has, and every split that its operator does not allow."""
    stated: dict[str, tuple[str | None, ...]] = {}
    problems: list[str] = []
    for pattern, split in splits.items():
        names = fnmatch.filter(graph.by_name, pattern)
        if not names:
            problems.append(f"--splits: no operator is called {pattern}{did_you_mean(pattern, graph.by_name)}")
        stated |= {graph.representatives[name]: tuple(split) for name in names}
    for name, split in stated.items():
        legal = [each.split for each in strategies(graph, graph.by_name[name], mesh)]
        if split not in legal:
            shown, others = (json.dumps(each) for each in (split, legal))
            problems.append(f"--splits: {name} cannot be split {shown} on {mesh} devices; its splits: {others}")
    if problems:
        raise JobError(problems)
    return lambda each, strategy: stated.get(graph.representatives[each.name], strategy.split) == strategy.split


def read_splits(path: Path) -> dict[str, list[str | None]]:
    """Returns the splits of a JSON file: an object of operators, or a document of `phalanx plan --graph --json`, whose
    best plan counts. Raises NotFoundError, and JobError for a file that is neither."""
    found = json_of("splits", path)
    if isinstance(found, dict) and isinstance(found.get("best"), dict):
        found = found["best"].get("split")
    if not isinstance(found, dict) or not found:
        raise JobError(f'--splits {path}: expected an object such as {{"layers.*.up": ["f"], "layers.*.down": ["f"]}}')
    if wrong := [name for name, split in found.items() if not _is_split(split)]:
        what = "a split is a list with a letter or null for each axis of the mesh"
        raise JobError([f"--splits {path}: {name}: {what}, not {json.dumps(found[name])}" for name in wrong])
    return found


def _is_split(said: object) -> bool:
    return isinstance(said, list) and all(one is None or isinstance(one, str) for one in said)
