"""What the cost model makes of a machine, the fit finds again: on times that the model itself made up."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.blocks.kinds import block as block_of
from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.operator import Place
from phalanx.config.cluster import Accelerator, Cluster, Link, Sharing, with_processes
from phalanx.config.model import ModelConfig
from phalanx.cost import communication as link
from phalanx.cost.fit import (
    TORCHS_KERNEL,
    AttentionTiming,
    ProductTiming,
    StreamTiming,
    Transfer,
    alone,
    device_rows,
    fit_device,
    fit_host,
    fit_link,
    fit_sharing,
    link_rows,
    median_error,
    product_call_us,
)
from phalanx.cost.frameworks import PHALANX_CPU
from phalanx.cost.kernels import attention_seconds, operator_seconds, product_seconds, stream_seconds

SHAPES = [(n, n, n) for n in (64, 256, 512, 1024, 2048, 4096)] + [(t, 2048, 512) for t in (64, 512, 4096)]
MOVED = (1024, 4096, 2e6, 128e6, 512e6)
SIZES = [2**10 * 4**step for step in range(9)]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def close(found: float, true: float) -> bool:
    return abs(found / true - 1) < 0.02


def measured(
    device: Accelerator, precision: str = "fp32"
) -> tuple[list[ProductTiming], list[AttentionTiming], list[StreamTiming]]:
    """What a benchmark would find on a machine that is as the model says."""
    one = alone(device)
    products = [ProductTiming("any", m, n, k, product_seconds(one, precision, m, n, k)) for m, n, k in SHAPES]
    attentions = []
    for length in (128, 512, 2048):
        shape = (length, length, 8, 8, 64, 64)
        for back in (False, True):
            seconds = attention_seconds(one, precision, *shape, backward=back, kernel=TORCHS_KERNEL)
            attentions.append(AttentionTiming(length, 8, 64, back, seconds))
    return products, attentions, [StreamTiming("copy", moved, stream_seconds(device, moved)) for moved in MOVED]


def transfers(machine: Cluster, group: link.RankGroup) -> list[Transfer]:
    return [
        Transfer(name, size, group, link.seconds(machine, name, size, group)) for name in COLLECTIVES for size in SIZES
    ]


@settings(max_examples=10)
@given(
    peak=st.floats(0.05, 1.5),
    launch=st.floats(0.5, 20),
    bandwidth=st.floats(10, 200),
    cores=st.sampled_from([1, 108]),
    older=st.floats(0.2, 1.2),
)
def test_a_device_is_found_again(peak, launch, bandwidth, cores, older):
    true = Accelerator(
        "one", fp32_tflops=peak, ceiling=1, bandwidth_gbs=bandwidth, cores=cores, older=older, launch_us=launch
    )
    found = fit_device(Accelerator("one", ceiling=1, cores=cores), "fp32", *measured(true))
    assert close(found.launch_us, launch)
    assert close(found.bandwidth_gbs, bandwidth)
    assert close(found.fp32_tflops, peak)
    assert close(found.older, older)
    rows = device_rows(found, "fp32", *measured(true))
    assert median_error(rows) < 0.02


@given(peak=st.floats(0.05, 1.5), ceiling=st.floats(0.4, 1.0))
def test_of_a_known_peak_the_ceiling_is_found(peak, ceiling):
    true = Accelerator("two", bf16_tflops=peak, ceiling=ceiling, bandwidth_gbs=100, launch_us=3)
    found = fit_device(Accelerator("two"), "bf16", *measured(true, "bf16"), known=peak)
    assert found.bf16_tflops == peak
    assert close(found.ceiling, ceiling)


def test_a_second_precision_keeps_the_ceiling_of_the_first():
    """One ceiling serves both, so that the second's peak is what makes its rate right."""
    base = Accelerator(bf16_tflops=900, ceiling=0.5)
    true = Accelerator(fp32_tflops=1.0, ceiling=1.0, bandwidth_gbs=100, launch_us=3)
    found = fit_device(base, "fp32", *measured(true))
    assert (found.bf16_tflops, found.ceiling) == (900, 0.5)
    assert close(found.fp32_tflops, 2.0)


def test_shapes_that_the_model_does_not_understand_do_not_bend_the_rest():
    true = Accelerator(fp32_tflops=0.2, ceiling=1.0, bandwidth_gbs=40, launch_us=5)
    products, *others = measured(true)
    odd = [replace(products[2], seconds=products[2].seconds * 5), replace(products[3], seconds=products[3].seconds / 3)]
    found = fit_device(Accelerator(ceiling=1.0), "fp32", [*products, *odd], *others)
    assert abs(found.fp32_tflops / 0.2 - 1) < 0.05


def test_what_a_cache_holds_is_shown_and_not_fitted():
    device = Accelerator(fp32_tflops=0.2, ceiling=1.0, bandwidth_gbs=40, launch_us=5)
    products, attentions, streams = measured(device)
    rows = device_rows(device, "fp32", products, attentions, [*streams, StreamTiming("copy", 1e6, 1e-9)])
    assert [row.used for row in rows if row.kind == "stream"] == [True, True, False, True, True, False]
    assert median_error(rows) == pytest.approx(0.0, abs=1e-9)
    assert AttentionTiming(1024, 8, 64, True, 1.0).flops == 2 * 1024**2 * 8 * 64 * 2.5


