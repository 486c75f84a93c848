"""Activations and parameters on the host: equal to one process, counted as predicted, within a budget."""

import os
from dataclasses import replace

import pytest

from parallel.steps import steps, worst
from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.parameters import count
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.held import block_parameters
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.errors import RunError
from train.test_offload import DEEP, EXPERTS, GPT, VOCAB, counted, job_of

FOUR = replace(GPT, n_layers=4)
LONG = ModelConfig(n_layers=8, d_model=64, n_heads=4, seq_len=128, vocab_size=VOCAB)
"""A model whose activations weigh more than its parameters."""
FEW = [
    Layout(recompute="selective"),
    Layout(dp_shard=2, zero=3, recompute="full", micro_batch=2),
    Layout(pp=2, micro_batch=1, schedule="zb_h1"),
]
MANY = [
    Layout(),
    Layout(recompute="full"),
    Layout(micro_batch=2),
    Layout(dp_replicate=2),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_shard=2, micro_batch=2, accumulate="sharded"),
    Layout(dp_shard=2, reshard=False),
    Layout(dp_shard=2, tiles=2, tile="all"),
    Layout(dp_shard=2, ep=2),
    Layout(dp_shard=2, tp=2, sp=True),
    Layout(tp=2, sp=True, sp_regather=True, recompute="selective"),
    Layout(cp=2),
    Layout(cp=2, cp_ulysses=2),
    Layout(pp=2, micro_batch=1),
    Layout(pp=2, micro_batch=1, dp_shard=2, recompute="full"),
    Layout(pp=2, micro_batch=1, schedule="zb_v"),
    Layout(pp=2, micro_batch=1, schedule="dualpipe_v"),
    Layout(pp=2, micro_batch=2, schedule="terapipe"),
]
OFTEN = bool(os.environ.get("PHALANX_OFFLOAD_MATRIX"))
needs_matrix = pytest.mark.skipif(not OFTEN, reason="set PHALANX_OFFLOAD_MATRIX=1, or `make offload`")


def equals_one_process(ranks, layout: Layout) -> None:
    model = EXPERTS if layout.ep > 1 else FOUR
    (shown, gradients, parameters), *_ = ranks(steps, layout.world, job_of(layout, model), VOCAB)
    ((one, expected_gradients, expected),) = ranks(steps, 1, job_of(Layout(), model), VOCAB)
    for found, alone in zip(shown, one, strict=True):
        assert found == pytest.approx(alone, rel=1e-9)
    assert worst(gradients, expected_gradients, 1e-7) < 1e-9
    assert worst(parameters, expected, 1e-2) < 1e-9


@pytest.mark.parametrize("layout", FEW, ids=Layout.line)
def test_equals_one_process(ranks, layout):
    equals_one_process(ranks, replace(layout, offload="all"))


@needs_matrix
@pytest.mark.parametrize("offload", ["activations", "optimizer+parameters", "all"])
@pytest.mark.parametrize("layout", MANY, ids=Layout.line)
def test_every_layout_equals_one_process(ranks, layout, offload):
    equals_one_process(ranks, replace(layout, offload=offload))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_as_without_offload(ranks, precision):
    layout = Layout(dp_shard=2, recompute="selective")
    job = job_of(layout, FOUR, precision=precision)
    (plain, *_), (offloaded, *_) = (
        ranks(steps, 2, replace(job, layout=replace(layout, offload=each)), VOCAB) for each in ("none", "all")
    )
    assert plain[0] == offloaded[0]
    assert all(bool((offloaded[2][name] == tensor).all()) for name, tensor in plain[2].items())


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(offload_blocks=3, recompute="selective"),
        Layout(pp=2, micro_batch=1),
        Layout(pp=2, micro_batch=1, schedule="zb_h1"),
    ],
    ids=Layout.line,
)
def test_activations_are_where_they_are_predicted(ranks, layout):
    """The device to 10 %, the host to 1 %; a pipeline has some of several micro-batches there."""
    job = job_of(replace(layout, offload="activations"), LONG, precision="fp32", global_batch=8)
    expected, plain = (
        step_memory(rank_spec(each, VOCAB, "cpu"))
        for each in (job, replace(job, layout=replace(layout, offload_blocks=0)))
    )
    for rank, (device, host, copied, _) in enumerate(ranks(counted, layout.world, job, 0)):
        assert expected[rank].allocated == pytest.approx(device, rel=0.1)
        assert expected[rank].host == pytest.approx(host, rel=0.01)
        assert host > 0.3 * (plain[rank].allocated - device)
        assert copied["down"] == copied["up"] > 0


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(dp_shard=2, recompute="full"), Layout(dp_shard=2, micro_batch=1, accumulate="sharded")],
    ids=Layout.line,
)
def test_parameters_are_where_they_are_predicted(ranks, layout):
    job = job_of(replace(layout, offload="optimizer+parameters"), DEEP, precision="fp32", global_batch=4)
    expected = step_memory(rank_spec(job, VOCAB, "cpu"))[0]
    on_its_way = 0
    if layout.dp_shard > 1 and layout.accumulate == "local":
        # gloo sums one block's gradients, in a buffer as large, while the next block's are computed.
        on_its_way = 2 * 4 * block_parameters(DEEP, layout, block_kinds(DEEP)[0]).dense
    for device, host, copied, _ in ranks(counted, layout.world, job, 0):
        assert expected.allocated + on_its_way == pytest.approx(device, rel=0.1)
        assert expected.host == pytest.approx(host, rel=0.01)
        # Two steps: gradients once each, parameters before both passes of each micro-batch.
        assert copied["down"] == pytest.approx(2 * 4 * count(DEEP, VOCAB) / layout.world)
        assert copied["up"] >= 1.9 * copied["down"]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_whose_state_is_four_times_the_budget_trains_within_it(ranks, shards):
    """In float64, and equal to one process: 32 bytes per parameter."""
    layout = Layout(dp_shard=shards, recompute="full", offload="all")
    model = replace(DEEP, n_layers=12 * shards)  # of a small one the blocks on their way are most
    job = job_of(layout, model, global_batch=2)
    budget = 32 * count(model, VOCAB) // shards // 4
    found = ranks(counted, shards, job, budget)
    ((_, _, _, expected),) = ranks(counted, 1, replace(job, layout=Layout()), 0)
    assert found[0][3] == pytest.approx(expected, rel=1e-9)
    assert found[0][0] <= budget
    with pytest.raises(RunError, match="nearest remedy"):
        ranks(counted, shards, replace(job, layout=replace(layout, offload="none")), budget)
