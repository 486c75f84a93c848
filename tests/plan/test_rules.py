"""The rules of thumb, where somebody knows what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.config.cluster import Cluster
from phalanx.config.clusters import cluster_of
from phalanx.cost.rank_memory import needed_bytes
from phalanx.plan.alternatives import fitted, rule
from plan.answers import request, slow_network

ONE = replace(cluster_of("dgx-h100:1"), devices_per_node=1)


def test_a_small_model_on_one_node_is_data_parallel() -> None:
    words, layout = rule(request("gpt2", "dgx-h100:1", 512))
    assert layout.dp_replicate == layout.world == 8
    assert "DDP" in words
    assert layout.micro_batch > 1  # as many as fit


def test_8b_on_one_node_shards_as_little_as_fits() -> None:
    words, layout = rule(request("llama3-8b", "dgx-h100:1", 64))
    assert (layout.dp_shard, layout.tp, layout.pp) == (8, 1, 1)
    assert "a whole copy does not fit" in words
    assert "ZeRO-" in words


def test_slow_links_in_a_node_make_a_pipeline() -> None:
    words, layout = rule(request("llama2-7b", "a100-pcie:1", 64))
    assert layout.pp > 1
    assert layout.tp == 1
    assert "slow links (32 GB/s" in words


def test_a_fast_network_takes_fsdp_where_it_fits() -> None:
    words, layout = rule(request("llama3-70b", "dgx-h100:16", 512))
    assert layout.dp_shard == layout.world == 128
    assert layout.zero == 3
    assert "fast network (50 GB/s per device): FSDP" in words


@pytest.mark.parametrize(("nodes", "sequences", "why"), [(64, 1024, "does not fit"), (128, 512, "is not legal")])
def test_405b_takes_tensor_ranks_and_a_pipeline(nodes: int, sequences: int, why: str) -> None:
    words, layout = rule(request("llama3-405b", f"dgx-h100:{nodes}", sequences))
    assert layout.tp == 8
    assert layout.pp > 1
    assert layout.zero == 1
    assert f"FSDP over all devices {why}" in words


@pytest.mark.parametrize(("cluster", "tp"), [("polaris:48", 4), (slow_network(24), 8)])
def test_slow_networks_take_tensor_ranks_in_a_node_and_zero_one(cluster: str | Cluster, tp: int) -> None:
    words, layout = rule(request("llama3-70b", cluster, 384))
    assert (layout.tp, layout.zero) == (tp, 1)
    assert "slow network" in words


def test_one_device_is_plain_or_hopeless() -> None:
    words, layout = rule(request("gpt2", ONE, 16))
    assert layout.world == 1
    assert words.startswith("one device, and the model fits: plain")
    words, layout = rule(request("llama3-8b", ONE, 16))
    assert layout.offload == "optimizer"
    assert "the model does not fit: optimizer state and its update on the host" in words
    assert "nor with offload=all" in rule(request("llama3-70b", ONE, 16))[0]
    assert "without tiling" in rule(request("megatron-1008b", ONE, 16))[0]


def test_a_block_that_heads_do_not_cut_runs_in_tiles() -> None:
    one = request("llama3-8b", "dgx-v100:1", 64, offload="none")
    wide = replace(one.model, d_model=16_384, n_heads=7, n_kv_heads=7, head_dim=2048, d_ff=65_536, n_layers=2)
    words, layout = rule(replace(one, model=replace(wide, vocab_size=512)))
    assert "ZeRO-3, large layers in 4 tiles" in words
    assert (layout.tiles, layout.tile) == (4, "all")


def test_where_nothing_fits_the_words_say_so() -> None:
    words, layout = rule(request("llama3-405b", "dgx-h100:1", 8))
    assert "no layout of the rules fits" in words
    assert layout.world == 8


def test_what_is_taken_is_legal_and_fits() -> None:
    for model, cluster, sequences in (("mixtral-8x7b", "dgx-h100:4", 256), ("llama3-70b", "aurora:16", 384)):
        asked = request(model, cluster, sequences)
        _, layout = rule(asked)
        assert not asked.problems(layout)
        assert needed_bytes(asked.spec(layout)) <= asked.cluster.accelerator.memory_gib * 2**30


def test_what_is_fixed_stays() -> None:
    asked = request("llama3-8b", "dgx-h100:1", 64, recompute="selective", loss_chunk=1024)
    found = fitted(asked, rule(asked)[1])
    assert found is not None
    assert (found.recompute, found.loss_chunk) == ("selective", 1024)
