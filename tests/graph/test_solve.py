"""The integer program against brute force, and what it finds for a transformer."""

from __future__ import annotations

from itertools import product
from math import inf, prod

import graph_models
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from phalanx.config.clusters import cluster_of
from phalanx.errors import DoesNotFitError, JobError
from phalanx.graph.operators import OperatorGraph, parse_graph
from phalanx.graph.solve import GraphPlan, Overlap, baselines, by_hand, is_late, solve
from phalanx.graph.strategies import GraphMesh, path, strategies

pytest.importorskip("scipy")
NODE = cluster_of("dgx-h100:1")
PRODUCTS = ("ab,bc->ac", "ab,cb->ac", "ba,bc->ac")


def graph_of(document: dict) -> OperatorGraph:
    graph, problems = parse_graph(document)
    assert not problems
    return graph


@st.composite
def small_graphs(draw: st.DrawFn) -> OperatorGraph:
    """Returns two products with something between them, and a second use of a tensor or none."""
    size = st.sampled_from([64, 512, 4096, 6])
    a, b, c, d = (draw(size) for _ in range(4))
    kind = draw(st.sampled_from(["compute", "view"]))
    operators = [
        {"name": "x", "kind": "input", "shape": [a, b]},
        {"name": "w", "kind": "parameter", "shape": [b, c]},
        {"name": "y", "einsum": "ab,bc->ac", "inputs": ["x", "w"]},
        {"name": "f", "kind": kind, "einsum": "ac->ac", "inputs": ["y"], "whole": draw(st.sampled_from(["", "c"]))},
        {"name": "v", "kind": "parameter", "shape": [c, d]},
        {"name": "z", "einsum": "ac,cd->ad", "inputs": ["f", "v"]},
    ]
    if draw(st.booleans()):
        operators.append({"name": "t", "einsum": "ac,ac->a", "inputs": ["f", "y"]})
    return graph_of({"format": "phalanx-graph-1", "operators": operators})


@given(small_graphs(), st.sampled_from([(2,), (8,), (2, 2)]), st.sampled_from([inf, 1.0, 1.3]))
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_the_program_finds_what_brute_force_finds(graph, sizes, tightness):
    mesh = GraphMesh(NODE, sizes)
    names = [each.name for each in graph.operators]
    options = [strategies(graph, each, mesh) for each in graph.operators]
    # Inputs and weights of equal operators are tried in the form that the next operator wants, and replicated.
    assume(prod(map(len, options)) <= 30_000)
    costs = [GraphPlan(graph, mesh, dict(zip(names, chosen, strict=True))).cost for chosen in product(*options)]
    limit = min(cost.memory for cost in costs) * tightness if tightness < inf else inf
    best = min(cost.seconds for cost in costs if cost.memory <= limit * (1 + 1e-9))
    found = solve(graph, mesh, limit * (1 + 1e-9))
    assert found.cost.memory <= limit * (1 + 1e-6)
    assert found.cost.seconds == pytest.approx(best, rel=1e-4)


def test_a_backward_pass_hides_the_sums_of_gradients_but_the_last():
    """Exposed is the larger of the last sum and what the backward pass leaves; a pipeline's stages hide nothing."""
    graph, node = graph_of(graph_models.gpt(4, b=64)), GraphMesh(NODE, (8,))
    plan = solve(graph, node, allowed=baselines(graph)["data parallel"])
    waiting = solve(graph, node, allowed=baselines(graph)["data parallel"], overlaps=False)
    whole = plan.compute + plan.communication
    late = sum(is_late(graph, each) for each in graph.operators)
    assert late > 10
    assert whole.behind == pytest.approx(whole.seconds - plan.compute.seconds, rel=0.05)
    exposed = max(whole.behind / late, whole.behind - (1 - 1 / late) * whole.backward)
    assert waiting.cost.seconds == pytest.approx(whole.seconds)
    assert whole.behind - exposed > 0
    assert plan.cost.seconds == pytest.approx(whole.seconds - Overlap.of(graph, node).gain * (whole.behind - exposed))
    assert plan.cost.sent == waiting.cost.sent


