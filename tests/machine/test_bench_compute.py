"""One device is measured, looked up and fitted."""

import pytest
import torch

from phalanx.cost.fit import UNCACHED_BYTES, median_error
from phalanx.data.files import silent
from phalanx.machine import calibration as compute
from phalanx.machine import clock
from phalanx.machine.calibration import Shape
from phalanx.machine.clock import WINDOW

CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch):
    """Shapes that take no time."""
    monkeypatch.setattr(
        compute, "products_of", lambda unit, quick: [Shape("n × n × n", n, n, n) for n in (64, 128, 256)]
    )
    monkeypatch.setattr(compute, "sequence_lengths", lambda unit, quick: [64])
    monkeypatch.setattr(compute, "stream_sizes", lambda quick: [2**10, 2**24])
    monkeypatch.setattr(compute, "SUSTAINED_REPEAT_S", {True: 0.001})
    monkeypatch.setattr(clock, "QUICK_BUDGET_S", 0.0)


def measure(ranks, precision="fp32"):
    return compute.measure(CPU, precision, 2, True, 1.0, silent)


def test_a_device_is_measured_and_fitted(few):
    shown = []
    measured = compute.measure(CPU, "fp32", 1, True, 1.0, lambda *state: shown.append(state))
    assert len(measured.products) == 3
    assert [a.backward for a in measured.attentions] == [False, True]
    assert max(s.moved for s in measured.streams) >= UNCACHED_BYTES
    bar = [state for state in shown if state[2]]
    assert bar[-1][1] == bar[-1][2] == len(bar)
    assert all("rounds differ by" in text for text, _, total in shown if not total)
    device, rows = measured.fit()
    assert device.fp32_tflops > 0
    assert device.bandwidth_gbs > 0
    assert device.launch_us > 0
    assert 0 < device.sustained <= 1
    assert (device.cores, device.ceiling) == (1, 1.0)
    assert device.memory_gib > 0.1
    assert device.host_us > 0
    assert (measured.sharing.processes, measured.sharing.alone_products) == (1, 1.0)
    assert len(rows) == 3 + 2 + len(measured.streams)
    quality = measured.calibration(rows)
    parts = (quality.products, quality.attention, quality.streams, quality.blocks)
    assert all(part.rounds >= WINDOW and part.spread >= 0 for part in parts)
    assert quality.products.error == median_error(row for row in rows if row.kind == "product")
    assert quality.blocks.error == 0


def test_16_bits_are_measured_as_such(few):
    device, _ = measure(None, "bf16").fit()
    assert (device.bf16_tflops > 0, device.fp32_tflops) == (True, 0)


def measure_few(ranks):
    """The same in a rank, where the fixture does not reach."""
    before = compute.products_of, compute.sequence_lengths, compute.stream_sizes, compute.SUSTAINED_REPEAT_S
    budget, clock.QUICK_BUDGET_S = clock.QUICK_BUDGET_S, 0.0
    compute.products_of = lambda unit, quick: [Shape("n × n × n", n, n, n) for n in (64, 128)]
    compute.sequence_lengths, compute.stream_sizes, compute.SUSTAINED_REPEAT_S = (
        lambda unit, quick: [],
        lambda quick: [2**24],
        {True: 0.001},
    )
    try:
        return measure(ranks)
    finally:
        compute.products_of, compute.sequence_lengths, compute.stream_sizes, compute.SUSTAINED_REPEAT_S = before
        clock.QUICK_BUDGET_S = budget


def test_ranks_that_measure_together_agree(ranks):
    one, other = ranks(measure_few, 2)
    assert one == other
    assert (one.sharing.processes, one.sharing.alone_products > 0, one.sharing.alone_streams > 0) == (2, True, True)
    shared = one.fit_sharing(one.fit()[0])
    for fitted, measured in (
        (shared.alone_products, one.sharing.alone_products),
        (shared.alone_streams, one.sharing.alone_streams),
    ):
        assert 1.0 <= fitted <= max(1.0, measured)
    assert all(seconds > 0 for seconds in one.small_block)
    assert one.base.memory_gib == pytest.approx(compute.look_up(CPU, 1).memory_gib / 2, rel=1e-6)
