"""Plans run on gloo ranks: equal to one process in float64, and the bytes that the objective counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import graph_modules
import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from covering import WHOLE
from phalanx.config.clusters import cluster_of
from phalanx.graph.execute import PlannedModule, StagedModule, compare
from phalanx.graph.export import export_graph
from phalanx.graph.operators import OperatorGraph, parse_graph
from phalanx.graph.solve import GraphPlan, baselines, solve
from phalanx.graph.stages import layers_of, part_of
from phalanx.graph.strategies import GraphMesh, strategies

pytest.importorskip("scipy")
NAMES = [*graph_modules.examples()]


def made(name: str) -> graph_modules.Example:
    torch.manual_seed(0)
    module, args = graph_modules.examples()[name]()
    return module.double(), tuple(each.double() if each.is_floating_point() else each for each in args)


@cache
def graph_of(name: str) -> OperatorGraph:
    return export_graph(*made(name), name).graph


def plans(graph: OperatorGraph, sizes: tuple[int, ...]) -> Iterator[GraphPlan]:
    """Returns the fastest plan, the one of least memory, those of data parallelism and ZeRO, and arbitrary ones that
    take the strategies of each operator in turn: on two dimensions one of these, with `make whole` two."""
    mesh = GraphMesh(cluster_of("dgx-h100:1"), sizes, direct=False)
    yield solve(graph, mesh)
    if len(sizes) == 1:
        yield solve(graph, mesh, objective="memory")
        yield from (solve(graph, mesh, allowed=allowed) for allowed in baselines(graph).values())
    for turn in range(2 if WHOLE or len(sizes) == 1 else 1):
        count = itertools.count(turn)
        options = {each.name: strategies(graph, each, mesh) for each in graph.operators}
        yield GraphPlan(graph, mesh, {name: every[next(count) * 7 % len(every)] for name, every in options.items()})


def planned(name: str, sizes: tuple[int, ...]) -> list[GraphPlan]:
    return [*plans(graph_of(name), sizes)]


def check(ranks: Any, name: str, every: list[GraphPlan]) -> list[dict[str, Any]]:
    exported = export_graph(*made(name))
    return [found for plan in every if not (found := compare(*made(name), exported, plan))["ok"]]


@pytest.mark.parametrize("name", NAMES)
def test_any_plan_computes_what_one_process_does_and_sends_what_it_counts(ranks, name):
    assert ranks(check, 2, name, planned(name, (2,))) == [[], []]


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_so_it_does_on_two_dimensions(ranks, name):
    assert ranks(check, 4, name, planned(name, (2, 2))) == [[]] * 4


def trained(ranks: Any, name: str, plan: GraphPlan) -> list[float]:
    """Takes steps with sums of gradients that may still be under way when the backward pass returns. Returns the losses
    of one process, and those of the plan."""
    alone, args = made(name)
    run = PlannedModule(made(name)[0], export_graph(alone, args), plan, init_device_mesh("cpu", plan.mesh.sizes))
    late, losses = list[bool](), list[float]()
    for module in (alone, run):
        parameters = [*module.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(*args)
            loss.backward()
            grads = [each.grad._local_tensor for each in parameters if isinstance(each.grad, DTensor)]
            late.append(any(isinstance(each, AsyncCollectiveTensor) for each in grads))
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            losses.append(loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item())
    assert late == [False] * 3 + [True] * 3
    return losses


def test_late_gradients_arrive_before_they_are_used(ranks):
    """Clipping and the optimizer wait for them: three steps are those of one process."""
    graph = export_graph(*made("mixer")).graph
    mesh = GraphMesh(cluster_of("dgx-h100:1"), (2,), direct=False)
    plan = solve(graph, mesh, allowed=baselines(graph)["data parallel"])
    for losses in ranks(trained, 2, "mixer", plan):
        assert losses[3:] == pytest.approx(losses[:3], rel=1e-9)


def staged(ranks: Any, name: str, stages: list[GraphPlan]) -> list[str]:
    alone, args = made(name)
    exported = export_graph(alone, args)
    run = StagedModule(made(name)[0], exported, stages)
    for _ in range(2):  # micro-batches
        loss = alone(*args)
        loss.backward()
        found = run.step(args)
        assert found is None or torch.allclose(found, loss, rtol=1e-9, atol=0)
    own = dict(run.run.module.named_parameters())
    mine = [name for name, each in own.items() if isinstance(each, DTensor)]
    for path in mine:
        one, two = alone.get_parameter(path).grad, own[path].grad.full_tensor()
        assert (two - one).abs().max() <= 1e-9 * one.abs().max().clamp(min=1e-3), path
    return mine


@pytest.mark.parametrize("name", ["gpt", "mixer"])
def test_stages_on_meshes_of_their_own_compute_what_one_process_does(ranks, name):
    graph, node = graph_of(name), cluster_of("dgx-h100:1")
    layers = layers_of(graph, node, 2)
    stages = [
        solve(part_of(graph, [layer]), GraphMesh(node, (size,), direct=False), objective="memory")
        for layer, size in zip(layers, (1, 2), strict=True)
    ]
    first, *rest = ranks(staged, 3, name, stages)
    assert {*first, *rest[0]} == {path for path, _ in made(name)[0].named_parameters()}
    assert not {*first} & {*rest[0]}


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_of_the_modules_is_known_and_written_as_json(name):
    graph = graph_of(name)
    assert not graph.notes
    again, problems = parse_graph(graph.as_json())
    assert not problems
    assert again.operators == graph.operators
