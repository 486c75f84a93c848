"""`phalanx bench`: what is measured of one device, how it is fitted, and the file that it writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covering import WHOLE
from phalanx.cli.machine import fields_of
from phalanx.config import clusters
from phalanx.config.cluster import Accelerator, Cluster, Link, Sharing
from phalanx.cost import communication as link
from phalanx.cost.fit import UNCACHED_BYTES, AttentionTiming, ProductTiming, StreamTiming, Transfer, median_error
from phalanx.cost.kernels import product_seconds, stream_seconds
from phalanx.data.files import silent
from phalanx.errors import JobError
from phalanx.machine import calibration as compute
from phalanx.machine import clock
from phalanx.machine.calibration import Measured, Shape, of_comm, of_compute, of_device, write
from phalanx.machine.clock import WINDOW
from phalanx.machine.links import Fitted

# What is multiplied: every family of shapes, about forty of them, a dozen when in a hurry.


@pytest.mark.parametrize("unit", [compute.CPU_UNIT, compute.ACCELERATOR_UNIT])
def test_there_are_about_forty_shapes_and_a_dozen_quick_ones(unit):
    every, some = compute.products_of(unit, quick=False), compute.products_of(unit, quick=True)
    assert 30 <= len(every) <= 45
    assert 8 <= len(some) <= 14
    assert set(some) <= set(every)
    assert len({shape.family for shape in every}) == 6
    assert all(min(shape.m, shape.n, shape.k) >= 64 for shape in every)


def test_a_family_grows_in_one_direction():
    for family in {shape.family for shape in compute.products_of(compute.CPU_UNIT, quick=False)}:
        flops = [s.m * s.n * s.k for s in compute.products_of(compute.CPU_UNIT, quick=False) if s.family == family]
        assert flops == sorted(flops)
        assert len(set(flops)) == len(flops) >= 4


# One device is measured, looked up and fitted.


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
    device, rows = measured.fitted()
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
    device, _ = measure(None, "bf16").fitted()
    assert (device.bf16_tflops > 0, device.fp32_tflops) == (True, 0)


def shorten(patch):
    """Makes blocks so small that none of their operations waits for several threads, except in `make whole`."""
    if WHOLE:
        return
    patch.setattr(compute, "SMALL_MODEL", compute.TINY_MODEL)
    patch.setattr(compute, "SEQUENCES", 1)


def measure_few(ranks):
    """The same in a rank, where the fixture does not reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "QUICK_BUDGET_S", 0.0)
        patch.setattr(compute, "products_of", lambda unit, quick: [Shape("n × n × n", n, n, n) for n in (64, 128)])
        patch.setattr(compute, "sequence_lengths", lambda unit, quick: [])
        patch.setattr(compute, "stream_sizes", lambda quick: [2**24])
        patch.setattr(compute, "SUSTAINED_REPEAT_S", {True: 0.001})
        shorten(patch)
        return measure(ranks)


def test_ranks_that_measure_together_agree(ranks, monkeypatch):
    shorten(monkeypatch)
    one, other = ranks(measure_few, 2)
    assert one == other
    assert (one.sharing.processes, one.sharing.alone_products > 0, one.sharing.alone_streams > 0) == (2, True, True)
    shared = one.fit_sharing(one.fitted()[0])
    for fitted, measured in (
        (shared.alone_products, one.sharing.alone_products),
        (shared.alone_streams, one.sharing.alone_streams),
    ):
        assert 1.0 <= fitted <= max(1.0, measured)
    assert not WHOLE or min(one.small_block) > 0  # so small that noise may exceed them
    assert replace(one, small_block=(1e-3, -1e-6)).fit_sharing(one.fitted()[0]) == one.sharing
    assert one.base.memory_gib == pytest.approx(compute.look_up(CPU, 1).memory_gib / 2, rel=1e-6)


# The file behind `cluster=local`: what was measured goes in, and the same machine comes out.


COMPUTE = {"device": "cpu", "devices_per_node": 1, "accelerator.name": "a cpu", "accelerator.fp32_tflops": 0.25}
COMM = {"device": "cpu", "devices_per_node": 4, "intra.gbs": 2.5, "intra.latency_us": 80.0, "intra.reached": 1.0}


def measured(precision: str = "fp32", known: float = 0.0) -> Measured:
    """Of a machine that is as the model says."""
    true = Accelerator(
        "a cpu", ceiling=1.0, sustained=1.0, bandwidth_gbs=20, launch_us=2, **{f"{precision}_tflops": 0.2}
    )
    products = [ProductTiming("n", n, n, n, product_seconds(true, precision, n, n, n)) for n in (256, 1024)]
    streams = [StreamTiming("copy", moved, stream_seconds(true, moved)) for moved in (1024, 2e8)]
    base = Accelerator("a cpu", ceiling=1.0, memory_gib=8.0)
    return Measured(base, precision, known, products, [AttentionTiming(256, 8, 64, False, 1e-3)], streams)


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "new" / "cluster.yaml"
    write(path, COMPUTE, "compute", "today, a cpu")
    assert fields_of(path) == COMPUTE
    text = path.read_text()
    assert text.splitlines()[1] == "# compute: today, a cpu"
    assert "\ncluster:\n  devices_per_node: 1\n  device: cpu\n  accelerator:\n    name: a cpu\n" in text


