"""The roofline of a block: intensities by hand, nothing above the roof, and the same seconds as the prediction."""

from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.blocks.kinds import block, block_kinds
from phalanx.config.clusters import ACCELERATORS, CLUSTERS
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.cost.communication import messages_seconds, place
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.kernels import operator_seconds
from phalanx.cost.roofline import OperatorPoint, block_slowdown, data_sheet, points, reached
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import Batch


def spec(
    model: ModelConfig, layout: Layout | None = None, micro_batch: int = 1, cluster: str = "dgx-h100", **more
) -> StepSpec:
    layout = layout or Layout()
    batch = Batch(micro_batch * layout.data_ranks, micro_batch, 1, layout.data_ranks)
    return StepSpec(model, CLUSTERS[cluster], layout, batch, framework=PHALANX, **more)


def by_name(one: StepSpec) -> dict[str, OperatorPoint]:
    return {point.name: point for point in points(one)}


def test_the_ridge_of_an_h100_is_at_295_flops_a_byte():
    assert round(data_sheet(ACCELERATORS["h100-80gb"], "bf16").ridge) == 295


@given(st.integers(1, 8), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_a_product_reads_both_operands_and_writes_its_result(heads, layers, tp, micro_batch):
    one = spec(ModelConfig(n_layers=layers, d_model=64 * heads * tp, n_heads=heads * tp), Layout(tp=tp), micro_batch)
    found = by_name(one)
    for operator in block(place(one), block_kinds(one.model)[0]):
        if (p := operator.product(tp, 1)) is None:
            continue
        flops, moved = 2 * p.m * p.n * p.k, 2 * (p.m * p.k + p.k * p.n + p.m * p.n)
        assert found[operator.name].flops == flops
        assert isclose(found[operator.name].bytes, moved)
        assert isclose(found[operator.name].intensity, flops / moved)


def test_attention_reads_queries_keys_and_values_and_writes_as_much_as_queries():
    model = PRESETS["llama3-8b"]
    point, tokens = by_name(spec(model))["attention"], model.seq_len
    assert point.flops == 2 * tokens * tokens * model.n_heads * model.head_size  # half of 4: the mask
    assert point.bytes == 4 * tokens * model.head_size * (model.n_heads + model.kv_heads)


MODELS = ["gpt2", "llama3-8b", "llama3-70b", "mixtral-8x7b", "deepseek-v3"]


@given(
    model=st.sampled_from(MODELS),
    cluster=st.sampled_from(sorted(CLUSTERS)),
    products=st.sampled_from(["fp32", "bf16", "fp16", "fp8"]),
    seq_len=st.sampled_from([1, 16, 100, 128, 1000, 8192]),
    micro_batch=st.sampled_from([1, 3, 64]),
    tp=st.sampled_from([1, 2, 4]),
    slowdown=st.floats(1, 2),
    moe_slowdown=st.floats(1, 2),
    attention=st.sampled_from(["flash", "unfused"]),
)
def test_nothing_lies_above_the_roof(
    model, cluster, products, seq_len, micro_batch, tp, slowdown, moe_slowdown, attention
):
    one = spec(replace(PRESETS[model], seq_len=seq_len), Layout(tp=tp), micro_batch, cluster, products=products)
    one = replace(one, framework=replace(PHALANX, slowdown=slowdown, moe_slowdown=moe_slowdown, attention=attention))
    device = one.cluster.accelerator
    for point in points(one):
        roof = reached(device, point.products, block_slowdown(one))
        assert point.flops_per_s <= roof.at(point.intensity) * (1 + 1e-9), point
        assert roof.peak <= data_sheet(device, point.products).peak


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("products", ["bf16", "fp8"])
def test_seconds_are_those_of_the_prediction(model, products):
    one = spec(PRESETS[model], Layout(tp=2), products=products)
    one = replace(one, framework=replace(PHALANX, slowdown=1.2, moe_slowdown=1.5))
    work = block(place(one), block_kinds(one.model)[-1])
    device = one.cluster.accelerator
    whole = operator_seconds(device, work, one.framework, products, 2, slowdown=block_slowdown(one))
    assert isclose(sum(point.seconds for point in points(one)), whole.forward)


def test_bounds():
    large = by_name(spec(PRESETS["llama3-8b"]))
    assert {name: point.bound for name, point in large.items()} == {
        **dict.fromkeys(("qkv", "wo", "mlp.up", "mlp.down", "attention"), "compute"),
        **dict.fromkeys(
            ("attn_norm", "mlp_norm", "attn residual", "mlp residual", "rotary", "mlp.activation"), "memory"
        ),
    }
    # One token: the weights are read for it alone.
    assert by_name(spec(replace(PRESETS["llama3-70b"], seq_len=1)))["mlp.up"].bound == "memory"
    assert {point.bound for point in points(spec(ModelConfig(seq_len=8, d_model=32, n_heads=2)))} == {"launch"}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama3-8b", Layout(tp=8)),
        ("llama3-8b", Layout(tp=4, sp=True)),
        ("llama3-8b", Layout(cp=4, cp_ulysses=2)),
        ("mixtral-8x7b", Layout(dp_shard=8, ep=8)),
    ],
)
def test_every_collective_of_the_block_belongs_to_an_operator(model, layout):
    one = spec(PRESETS[model], layout)
    messages = messages_seconds(one, place(one), block(place(one), block_kinds(one.model)[-1]))[0]
    whole = sum(each.forward for each in messages.values())
    assert whole > 0
    assert isclose(sum(point.communication for point in points(one)), whole)


def test_communication_bounds_what_waits_longer_than_it_computes():
    point = by_name(spec(PRESETS["mixtral-8x7b"], Layout(dp_shard=8, ep=8)))["experts.up"]
    assert replace(point, communication=2 * point.seconds).verdict == "communication"
    assert replace(point, communication=point.seconds / 2).verdict == point.bound == "compute"


def test_attention_of_layers_with_another_window_has_its_own_point():
    """The last layer's point comes first. Each point equals that of a model whose layers are all of that kind."""
    model = ModelConfig(n_layers=4, d_model=512, n_heads=8, seq_len=4096, window=512, full_every=4)
    names = [point for point in points(spec(model)) if point.name.startswith("attention")]
    assert [point.name for point in names] == ["attention, all keys", "attention, window 512"]
    for point, window in zip(names, (0, 512), strict=True):
        alike = by_name(spec(replace(model, window=window, full_every=0)))["attention"]
        assert replace(point, name="attention") == alike
