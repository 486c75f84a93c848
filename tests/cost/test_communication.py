"""Seconds of a block's messages price the bytes that the ledger counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.blocks.kinds import block, block_kinds
from phalanx.config.cluster import Cluster, Link
from phalanx.config.clusters import cluster_of
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.communication import messages_seconds, place
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX
from phalanx.cost.held import contents
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_time import block_time, held_by
from phalanx.cost.spec import StepSpec
from phalanx.cost.step_state import state_seconds
from phalanx.cost.traffic import Table, balanced_rows, block_traffic, row_traffic, step_traffic
from phalanx.partition import derived as batch

MEGATRON_CORE = FRAMEWORKS["megatron-core"]

SLOW = Link(gbs=1e-6, latency_us=0, reached=1.0)
"""A kilobyte per second: beside its bytes no message's latency counts."""


def of(model: str, layout: Layout, cluster: Cluster, **more) -> StepSpec:
    layout = replace(layout, micro_batch=1)
    return StepSpec(PRESETS[model], cluster, layout, batch.solve(2 * layout.data_ranks, layout), **more)


@pytest.mark.parametrize(("framework", "share"), [(PHALANX, 1), (MEGATRON_CORE, 2 * (3 / 4) / (7 / 8))])
def test_each_tensor_rank_dispatches_all_tokens_unless_it_holds_whole_experts(framework, share):
    layout = Layout(tp=2, ep=4, dp_shard=4, sp=True)
    parted, whole = (
        of("mixtral-8x7b", each, cluster_of("dgx-h100"), framework=framework)
        for each in (layout, replace(layout, sp=False))
    )
    assert balanced_rows(place(parted)) == balanced_rows(place(whole))
    kind = block_kinds(parted.model)[-1]
    # Of eight expert ranks seven are others, of four three.
    parted_s, whole_s = (block_time(each, kind).ep for each in (parted, whole))
    assert parted_s == pytest.approx(whole_s / share, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(["gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3"]),
    tp=st.sampled_from([1, 2, 4]),
    ring=st.sampled_from([1, 2, 4]),
    ulysses=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4]),
    sp=st.booleans(),
    regather=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]),
    dropout=st.sampled_from([0.0, 0.1]),
)
def test_seconds_price_the_bytes_of_the_ledger(model, tp, ring, ulysses, ep, sp, regather, recompute, dropout):
    shape = replace(PRESETS[model], dropout=dropout)
    assume(ep == 1 or shape.moe.n_experts)
    assume(shape.n_heads % (tp * ulysses) == 0)
    layout = Layout(
        tp=tp,
        cp=ring * ulysses,
        cp_ulysses=ulysses,
        ep=ep,
        dp_shard=4,
        sp=sp and tp > 1,
        sp_regather=regather and sp and tp > 1,
        recompute=recompute,
    )
    cluster = Cluster(devices_per_node=layout.world, intra=SLOW, inter=SLOW)
    spec = replace(of(model, layout, cluster), model=shape)
    here, kind = place(spec), block_kinds(shape)[-1]
    priced = messages_seconds(spec, here, block(here, kind), [recompute])[0]
    counted = Table()
    counted.take(block_traffic(here, kind, recompute))
    for each in row_traffic(here, kind, recompute):
        counted.take(each, balanced_rows(here) if shape.moe.n_experts else 0)
    seconds = sum(each.forward + each.again + each.backward for each in priced.values())
    assert seconds == pytest.approx(sum(counted.entries.values()) / 1e3, rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(["gpt2", "llama3-8b", "mixtral-8x7b"]),
    shard=st.sampled_from([1, 2, 4, 8]),
    replicate=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4]),
    zero=st.sampled_from([1, 2]),
    gradients=st.sampled_from(["same", "fp32"]),
)
def test_seconds_price_the_bytes_of_the_state(model, shard, replicate, ep, zero, gradients):
    assume(ep <= shard and (ep == 1 or PRESETS[model].moe.n_experts))
    layout = Layout(dp_shard=shard, dp_replicate=replicate, ep=ep, zero=zero, cp=1)
    cluster = Cluster(devices_per_node=layout.world, intra=SLOW, inter=SLOW)
    train = Train(global_batch=layout.data_ranks, precision="bf16", gradients=gradients)
    spec = rank_spec(Job(model=PRESETS[model], cluster=cluster, layout=layout, train=train), 50304)
    seconds = state_seconds(spec, held_by(spec, contents(spec)[0]))
    counted = step_traffic(spec.model, spec.layout, spec.batch, precision="bf16", gradients=gradients)
    sent = sum(sum(counted.get(axis, {}).values()) for axis in ("dp_shard", "dp_replicate", "edp"))
    assert seconds.gather + seconds.reduce == pytest.approx(sent / 1e3, rel=1e-3)
