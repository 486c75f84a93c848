"""Times of collectives: limits, placement on nodes, and what NCCL was measured to take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.clusters import CLUSTERS, cluster_of
from phalanx.cost.communication import Collective, RankGroup, load, seconds

collectives = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
payloads = st.floats(1e3, 1e11)


@given(st.sampled_from(sorted(CLUSTERS)), collectives, payloads, st.integers(0, 8))
def test_a_group_of_one_costs_nothing_and_more_bytes_cost_more(
    name: str, collective: Collective, payload: float, power: int
) -> None:
    cluster = replace(CLUSTERS[name], nodes=64)
    group = RankGroup(2**power)
    one = seconds(cluster, collective, payload, group)
    assert one == 0 if power == 0 else one > 0
    assert seconds(cluster, collective, 2 * payload, group) >= one


@given(payloads, st.sampled_from([2, 4, 8]))
def test_strided_groups_are_slower_than_neighbours(payload: float, ranks: int) -> None:
    """Galvatron measured 7 to 18 times less bandwidth for groups across nodes."""
    cluster = cluster_of("dgx-a100:16")
    assert seconds(cluster, "all_reduce", payload, RankGroup(ranks, 8)) > seconds(
        cluster, "all_reduce", payload, RankGroup(ranks)
    )


@given(payloads, st.sampled_from([16, 64, 512]))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_at_most(payload: float, ranks: int) -> None:
    cluster = cluster_of("dgx-a100:64")
    halves = sum(seconds(cluster, kind, payload, RankGroup(ranks)) for kind in ("reduce_scatter", "all_gather"))
    assert seconds(cluster, "all_reduce", payload, RankGroup(ranks)) <= halves


@pytest.mark.parametrize(("mebibytes", "microseconds"), [(16, 231), (64, 580), (256, 2158), (1024, 8196)])
def test_eight_a100_as_measured(mebibytes: int, microseconds: float) -> None:
    """NCCL on eight A100 with NVLink: four points of vTrain's tables (trace/*_LUT)."""
    found = seconds(CLUSTERS["dgx-a100"], "all_reduce", mebibytes * 2**20, RankGroup(8))
    assert found * 1e6 == pytest.approx(microseconds, rel=0.15)


def test_an_all_gather_over_256_h100_as_measured() -> None:
    """NVIDIA/nccl, issue 1218: 2 GB over 32 nodes pass at 200 GB/s, where large tensors reach 340."""
    cluster = cluster_of("dgx-h100:32")
    large, two = (
        payload * 255 / 256 / seconds(cluster, "all_gather", payload, RankGroup(256)) / 1e9
        for payload in (1e12, 2 * 2**30)
    )
    assert large == pytest.approx(340, rel=0.02)
    assert two == pytest.approx(200, rel=0.05)


def test_what_waits_for_the_next_step_of_a_ring_slows_nothing_down() -> None:
    cluster = cluster_of("dgx-h100:32")
    large, small = (load(cluster, RankGroup(256), payload) for payload in (1e12, 1e8))
    assert 0 < small < large / 5 < large <= 1
    assert load(cluster, RankGroup(1), 1e9) == 0


def test_the_switch_halves_an_all_reduce() -> None:
    h100 = CLUSTERS["dgx-h100"]
    plain = replace(h100, intra=replace(h100.intra, reduces=False))
    ratio = seconds(plain, "all_reduce", 1e10, RankGroup(8)) / seconds(h100, "all_reduce", 1e10, RankGroup(8))
    assert 1.6 < ratio < 2.0


def test_ranks_of_one_node_share_the_cards_of_that_node() -> None:
    """Eight ranks a node send over eight cards, one rank a node over one."""
    cluster = cluster_of("dgx-a100:4")
    wide = seconds(cluster, "all_gather", 1e10, RankGroup(32))
    narrow = seconds(cluster, "all_gather", 1e10, RankGroup(4, 8))
    assert 6 < narrow / wide < 9


def test_beyond_a_pod_bandwidth_is_shared_where_many_rings_leave_it() -> None:
    cluster = cluster_of("meta-h100:2048")
    near = seconds(cluster, "send", 1e9, RankGroup(2, 8))
    assert near == pytest.approx(1e9 / (50e9 * 0.85), rel=0.01)
    one_a_pod = seconds(cluster, "all_gather", 1e10, RankGroup(4, 3072))
    many_a_pod = seconds(cluster, "all_gather", 1e10, RankGroup(64, 128))
    assert one_a_pod > 3 * many_a_pod


def test_links_that_are_not_described_take_no_time_but_their_latency() -> None:
    only_inter = replace(CLUSTERS["dgx-a100"], nodes=4, intra=replace(CLUSTERS["dgx-a100"].intra, gbs=0))
    assert 0 < seconds(only_inter, "all_to_all", 1e9, RankGroup(32)) < 1
    assert 0 < seconds(only_inter, "all_gather", 1e9, RankGroup(8)) < 1e-3
