"""Why a layout was chosen: the right reason on each fabric, with figures."""

from __future__ import annotations

import re

from covering import unless_whole
from phalanx.plan.alternatives import AXES
from phalanx.plan.planner import search
from plan.answers import planned, request, slow_network


def test_the_fabric_is_named() -> None:
    assert any("Links of 450 GB/s per device join the 8 devices of a node" in note for note in _notes("dgx-h100:4"))
    aurora = " ".join(_notes("aurora:4"))
    assert "Links of 185 GB/s per device join only 2 neighbours of the 12 devices of a node" in aurora
    assert "beyond, there are 16.7 GB/s per device" in aurora
    assert any("72 devices of a rack" in note for note in _notes("gb200-nvl72:36"))
    assert any("join all 8 devices" in note for note in _notes("dgx-h100:1"))


def test_every_axis_says_where_it_lies() -> None:
    for cluster in ("polaris:16", "dgx-h100:4"):
        plan = planned("llama3-70b", cluster, 128)
        for axis in AXES:
            degree = getattr(plan.best[0].layout, axis)
            said = any(re.search(rf"\b{axis} {degree}\b.* (on|across) the", note) for note in plan.notes)
            assert said == (degree > 1), (axis, plan.notes)


def test_tensor_ranks_on_fast_links_say_what_the_network_would_take() -> None:
    plan = search(request("llama3-70b", slow_network(8), 128, schedule="1f1b", tp=8))
    (note,) = [note for note in plan.notes if note.startswith("tp 8 runs")]
    assert "on the fast links (450 GB/s)" in note
    here, there = (float(found.replace(",", "")) for found in re.findall(r"([\d.,]+) s\b", note))
    assert there > 10 * here


def test_what_goes_wrong_without_an_axis_is_told() -> None:
    plan = planned("llama3-70b", slow_network(8), 128)
    cut = [name for axis, name in AXES.items() if getattr(plan.best[0].layout, axis) > 1]
    told = " ".join(note for note in plan.notes if " found without " in note)
    assert all(name in told for name in cut)


def test_what_bounds_a_step_adds_up() -> None:
    first, *_ = planned("llama3-70b", "polaris:16", 128).notes
    shares = [float(share) for share in re.findall(r"([\d.]+)% (?:computing|exposed|pipeline)", first)]
    assert 98.5 < sum(shares) < 100.2


def test_recomputation_says_what_it_saves() -> None:
    plan = search(request("llama3-70b", "dgx-h100:8", 256, dp_shard=64))
    assert plan.best
    layout = plan.best[0].layout
    assert layout.recompute != "none" or layout.recompute_cut
    assert any("without recomputation it would be" in note for note in plan.notes)


def test_where_nothing_fits_so_many_devices_would_be_enough() -> None:
    fixed = unless_whole(cp=1, schedule="1f1b", accumulate="local")
    plan = search(request("llama3-70b", "dgx-h100:1", 16, offload="none", **fixed))
    assert not plan.best
    (note,) = plan.notes
    found = re.match(r"It fits on (\d+) of these devices, (\d+) times as many", note)
    assert found
    world, more = map(int, found.groups())
    assert world == 8 * more
    assert search(request("llama3-70b", f"dgx-h100:{more}", 16, offload="none", **fixed)).best


def test_no_number_of_devices_is_promised_to_fixed_degrees() -> None:
    plan = search(request("llama3-70b", "dgx-h100:1", 16, dp_shard=8, dp_replicate=1, tp=1, cp=1, pp=1, offload="none"))
    assert not plan.best
    assert not plan.notes


def test_where_nothing_fits_otherwise_the_optimizer_is_offloaded() -> None:
    plan = search(request("llama3-70b", "dgx-h100:1", 16, **unless_whole(cp=1, schedule="1f1b")))
    assert plan.best[0].layout.offload == "optimizer"
    assert plan.notes[0].startswith("Without offload none of ")


def test_a_layer_too_large_to_be_gathered_whole_runs_in_tiles() -> None:
    plan = search(request("megatron-1008b", "dgx-a100:64", 512, tp=1, pp=1, cp=1, offload="none"))
    assert plan.best[0].layout.tiles == 4
    assert plan.best[0].layout.tile == "all"
    assert re.match(r"Without tiles none of [\d,]+ layouts fits: 4 of a layer's matrices", plan.notes[0])


def _notes(cluster: str) -> tuple[str, ...]:
    return planned("llama3-8b", cluster, 288).notes


def test_selective_recomputation_that_saves_nothing_is_told() -> None:
    plan = search(request("llama3-8b", "dgx-h100:1", 64, recompute="selective", cp=1))
    assert any("recompute=selective saves nothing here" in note for note in plan.notes)
