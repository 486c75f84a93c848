"""The file behind `cluster=local`: what was measured goes in, and the same machine comes out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.config import clusters
from phalanx.config.cluster import Accelerator, Cluster, Link, Sharing
from phalanx.cost import communication as link
from phalanx.cost.fit import AttentionTiming, ProductTiming, StreamTiming, Transfer
from phalanx.cost.kernels import product_seconds, stream_seconds
from phalanx.errors import JobError
from phalanx.machine.calibration import Measured, fields_of, of_comm, of_compute, of_device, write
from phalanx.machine.links import Fitted

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
