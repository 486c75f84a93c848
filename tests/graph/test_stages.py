"""Pipeline stages of graphs: the dynamic program against brute force over all cuts and sub-meshes."""

from __future__ import annotations

from itertools import combinations, product

import graph_models
import pytest

from phalanx.config.clusters import cluster_of
from phalanx.errors import DoesNotFitError
from phalanx.graph.operators import parse_graph
from phalanx.graph.stages import _cheapest, layers_of, pipeline, sizes_of

pytest.importorskip("scipy")
NODE = cluster_of("dgx-h100:1")
GPT = parse_graph(graph_models.gpt(4, b=1, s=512, h=1024))[0]


def test_the_dynamic_program_finds_the_cheapest_stages():
    layers, devices, sizes = 4, 8, (1, 2, 4, 8)
    table = {
        (begin, end, size): (end - begin) / size**0.8 + (7 * begin + 3 * end + size) % 5 / 10
        for begin in range(layers)
        for end in range(begin + 1, layers + 1)
        for size in sizes
    }
    ways = [
        [*zip((0, *cuts), (*cuts, layers), chosen, strict=True)]
        for stages in range(1, layers + 1)
        for cuts in combinations(range(1, layers), stages - 1)
        for chosen in product(sizes, repeat=stages)
        if sum(chosen) == devices
    ]
    for slowest in sorted(table.values()):
        sums = [sum(map(table.get, way)) for way in ways if max(map(table.get, way)) <= slowest]
        assert _cheapest(table, layers, devices, slowest)[0] == pytest.approx(min(sums, default=float("inf")))


def test_layers_are_runs_of_whole_blocks():
    layers = layers_of(GPT, NODE, most=2)
    assert [each.name for layer in layers for each in layer if each.kind != "parameter"] == [
        each.name for each in GPT.operators if each.kind != "parameter"
    ]
    assert len(layers) == 2
    assert not {each.block for each in layers[0] if each.block} & {each.block for each in layers[1]}


def test_sub_meshes_are_parts_of_a_node_or_whole_nodes():
    assert sizes_of(32, 8) == [1, 2, 4, 8, 16, 32]
    assert sizes_of(6, 6) == [1, 2, 6]


def test_stages_take_all_devices_and_cover_the_graph():
    plan = pipeline(GPT, NODE, 4, 70 * 2**30, micro_batches=16, most=4)
    assert plan.devices == 4
    assert len(plan.stages) > 1
    names = [each.name for stage in plan.stages for each in stage.graph.operators if each.kind != "input"]
    assert sorted(names) == sorted(each.name for each in GPT.operators if each.kind != "input")
    alone = pipeline(GPT, NODE, 4, 70 * 2**30, micro_batches=1, most=1)
    assert plan.seconds < 16 * alone.seconds


def test_stages_that_do_not_fit_say_what_they_need():
    with pytest.raises(DoesNotFitError, match="per device at least"):
        pipeline(GPT, NODE, 2, 2**20, micro_batches=2, most=2)
