"""Predictions for jobs in fp8, and the devices on which such jobs are legal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.blocks.operator import Operator, Weight
from phalanx.check.load import load_words
from phalanx.config.clusters import ACCELERATORS
from phalanx.config.job import Job
from phalanx.config.overrides import parse
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX
from phalanx.cost.job_spec import step_spec
from phalanx.cost.kernels import operator_seconds, product_seconds, stream_seconds
from phalanx.cost.prediction import predict
from phalanx.errors import JobError

TORCHTITAN = FRAMEWORKS["torchtitan"]

H200 = ACCELERATORS["h200"]
ONE = ("cluster.devices_per_node=1", "global_batch=1", "model.n_layers=6")


def job(*words: str) -> Job:
    return load_words(parse(["train.precision=fp8", *words])).job


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-h200", "dgx-b200", "mi300x"])
def test_devices_with_products_in_8_bits_take_it(cluster):
    assert job(f"cluster={cluster}", "model=llama3-8b", *ONE).train.precision == "fp8"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cluster=dgx-a100", "model=llama3-8b", *ONE], "a100-80gb has none .* nearest legal: bf16"),
        (["cluster=dgx-v100", "model=llama3-8b", *ONE], "has none"),
        (
            ["cluster=dgx-h100", "model.d_model=1000", "model.n_heads=10", "cluster.devices_per_node=1"],
            "d_model 1000 is not a multiple of 16.* nearest d_model: 960, 1040",
        ),
        (["model.lora.rank=4"], "whole weights, not adapters"),
        (["train.precision=bf16", "train.fp8_scaling=tensorwise"], "it is for train.precision=fp8"),
        (["train.fp8_scaling=blockwise"], "rowwise.*tensorwise"),
        (["train.precision=bf16", "quantise_weights=fp8", "dp_shard=2"], "multiplies in 8 bits, and precision is bf16"),
        (
            ["cluster=dgx-b200", "model=mixtral-8x7b", "dp_shard=8", "quantise_weights=fp8", "train.global_batch=8"],
            "b200 multiplies experts in bf16",
        ),
        (
            ["cluster=dgx-h100", "model=llama3-8b", *ONE, "train.fp8_scaling=mxfp8"],
            "h100-80gb has none .*fp4_tflops is 0.*nearest legal: rowwise",
        ),
        (
            ["cluster=dgx-b200", *ONE, "model.d_model=1040", "model.n_heads=10", "train.fp8_scaling=mxfp8"],
            "d_model 1040 is not a multiple of 32.* nearest d_model: 960, 1120",
        ),
    ],
)
def test_refusals_say_what_is_legal(words, says):
    with pytest.raises(JobError, match=says):
        job(*words)


def test_a_step_takes_less_time_and_the_same_memory_as_in_bf16():
    wide, narrow, compiled, tensorwise = (
        predict(step_spec(job("model=llama3-8b", "cluster=dgx-h200", *ONE, *more), 128256))
        for more in (
            ["train.precision=bf16", "train.compile=false"],
            ["train.compile=false"],
            ["train.compile=true"],
            ["train.fp8_scaling=tensorwise", "train.compile=false"],
        )
    )
    assert compiled.step_time_s < narrow.step_time_s < wide.step_time_s
    assert narrow.memory == wide.memory, "what blocks save stays in bf16"
    assert tensorwise == narrow
    assert narrow.peak_flops == 1979e12
    assert wide.peak_flops == 989e12


def test_experts_run_in_8_bits_where_torch_has_a_kernel():
    mixture = ("model=mixtral-8x7b", *ONE, "cluster.accelerator.memory_gib=1000", "train.compile=false")
    took = {}
    for cluster in ("dgx-h200", "dgx-b200"):
        spec = step_spec(job(f"cluster={cluster}", *mixture), 32000)
        assert spec.framework.narrow_experts == (cluster == "dgx-h200")
        wide = replace(spec, framework=replace(spec.framework, narrow_experts=False))
        took[cluster] = predict(spec).step_time_s / predict(wide).step_time_s
    assert took["dgx-h200"] < 0.95
    assert took["dgx-b200"] == 1
    mx = step_spec(job("cluster=dgx-b200", "train.fp8_scaling=mxfp8", *mixture), 32000)
    assert mx.framework.narrow_unit == 32


def test_each_product_casts_both_factors_and_those_of_experts_pad_rows():
    m, n, k = 8192, 14336, 4096
    matrix = Operator("up", (Weight("mlp.up.weight", (n, k)),), m)
    seconds, titan = (operator_seconds(H200, [matrix], each, "fp8") for each in (PHALANX, TORCHTITAN))
    product = product_seconds(H200, "fp8", m, n, k)
    assert seconds.forward == pytest.approx(
        product + stream_seconds(H200, PHALANX.cast_bytes * k * (m + n), 0), rel=1e-3
    )
    again = stream_seconds(H200, PHALANX.cast_bytes * (k * (m + n) + 2 * m * n), 0)
    assert seconds.backward == pytest.approx(
        product_seconds(H200, "fp8", m, k, n) + product_seconds(H200, "fp8", n, k, m) + again, rel=1e-3
    )
    assert titan.backward < seconds.backward
    odd = replace(matrix, weights=(Weight("mlp.up.weight", (n + 8, k)),))
    assert operator_seconds(H200, [odd], PHALANX, "fp8").products == pytest.approx(
        operator_seconds(H200, [odd], PHALANX, "bf16").products
    )
    experts = replace(matrix, weights=(Weight("moe.experts.up.weight", (8, n, k)),), rows=m // 8)
    of_experts = {each: operator_seconds(H200, [experts], PHALANX, each).products for each in ("bf16", "fp8")}
    assert of_experts["bf16"] == of_experts["fp8"]
    assert operator_seconds(H200, [experts], TORCHTITAN, "fp8").products < of_experts["fp8"]
    own = replace(PHALANX, narrow_experts=True)
    in_8_bits, in_16 = (operator_seconds(H200, [experts], each, "fp8") for each in (own, PHALANX))
    assert in_8_bits.products < in_16.products
    moved = [each.backward + each.forward - each.products for each in (in_8_bits, in_16)]
    cast = PHALANX.cast_bytes * 8 * (2 * k * (m // 8 + n) + 2 * m // 8 * n) + 4 * m * (k + n)
    assert moved[0] - moved[1] == pytest.approx(stream_seconds(H200, cast, 0), rel=1e-2)
