"""The picture of a layout: well-formed, and of who really holds what."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost.exact_state import state_bytes
from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.pictures.layout import _shards, _stages, svg
from phalanx.units import counted


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(dp_shard=4, zero=1), Layout(tp=4, dp_shard=2)])
def test_is_well_formed_and_names_the_layout(layout):
    root = ET.fromstring(svg(Job(layout=layout), 256))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert texts[0] == f"4 layers, 128 wide, on {counted(layout.world, 'rank')}"
    assert texts[1] == f"layout {layout.line().replace(',', ', ')}"
    assert {"embed", "attn.wq", "mlp.down", "parameters", "optimizer"} <= set(texts)
    bars = [text for text in texts if text.startswith(("replicated", "ZeRO"))]
    assert len(bars) == (4 if layout.dp_shard > 1 else 1)
    assert {"adamw ◂", *(name for name in OPTIMIZERS if name != "adamw")} <= set(texts)


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "deepseek-v3"])
def test_experts_are_dealt_out(preset):
    layout = Layout(dp_shard=8, cp=2, tp=2, ep=4)
    texts = [e.text or "" for e in ET.fromstring(svg(Job(model=PRESETS[preset], layout=layout), 256)).iter()]
    assert {"attn.wo", "moe.router", "moe.experts.up", "moe.experts.down"} <= set(texts)
    assert "In the matrices of experts each row is an expert, distributed over 4 ep ranks, one shade each." in texts
    assert [text for text in texts if text.startswith("ZeRO-3")] == ["ZeRO-3, N=16, experts 4 ◂"]
    experts = PRESETS[preset].moe.n_experts // 4
    assert f"ep 1: experts {experts}–{2 * experts - 1} on ranks 2–3, 10–11, 18–19, 26–27" in texts
    assert len([text for text in texts if text.startswith("ep ")]) == 4


def test_replicated_experts_are_one_part_of_ep_of_them():
    """Ranks that share no state have all of the dense part, but only their own experts."""
    job = Job(model=replace(PRESETS["mixtral-8x7b"], vocab_size=1000), layout=Layout(dp_shard=8, ep=4))
    shown = dict(_stages(job, 1000))
    whole = state_bytes(job.model, Layout(dp_replicate=8))
    experts = sum(prod(shape) for name, shape in parameter_shapes(job.model, 1000).items() if is_expert(name))
    dense = whole.parameters / 4 - experts
    assert shown["replicated, ep=4"][0] / 4 == pytest.approx(dense + experts / 4, rel=1e-6)


def test_many_expert_ranks_are_cut_short_and_many_holders_counted():
    model = PRESETS["deepseek-v3"]
    texts = [e.text or "" for e in ET.fromstring(svg(Job(model=model, layout=Layout(dp_shard=512, ep=64)), 256)).iter()]
    rows = [text for text in texts if text.startswith("ep ")]
    assert len(rows) == 16
    assert rows[-1] == "ep 63: experts 252–255 on ranks 63, 127, 191, … 511 (8 in all)"


@given(st.integers(1, 5), st.sampled_from([1, 2, 3]), st.sampled_from([0.01, 1.0]), st.integers(1, 5))
def test_shares_cover_every_parameter(ranks, zero, bucket_mb, layers):
    layout = Layout(dp_shard=ranks, zero=zero, bucket_mb=bucket_mb)
    shards = _shards(Job(model=ModelConfig(n_layers=layers, d_model=12, n_heads=2), layout=layout), 17)
    for ends in shards.values():
        assert len(ends) == ranks
        assert sorted(ends) == ends
        assert ends[-1] == 1