def test_without_attention_its_rate_stays():
    true = Accelerator(fp32_tflops=0.2, ceiling=1.0, bandwidth_gbs=40, launch_us=5)
    products, _, streams = measured(true)
    assert fit_device(Accelerator(ceiling=1.0, older=0.7), "fp32", products, [], streams).older == 0.7


@settings(max_examples=10)
@given(
    ranks=st.sampled_from([2, 3, 4, 8]),
    latency=st.floats(5, 2000),
    gbs=st.floats(0.2, 400),
)
def test_a_link_is_found_again(ranks, latency, gbs):
    machine = Cluster(devices_per_node=ranks, intra=Link(gbs, latency, 1.0))
    found = fit_link(transfers(machine, link.RankGroup(ranks)), ranks)
    assert close(found.latency_us, latency)
    assert close(found.gbs * found.reached, gbs)
    again = replace(machine, intra=found)
    assert median_error(link_rows(again, transfers(machine, link.RankGroup(ranks)))) < 0.02


@settings(max_examples=10)
@given(nodes=st.integers(2, 8), latency=st.floats(5, 200), gbs=st.floats(0.2, 50))
def test_links_between_nodes_are_found_from_groups_with_one_rank_on_each(nodes, latency, gbs):
    machine = Cluster(devices_per_node=4, intra=Link(1e6, 1e-3), inter=Link(gbs, latency, 1.0))
    found = fit_link(transfers(machine, link.RankGroup(nodes, stride=4)), 4)
    assert close(found.latency_us, latency)
    assert close(found.gbs, gbs)


def test_bandwidth_on_the_bus_counts_what_a_rank_sends():
    assert Transfer("all_reduce", 1000, link.RankGroup(4), 1.0).bus == 1500
    assert Transfer("all_gather", 1000, link.RankGroup(4), 1.0).bus == 750
    assert Transfer("send", 1000, link.RankGroup(4), 1.0).bus == 1000


def test_what_a_product_s_call_takes_is_told_by_the_tiny_one():
    streams = [
        StreamTiming("tiny add", 3072, 2e-6),
        StreamTiming("tiny norm", 2048, 4e-6),
        StreamTiming("tiny product", 3072, 43e-6),
    ]
    assert product_call_us(streams) == pytest.approx(40)
    assert product_call_us(streams[:2]) == 0


def test_products_with_a_call_are_fitted_with_it():
    true = Accelerator(fp32_tflops=0.2, ceiling=1.0, bandwidth_gbs=40, launch_us=2, product_us=40)
    products, attentions, streams = measured(true)
    streams.append(StreamTiming("tiny product", 3072, stream_seconds(true, 3072) + 40e-6))
    found = fit_device(Accelerator(ceiling=1.0, product_us=40), "fp32", products, attentions, streams)
    assert close(found.fp32_tflops, 0.2)
    assert close(found.launch_us, 2)
    assert max(abs(row.error) for row in device_rows(found, "fp32", products, [], streams)) < 0.02


@given(st.floats(1, 100))
def test_the_time_to_start_an_operation_is_what_a_tiny_block_leaves(host):
    true = Accelerator(fp32_tflops=0.2, ceiling=1.0, bandwidth_gbs=40, launch_us=2, product_us=20, host_us=host)
    tiny = ModelConfig(n_layers=1, d_model=32, seq_len=16, vocab_size=64)
    work = block_of(Place(tiny), block_kinds(tiny)[0])
    block = operator_seconds(alone(true), work, PHALANX_CPU, "fp32")
    found = fit_host(replace(true, host_us=0), "fp32", tiny, block.forward + block.backward)
    assert close(found.host_us, host)
    assert fit_host(true, "fp32", tiny, 1e-9).host_us > 0


@given(share=st.floats(0.6, 1), wrong=st.floats(0.7, 1.5))
def test_what_threads_gain_in_training_is_what_a_block_gains_from_them(share: float, wrong: float) -> None:
    """Whatever the model is wrong about in both."""
    device = Accelerator(fp32_tflops=0.2, ceiling=1.0, bandwidth_gbs=40, launch_us=2, product_us=20, host_us=9)
    gains = Sharing(2, 2, 0, 2.0, 1.8)
    true = replace(gains, alone_products=2.0 * share, alone_streams=1.8 * share)
    middling = ModelConfig(n_layers=1, d_model=128, seq_len=128, vocab_size=64)
    one = with_processes(Cluster(accelerator=device, sharing=true), 1).accelerator
    parts = [
        operator_seconds(
            alone(each), block_of(Place(middling, sequences=8), block_kinds(middling)[0]), PHALANX_CPU, "fp32"
        )
        for each in (device, one)
    ]
    together, single = (wrong * (part.forward + part.backward) for part in parts)
    found = fit_sharing(device, "fp32", gains, middling, 8, together, single)
    assert close(found.alone_products, true.alone_products)
    assert close(found.alone_streams, true.alone_streams)
    # A process that is slower with all cores than with one thread was disturbed.
    slow = fit_sharing(device, "fp32", gains, middling, 8, together, single * 100)
    assert (slow.alone_products, slow.alone_streams) == (1.0, 1.0)
    # One that is faster than its parts is none.
    assert fit_sharing(device, "fp32", gains, middling, 8, together, single / 100) == gains