def split(plan: GraphPlan, *names: str) -> list[str]:
    graph = plan.graph
    return [plan.chosen[f"layers.0.{name}"].words(graph.by_name[f"layers.0.{name}"]) for name in names]


def test_it_finds_megatrons_split_of_a_transformer_by_itself():
    plan = solve(graph_of(graph_models.gpt(4, b=1)), GraphMesh(NODE, (8,)), 80e9)
    assert split(plan, "q", "attention", "proj", "up", "gelu", "down") == ["f", "n", "P(f)", "f", "f", "P(f)"]
    kinds = [
        change.collective
        for each, form, _, _ in plan.edges
        if each.block == "layers.1"
        for given, wanted in [(plan.chosen[each.name].output, form)]
        for change in (
            *path(plan.mesh, each.shape, each.nbytes, given[0], wanted[0]),
            *path(plan.mesh, each.shape, each.nbytes, wanted[1], given[1]),
        )
    ]
    assert kinds == ["all_reduce"] * 4  # two forward, two backward


def test_it_finds_sequence_parallelism_where_memory_is_short():
    plan = solve(graph_of(graph_models.gpt(4, b=1)), GraphMesh(NODE, (8,)), 2.6 * 2**30)
    assert split(plan, "norm1", "q", "proj", "add1", "norm2", "down") == ["s", "f", "P(f)", "s", "s", "P(f)"]


def test_too_little_memory_names_the_least_that_fits():
    with pytest.raises(
        DoesNotFitError, match=r"parameters, gradients.* = 2\.5GiB per device at least, more than 1\.0GiB"
    ):
        solve(graph_of(graph_models.gpt(4, b=1)), GraphMesh(NODE, (8,)), 2**30)


def test_equal_blocks_are_one_in_the_program_which_splits_the_batch_between_nodes():
    graphs = [graph_of(graph_models.gpt(layers, b=8)) for layers in (4, 48)]
    assert len({len(set(graph.representatives.values())) for graph in graphs}) == 1
    plan = solve(graphs[1], GraphMesh(cluster_of("dgx-h100:8"), (8, 8)), 80e9)
    assert {plan.chosen[f"layers.{layer}.up"] for layer in range(48)} == {plan.chosen["layers.0.up"]}
    assert split(plan, "q", "attention", "proj", "up", "down") == ["b | f", "b | n", "b | P(f)", "b | f", "b | P(f)"]


MEGATRON = {"layers.*.[qkv]": ["f"], "layers.*.proj": ["f"], "layers.*.up": ["f"], "layers.*.down": ["f"]}


def test_a_plan_by_hand_is_a_restriction_of_the_program():
    graph, mesh = graph_of(graph_models.gpt(4, b=8)), GraphMesh(NODE, (8,))
    best = solve(graph, mesh)
    own = {name: strategy.split for name, strategy in best.chosen.items()}
    assert solve(graph, mesh, allowed=by_hand(graph, mesh, own)).cost == best.cost
    hand = solve(graph, mesh, allowed=by_hand(graph, mesh, MEGATRON))
    assert split(hand, "q", "proj", "up", "down") == ["f", "P(f)", "f", "P(f)"]
    assert hand.cost.seconds > best.cost.seconds  # a batch of 8 on 8 devices is better split


def test_an_illegal_plan_by_hand_is_refused_with_every_problem():
    graph, mesh = graph_of(graph_models.gpt(1, b=8)), GraphMesh(NODE, (8,))
    with pytest.raises(JobError) as raised:
        by_hand(graph, mesh, {"layers.0.upp": ["f"], "layers.0.up": ["x"], "layers.0.down": ["f", "f"]})
    said = str(raised.value)
    assert "no operator is called layers.0.upp; did you mean layers.0.up?" in said
    assert 'layers.0.up cannot be split ["x"] on 8 devices; its splits: [[null], ["b"]' in said
    assert 'layers.0.down cannot be split ["f", "f"]' in said
