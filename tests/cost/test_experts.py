"""Recipes of models with experts: host, CUDA graphs, overlapped traffic, recomputed modules, attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.blocks.kinds import block, block_kinds
from phalanx.blocks.operator import Place
from phalanx.check.load import load_words
from phalanx.config.overrides import parse
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import FRAMEWORKS
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import predict
from phalanx.cost.rank_time import GRAPHED, REPEATED, exposed_share, launch_seconds, repeated_seconds
from phalanx.cost.spec import StepSpec
from phalanx.validation.row import read

MEGATRON_CORE = FRAMEWORKS["megatron-core"]

ROW = {
    "source": "NVIDIA-NeMo/Megatron-Bridge",
    "model_name": "Qwen3_30B_a3B",
    "gpu": "B200",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "tp": "1",
    "pp": "1",
    "ep": "8",
    "seq_len": "4096",
    "micro_batch": "1",
    "global_batch_seqs": "512",
    "precision": "MXFP8",
    "notes": "26.02 NeMo Container",
}


def spec(**framework: Any) -> StepSpec:
    found = read(ROW).spec
    return replace(found, framework=replace(found.framework, **framework))


def repeating(*modules: str) -> StepSpec:
    return spec(memory_profile=replace(spec().framework.memory_profile, repeats=modules))


def seconds(**framework: Any) -> float:
    return predict(spec(**framework)).step_time_s


def test_without_graphs_small_micro_batches_wait_for_the_host():
    times = [seconds(graphs=graphs) for graphs in ("none", "router", "attention and router", "iteration")]
    assert times == sorted(times, reverse=True)
    assert times[0] > 2 * times[-1]
    per_block = times[0] / 64 / 48
    assert sum(launch_seconds(spec(graphs="none")) or ()) == pytest.approx(per_block, rel=0.05)
    assert all(0 <= share <= 1 for share in GRAPHED.values())


def test_only_traffic_beyond_the_computation_is_exposed():
    one = spec(ep_overlaps=True, ep_cores=0)
    alone = 1 / one.batch.accumulation
    assert exposed_share(one, 1.0, 2.0) == pytest.approx(alone)
    assert exposed_share(one, 2.0, 1.0) == pytest.approx(alone + (1 - alone) / 2)
    assert exposed_share(spec(ep_overlaps=True, ep_cores=32), 1.0, 2.0) > alone
    assert exposed_share(spec(ep_overlaps=False), 1.0, 2.0) == 1
    assert seconds(graphs="iteration", ep_overlaps=True) < seconds(graphs="iteration", ep_overlaps=False)


def test_traffic_beside_the_other_half_hides_less_in_split_backward_passes():
    def exposed(*words: str) -> float:
        layout = "dp_shard=8 tp=4 sp=true ep=32 etp=1 pp=8 zero=2 micro_batch=2 train.global_batch=1024"
        asked = f"model=deepseek-v3 cluster=dgx-h200:32 train.precision=bf16 {layout}".split()
        job = load_words(parse([*asked, *words])).job
        return predict(step_spec(job, 129280)).parts.exposed["ep"]

    alone, whole, split = (
        exposed(*words) for words in ([], ["ep_overlap=true"], ["ep_overlap=true", "schedule=zb_h1"])
    )
    assert whole < split < alone


def test_recomputed_modules_take_their_share_of_a_forward_pass():
    kind = next(kind for kind in block_kinds(spec().model) if kind.routed)
    parts = {module: repeated_seconds(repeating(module), kind) for module in REPEATED}
    assert parts["moe"][0] > parts["moe_act"][0] > 0
    assert parts["moe"][1] > 0 == parts["layernorm"][1]
    assert parts["mla_up_proj"] == parts["mlp"] == (0, 0)
    both = repeated_seconds(repeating("moe", "layernorm"), kind)
    assert both[0] == pytest.approx(parts["moe"][0] + parts["layernorm"][0])


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        ({"narrow_attention": True}, {"narrow_attention": False}),
        ({"fused_experts": True}, {"fused_experts": False}),
        ({"moe_cast_bytes": 3.0}, {"moe_cast_bytes": 10.0}),
    ],
)
def test_fewer_bytes_and_narrower_products_take_less(faster: dict[str, Any], slower: dict[str, Any]):
    assert seconds(graphs="iteration", **faster) < seconds(graphs="iteration", **slower)


def test_windows_without_a_fused_kernel_write_their_scores():
    row = ROW | {"model_name": "GPT OSS 120B", "n_gpus": "64", "micro_batch": "4", "precision": "BF16"}
    found = read(row).spec
    assert found.framework.windows == "unfused"
    fused = replace(found, framework=replace(found.framework, windows="flash"))
    assert predict(fused).step_time_s < predict(found).step_time_s


def test_whole_experts_have_the_products_of_their_ranks_and_the_rows_of_one() -> None:
    model = PRESETS["qwen3-30b-a3b"]
    place = Place(model, tp=2, sp=True, ep=8, profile=MEGATRON_CORE.memory_profile)
    whole = Place(model, ep=16, profile=MEGATRON_CORE.memory_profile)
    for name in ("experts.up", "experts.down"):
        one, other = (
            next(operator for operator in block(where, block_kinds(model)[0]) if operator.name == name)
            for where in (place, whole)
        )
        folded, alone = one.product(2, 8, folds=True), other.product(1, 16)
        assert folded is not None
        assert alone is not None
        assert (folded.n, folded.k, folded.number) == (alone.n, alone.k, alone.number)
        assert 2 * folded.m == alone.m  # as many tokens come from each rank as tensor ranks leave it
        parted = one.product(2, 8)
        assert parted is not None
        assert parted.flops == folded.flops


def test_a_map_of_tokens_and_experts_is_gathered() -> None:
    assert seconds(ep_once=True, ep_maps=True, graphs="iteration") > seconds(
        ep_once=True, ep_maps=False, graphs="iteration"
    )
    assert seconds(ep_once=False, ep_maps=True) == seconds(ep_once=False, ep_maps=False)


def test_blocks_in_16_bits_take_longer() -> None:
    none, some, every = (seconds(wide_blocks=share, graphs="iteration") for share in (0.0, 0.2, 1.0))
    assert none < some < every


def test_a_capacity_leaves_nothing_to_read() -> None:
    one = spec(ep_once=False, graphs="none")
    dropping = replace(one, model=replace(one.model, moe=replace(one.model.moe, capacity=1.0)))
    assert sum(launch_seconds(dropping) or ()) < sum(launch_seconds(one) or ())