def test_the_second_measurement_keeps_the_first_and_what_the_user_wrote(tmp_path):
    path = tmp_path / "cluster.yaml"
    write(path, {**COMPUTE, "pod": 16}, "compute", "one")
    known = of_device(fields_of(path), "cpu")
    write(path, {**known, **COMM}, "comm", "two")
    write(path, fields_of(path), "compute", "three")
    assert fields_of(path) == {**COMPUTE, **COMM, "pod": 16}
    assert path.read_text().splitlines()[1:3] == ["# comm: two", "# compute: three"]


def test_figures_of_another_device_do_not_stay():
    known = {**COMPUTE, **COMM, "pod": 16}
    assert of_device(known, "cuda") == {"device": "cpu", "pod": 16}
    assert of_device(known, "cpu", "another cpu") == {**COMM, "pod": 16}
    assert of_device(known, "cpu", "a cpu") == known


def test_a_file_that_is_wrong_is_refused_before_anything_is_measured(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster:\n  intra:\n    gbs: fast\n")
    with pytest.raises(JobError, match=r"(?s):3: cluster.intra.gbs: expected a number, found 'fast'.*--out FILE"):
        fields_of(path)


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="cannot write"):
        write(tmp_path / "file" / "cluster.yaml", COMPUTE, "compute", "")


def test_the_report_of_a_device_has_the_fields_that_a_prediction_needs(tmp_path):
    report = of_compute(measured(), {}, "cpu", "1 process of 1 thread")
    path = tmp_path / "cluster.yaml"
    write(path, report.fields, report.what, "")
    device = clusters.read_local(path=path).accelerator
    assert device.fp32_tflops == pytest.approx(0.2, rel=0.02)
    assert (device.bandwidth_gbs, device.launch_us) == (pytest.approx(20, rel=0.02), pytest.approx(2, rel=0.02))
    assert report.error < 0.02
    lines = report.text().splitlines()
    assert lines[0] == "1 process of 1 thread"
    assert lines[2].split() == ["measured", "fitted", "error"]
    assert any(line.startswith("attention") for line in lines)
    assert lines[-1] == "median error of the fit: 0.0%"
    assert report.as_dict()["points"][0]["kind"] == "product"


def test_how_processes_share_a_cpu_is_read_again(tmp_path):
    shared = Sharing(node_cores=2, processes=2, alone_products=1.8, alone_streams=1.5)
    report = of_compute(replace(measured(), sharing=shared), {"sharing.linked": 4}, "cpu", "")
    path = tmp_path / "cluster.yaml"
    write(path, {"sharing.linked": 4, **report.fields}, report.what, "")
    assert clusters.read_local(path=path).sharing == replace(shared, linked=4)
    told = "one process with all 2 cores, in training: 1.80 × the product rate of one of 2, 1.50 × its memory bandwidth"
    assert told in report.text()


def test_a_data_sheet_s_peak_leaves_what_another_precision_reached():
    """One ceiling serves both: 0.5 of 0.4 TFLOP/s is what bf16 reaches, and fp32 goes on reaching 0.1."""
    known = {"accelerator.fp32_tflops": 0.1, "accelerator.ceiling": 1.0}
    fields = of_compute(measured("bf16", known=0.4), known, "cuda", "").fields
    assert fields["accelerator.bf16_tflops"] == 0.4
    assert fields["accelerator.ceiling"] == pytest.approx(0.5, rel=0.02)
    assert fields["accelerator.fp32_tflops"] * fields["accelerator.ceiling"] == pytest.approx(0.1, rel=0.02)


def test_the_report_of_links_takes_the_largest_group():
    def fitted(n: int, gbs: float) -> Fitted:
        machine = Cluster(devices_per_node=4, intra=Link(gbs, 50, 1.0), inter=Link(gbs, 50, 1.0))
        group = link.RankGroup(n)
        return Fitted(
            "intra", group, machine, [Transfer("send", 1024, group, link.seconds(machine, "send", 1024, group))]
        )

    report = of_comm([fitted(2, 3.0), fitted(4, 2.0)], 4, "cpu", "a processor", "gloo")
    figures = {path: value for path, value in report.fields.items() if not path.startswith("calibration.")}
    assert figures == {
        "device": "cpu",
        "devices_per_node": 4,
        "intra.gbs": 2.0,
        "intra.latency_us": 50,
        "intra.reached": 1.0,
        "sharing.linked": 4,
    }
    assert [line.endswith("→ cluster.intra") for line in report.lines] == [False, True]
    assert report.svg.count("class='panel'") == 2
