"""Times of single operations: their bounds, their floor, and the shapes that cost more than their size says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.clusters import ACCELERATORS
from phalanx.cost.kernels import STREAM_EFFICIENCY, attention_seconds, peak_flops, product_seconds, rate, stream_seconds
from phalanx.cost.spec import FusedKernel

sizes = st.integers(1, 20_000)
devices = st.sampled_from(sorted(ACCELERATORS))


@given(devices, sizes, sizes, sizes)
def test_no_product_is_faster_than_the_device(name: str, m: int, n: int, k: int) -> None:
    device = ACCELERATORS[name]
    seconds = product_seconds(device, "bf16", m, n, k)
    assert seconds >= 2 * m * n * k / peak_flops(device, "bf16")
    assert seconds >= 2 * (m * k + k * n + m * n) / (device.bandwidth_gbs * 1e9)
    assert seconds >= device.launch_us * 1e-6


@given(sizes, sizes, st.integers(1, 150).map(lambda n: 64 * n), st.integers(2, 8))
def test_more_rows_or_more_products_take_no_less(m: int, n: int, k: int, times: int) -> None:
    device = ACCELERATORS["a100-80gb"]
    one = product_seconds(device, "bf16", m, n, k)
    assert product_seconds(device, "bf16", times * m, n, k) >= one
    assert product_seconds(device, "bf16", m, n, k, times) >= one


def test_a_large_product_runs_near_the_ceiling() -> None:
    device = ACCELERATORS["a100-80gb"]
    seconds = product_seconds(device, "bf16", 8192, 8192, 8192)
    assert 0.85 < 2 * 8192**3 / seconds / rate(device, "bf16") < 1.03


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    """108 cores: 108 tiles of 256 × 128 are one wave, 109 are two."""
    device = ACCELERATORS["a100-80gb"]
    full = product_seconds(device, "bf16", 256 * 12, 128 * 9, 8192)
    more = product_seconds(device, "bf16", 256 * 12 + 1, 128 * 9, 8192)
    assert more > 1.15 * full


def test_a_head_that_is_no_multiple_of_eight_is_slow() -> None:
    """BLOOM's 128 heads of 108 elements (13,824 wide) took 1.3 × the time of a step, 112 elements next to none."""
    device = ACCELERATORS["a100-80gb"]
    times = {head: product_seconds(device, "bf16", 2048, 2048, head, 64) / head for head in (104, 108, 112, 128)}
    assert times[108] > 1.5 * times[112]
    assert times[104] < times[108]


def test_what_a_device_lacks_runs_in_the_next_wider_format() -> None:
    assert peak_flops(ACCELERATORS["a100-80gb"], "fp8") == peak_flops(ACCELERATORS["a100-80gb"], "bf16")
    assert peak_flops(ACCELERATORS["v100-32gb"], "bf16") == 125e12
    assert peak_flops(ACCELERATORS["h100-80gb"], "fp8") == 1979e12
    assert rate(ACCELERATORS["h100-80gb"], "fp8") > rate(ACCELERATORS["h100-80gb"], "bf16")


def test_attention_backward_is_two_and_a_half_times_the_work() -> None:
    device = ACCELERATORS["h100-80gb"]
    shape = (device, "bf16", 8192, 8192, 32, 8, 128, 128)
    forward, backward = (attention_seconds(*shape, backward=back) for back in (False, True))
    assert backward / forward == pytest.approx(2.5 * 0.95 / 0.8)


def test_attention_over_fewer_keys_takes_less() -> None:
    device = ACCELERATORS["h100-80gb"]
    shape = (device, "bf16", 32768, 32768, 32, 8, 128, 128)
    whole, same, tenth, few = (
        attention_seconds(*shape, backward=False, seen=seen) for seen in (None, 32768, 3276.8, 1)
    )
    assert whole == same
    # Almost in proportion, until reading queries, keys and values takes longer than computing.
    assert 0.1 * whole < tenth < 0.15 * whole
    assert few == 2 * (32 + 8) * 32768 * 256 / (device.bandwidth_gbs * 1e9 * STREAM_EFFICIENCY)


def test_streams_take_bandwidth_and_launches() -> None:
    device = ACCELERATORS["a100-80gb"]
    assert stream_seconds(device, 0, 3) == pytest.approx(12e-6)
    assert stream_seconds(device, 2.039e12, 0) == pytest.approx(1 / 0.85)


def test_the_first_flash_attention_gains_nothing_by_wide_heads() -> None:
    device = ACCELERATORS["a100-80gb"]

    def wide_over_narrow(kernel: FusedKernel) -> float:
        wide, narrow = (
            attention_seconds(device, "bf16", 4096, 4096, heads, heads, head, head, backward=True, kernel=kernel)
            for heads, head in ((16, 128), (32, 64))
        )
        return wide / narrow

    assert wide_over_narrow(1) == 1
    assert wide_over_narrow(2) == pytest.approx(0.8)
