"""Machines: the table of devices, those that users describe or measure, and what stored fit errors say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.check.load import LoadedJob, load_file, load_words
from phalanx.config import calibration
from phalanx.config.calibration import (
    DEVICE_ERROR,
    LINK_ERROR,
    SPREAD,
    Calibration,
    ComputeCalibration,
    FitQuality,
    LinkCalibration,
    Provenance,
    assess,
    relative_spread,
)
from phalanx.config.cluster import Accelerator, Cluster, Link, Sharing, with_processes
from phalanx.config.clusters import (
    ACCELERATORS,
    CLUSTERS,
    DEVICES,
    MACHINES,
    DeviceEntry,
    cluster_of,
    default_path,
    device_reported_as,
)
from phalanx.config.overrides import parse
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import predict
from phalanx.errors import JobError

# Machines that users describe: a known device with other links, or the figures of a data sheet.


JOB = ["model=llama3-8b", "train.global_batch=64", "train.precision=bf16", "layout.dp_shard=16", "layout.zero=3"]
SHAPE = ["cluster.nodes=2", "cluster.devices_per_node=8"]
SHEET = {"bf16_tflops": "989", "memory_gib": "79.1", "bandwidth_gbs": "3350"}


def load(*words: str) -> LoadedJob:
    return load_words(parse([*JOB, *SHAPE, *words]))


def seconds(loaded: LoadedJob) -> float:
    return predict(step_spec(loaded.job, loaded.job.model.vocab_size)).step_time_s


def test_a_known_device_with_own_links_is_the_preset_with_these_links() -> None:
    own = load("cluster.accelerator=h100-80gb", "cluster.inter.gbs=50")
    preset = load_words(parse([*JOB, "cluster=dgx-h100:2"]))
    bare = replace(preset.job.cluster, preset="", power_w=0.0)  # what a node of one's own draws is not known
    assert replace(own.job.cluster, preset="", host=preset.job.cluster.host) == bare
    assert seconds(own) == seconds(preset)
    assert own.origins["cluster.intra.gbs"] == "resolved as dgx-h100"
    assert any("intra.gbs 450" in answer for answer in own.answers)
    slower = load("cluster.accelerator=h100-80gb", "cluster.inter.gbs=12")
    assert slower.job.cluster.inter.gbs == 12
    assert seconds(slower) > seconds(own)


def test_a_data_sheet_is_completed_from_the_nearest_device_and_says_so() -> None:
    own = load(*(f"cluster.accelerator.{name}={value}" for name, value in SHEET.items()), "cluster.inter.gbs=50")
    named = load("cluster.accelerator=h100-80gb", "cluster.inter.gbs=50")
    assert own.job.cluster.accelerator == replace(
        ACCELERATORS["h100-80gb"], name="own device", fp8_tflops=0.0, fp8_ceiling=0.709
    )
    assert seconds(own) == seconds(named)
    assert any("h100-80gb, the nearest known device" in answer and "sustained 0.79" in answer for answer in own.answers)


@settings(max_examples=30, deadline=None)
@given(st.sets(st.sampled_from(sorted(SHEET))), st.booleans())
def test_what_is_missing_is_named_and_nothing_divides_by_zero(names: set[str], named: bool) -> None:
    words = [f"cluster.accelerator.{name}={SHEET[name]}" for name in sorted(names)]
    words += ["cluster.accelerator.name=mine"] if named else []
    if not words:
        return
    if names == set(SHEET):
        assert seconds(load(*words)) > 0
        return
    with pytest.raises(JobError) as caught:
        load(*words)
    message = str(caught.value)
    assert "h100-80gb" in message
    if names:
        assert all((name in message.partition(" missing")[0]) == (name not in names) for name in SHEET)
    else:
        assert "no known device 'mine'" in message


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("cluster.accelerator=h100", "did you mean h100-80gb or h100-96gb or h100-pcie-80gb?"),
        ("cluster.accelerator.ceiling=0", "must be above 0 and at most 1, is 0.0"),
        ("cluster.intra.reached=0", "must be above 0 and at most 1, is 0.0"),
        ("cluster.inter.gbs=nan", "expected a number, found 'nan'"),
        ("cluster.inter.gbs=0", "must be above 0: the machine has 2 nodes"),
        ("cluster.domain=3", "must divide devices_per_node 8 or be a multiple of it, is 3"),
        ("cluster.device=h100-80gb", "did you mean cluster.accelerator=h100-80gb?"),
        ("cluster.device=dgx-h100:2", "did you mean cluster=dgx-h100:2?"),
    ],
)
def test_a_wrong_figure_is_refused_with_its_field(word: str, message: str) -> None:
    words = [word] if "accelerator=" in word else ["cluster.accelerator=h100-80gb", word]
    with pytest.raises(JobError) as caught:
        load(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            "cluster.accelerator.bandwidth_gbs=0 cluster.intra.gbs=0",
            ["the memory bandwidth of h100-80gb is not known", "16 devices, and nothing is known about the links"],
        ),
        ("cluster.accelerator.fp32_tflops=0 train.precision=fp32", ["no known rate of products in fp32"]),
        ("cluster.inter.gbs=0", ["set cluster.inter.gbs, or measure"]),
    ],
)
def test_a_named_machine_with_a_figure_that_was_set_to_nothing_is_not_predicted(words: str, messages: list[str]):
    job = load_words(parse([*JOB, "cluster=dgx-h100:2", *words.split()])).job
    with pytest.raises(JobError) as caught:
        step_spec(job, job.model.vocab_size)
    assert len(caught.value.problems) == len(messages)
    assert all(message in problem for message, problem in zip(messages, caught.value.problems, strict=True))


def test_the_interval_of_a_described_machine_is_wider() -> None:
    own = load("cluster.accelerator=h100-80gb", "cluster.inter.gbs=50").job
    preset = load_words(parse([*JOB, "cluster=dgx-h100:2"])).job
    wide, narrow = (predict(step_spec(job, job.model.vocab_size)).spread for job in (own, preset))
    assert wide[0] < narrow[0]
    assert wide[1] > narrow[1]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (
            "bf16_tflops: 900, memory_gib: 80, bandwidth_gbs: 0",
            "cluster.accelerator.bandwidth_gbs: must be above 0, is 0",
        ),
        ("bf16_tflops: .nan, memory_gib: 80, bandwidth_gbs: 3", "cluster.accelerator.bf16_tflops: expected a number"),
        ("bf16_tflops: -1, memory_gib: 80, bandwidth_gbs: 3", "cluster.accelerator.bf16_tflops: must not be negative"),
        ("bf16_tflops: 900, memory_gb: 80, bandwidth_gbs: 3", "did you mean cluster.accelerator.memory_gib?"),
    ],
)
def test_a_figure_that_is_wrong_is_not_said_to_be_missing(figures: str, said: str, tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"cluster: {{nodes: 2, devices_per_node: 8, accelerator: {{name: a, {figures}}}}}\n")
    with pytest.raises(JobError) as caught:
        load_file(path, ["layout.dp_shard=16"])
    [problem] = caught.value.problems
    assert problem.startswith(f"{path}:1: ")
    assert said in problem


# The table of devices and machines: one row per driver's name, a source per row, and the page that shows them.

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "devices.md"


@pytest.mark.parametrize(
    ("reported", "gib", "name"),
    [
        ("NVIDIA GB200", 184.3, "gb200"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA GB300", 277.0, "gb300"),
        ("NVIDIA B300 SXM6 AC", 268.6, "b300"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA H100", 94.5, "h100-96gb"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie-80gb"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-pcie-80gb"),
        ("NVIDIA A100", 39.4, "a100-40gb"),
        ("NVIDIA A100", 79.2, "a100-80gb"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32gb"),
        ("AMD Instinct MI300X", 191.5, "mi300x"),
        ("AMD Instinct MI250X", 64.0, "mi250x-gcd"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("NVIDIA L40S", 44.5, "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.9, "rtx-pro-6000"),
    ],
)
def test_a_driver_s_name_finds_its_row(reported, gib, name):
    assert device_reported_as(reported, gib) is ACCELERATORS[name]


@pytest.mark.parametrize(
    ("reported", "gib"),
    [
        ("NVIDIA H100 NVL", 93.1),
        ("NVIDIA H200 NVL", 139.8),
        ("NVIDIA H800 PCIe", 79.1),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.4),
        ("NVIDIA A100-SXM4-80GB", 39.4),
        ("NVIDIA A100", 60.0),
        ("Tesla V100-PCIE-32GB", 31.7),
        ("AMD Instinct MI250X/MI250", 64.0),
        ("NVIDIA GeForce RTX 5090", 31.4),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 94.9),
        ("", 79.1),
    ],
)
def test_another_form_or_a_slice_of_a_known_device_is_unknown(reported, gib):
    assert device_reported_as(reported, gib) is None


def test_rows_that_share_a_driver_s_name_differ_in_memory():
    for entry in DEVICES.values():
        for reported in entry.reported_as:
            assert device_reported_as(f"NVIDIA {reported}", entry.accelerator.memory_gib) is entry.accelerator


def test_every_row_has_a_source_and_what_a_prediction_needs():
    for entry in DEVICES.values():
        device = entry.accelerator
        assert entry.source
        assert device.fp16_tflops
        assert device.fp32_tflops
        assert device.memory_gib
        assert device.bandwidth_gbs
    for entry in MACHINES.values():
        assert entry.source
        assert entry.cluster.intra.gbs
        assert entry.cluster.inter.gbs
        assert entry.cluster.devices_per_node


def test_the_page_shows_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    for table in (device_table(), machine_table()):
        assert table in page, f"docs/reference/devices.md should have\n\n{table}"


def device_table() -> str:
    """Returns the page's table of devices."""
    head = "| device | bf16 | fp8 | fp4 | fp32 | ceiling | GiB | GB/s | drivers report |\n" + "|---" * 9 + "|\n"
    return head + "\n".join(map(_device_row, DEVICES.values()))


def _device_row(entry: DeviceEntry) -> str:
    device = entry.accelerator
    peaks = (device.bf16_tflops or device.fp16_tflops, device.fp8_tflops, device.fp4_tflops, device.fp32_tflops)
    cells = [device.name, *(f"{peak:g}" if peak else "" for peak in peaks), f"{device.ceiling:.2g}"]
    cells += [f"{device.memory_gib:g}", f"{device.bandwidth_gbs:g}", ", ".join(entry.reported_as)]
    return f"| {' | '.join(cells)} |"


def machine_table() -> str:
    """Returns the page's table of machines."""
    head = "| preset | devices per node | fast links among | GB/s | beyond, GB/s |\n" + "|---" * 5 + "|\n"
    return head + "\n".join(map(_machine_row, MACHINES))


def _machine_row(name: str) -> str:
    cluster = CLUSTERS[name]
    node = f"{cluster.devices_per_node} × {cluster.accelerator.name}"
    cells = [name, node, f"{cluster.joined}", f"{cluster.intra.gbs:g}", f"{cluster.inter.gbs:.3g}"]
    return f"| {' | '.join(cells)} |"


# `cluster=local`: where its file is, what it may hold, and what is missing from it.

WHOLE = """\
cluster:
  devices_per_node: 2
  device: cpu
  accelerator:
    name: a cpu
    fp32_tflops: 0.2
    ceiling: 1.0
    bandwidth_gbs: 40
  intra:
    gbs: 2.5
    latency_us: 80
    reached: 1.0
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    return tmp_path / "cluster.yaml"


def test_the_file_is_where_settings_are():
    assert default_path({"PHALANX_HOME": "/a"}) == Path("/a/cluster.yaml")
    assert default_path({"XDG_CONFIG_HOME": "/b"}) == Path("/b/phalanx/cluster.yaml")
    for env in ({}, {"XDG_CONFIG_HOME": "relative"}, {"PHALANX_HOME": ""}):
        assert default_path(env) == Path.home() / ".config" / "phalanx" / "cluster.yaml"


def test_local_is_the_machine_in_the_file(file):
    file.write_text(WHOLE)
    machine = cluster_of("local")
    assert (machine.preset, machine.nodes, machine.devices_per_node, machine.device) == ("local", 1, 2, "cpu")
    assert (machine.accelerator.name, machine.accelerator.fp32_tflops) == ("a cpu", 0.2)
    assert (machine.intra.gbs, machine.intra.latency_us, machine.intra.reached) == (2.5, 80, 1)


def test_a_job_takes_it_and_overrides_it(file):
    file.write_text(WHOLE)
    loaded = load_words(parse(["cluster=local", "cluster.intra.gbs=5", "layout.dp_replicate=2"]))
    assert (loaded.job.cluster.intra.gbs, loaded.job.cluster.accelerator.bandwidth_gbs) == (5, 40)
    assert loaded.origins["cluster.intra.latency_us"] == "preset local"


def test_the_file_is_a_job_file_too(file):
    file.write_text(WHOLE)
    job = load_words(parse([str(file), "layout.dp_replicate=2"])).job
    assert job.cluster.intra == cluster_of("local").intra


def test_several_nodes_need_links_between_them(file):
    file.write_text(WHOLE)
    with pytest.raises(JobError, match="cluster.inter is not measured, and there are 2 nodes"):
        cluster_of("local:2")
    file.write_text(WHOLE + "  inter:\n    gbs: 1\n    latency_us: 100\n")
    assert cluster_of("local:2").nodes == 2
    file.write_text(WHOLE + "  nodes: 3\n  inter:\n    gbs: 1\n    latency_us: 100\n")
    assert cluster_of("local").nodes == 3


def test_without_a_file_it_says_what_to_run(file):
    with pytest.raises(JobError, match="run `phalanx bench compute` and `phalanx bench comm` first"):
        cluster_of("local")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster:\n  device: cpu\n", "cluster.accelerator is not measured: run `phalanx bench compute`"),
        (WHOLE[: WHOLE.index("  intra")], "cluster.intra is not measured: run `phalanx bench comm`"),
        ("cluster:\n  intra:\n    gbs: fast\n", r":3: cluster.intra.gbs: expected a number, found 'fast'"),
        ("cluster:\n  intra:\n    gb: 1\n", r":3: unknown key cluster.intra.gb; did you mean cluster.intra.gbs\?"),
        ("cluster: dgx-h100\n", r":1: cluster.preset: this file describes a machine itself"),
        ("train:\n  steps: 1\n", ":2: train.steps: this file has only a `cluster` section"),
        ("cluster:\n  device: !!python/name:os.system\n", "the tag .* is not allowed; plain values only"),
        ("cluster: [\n", "not valid YAML"),
    ],
)
def test_a_bad_file_says_which_field(file, text, message):
    file.write_text(text)
    with pytest.raises(JobError, match=message):
        cluster_of("local")


def test_one_device_needs_no_links(file):
    file.write_text(WHOLE[: WHOLE.index("  intra")].replace("devices_per_node: 2", "devices_per_node: 1"))
    assert cluster_of("local").devices_per_node == 1


def test_mistyped_names_find_it(file):
    with pytest.raises(JobError, match=r"did you mean local:4\?"):
        cluster_of("locl:4")
    for wrong in ("local:x", "local:02"):
        with pytest.raises(JobError, match=f"'{wrong}': after the colon comes the number of nodes"):
            cluster_of(wrong)


# A CPU node with another number of processes than it was measured with.

DEVICE = Accelerator("a cpu", fp32_tflops=0.2, memory_gib=8, bandwidth_gbs=20, launch_us=2, product_us=20, host_us=10)
NODE = Cluster(
    devices_per_node=2,
    device="cpu",
    accelerator=DEVICE,
    intra=Link(1.2, 300, 1.0),
    sharing=Sharing(node_cores=2, processes=2, alone_products=1.8, alone_streams=1.5),
)


def test_as_many_as_were_measured_are_as_measured():
    assert with_processes(NODE, 2) == replace(NODE, sharing=Sharing())


def test_one_has_what_one_alone_was_measured_to_have():
    one = with_processes(NODE, 1)
    assert one.devices_per_node == 1
    assert one.accelerator == replace(DEVICE, fp32_tflops=1.8 * 0.2, bandwidth_gbs=1.5 * 20, memory_gib=16)


def test_more_than_cores_wait_for_their_turn():
    four = with_processes(NODE, 4)
    halves = {"fp32_tflops": 0.1, "bandwidth_gbs": 10, "memory_gib": 4}
    assert four.accelerator == replace(DEVICE, **halves, launch_us=4, product_us=40, host_us=20)
    assert four.intra == Link(0.6, 600, 1.0)


def test_more_processes_within_the_cores_only_share():
    wide = replace(NODE, sharing=replace(NODE.sharing, node_cores=16))
    four = with_processes(wide, 4)
    assert (four.accelerator.fp32_tflops, four.accelerator.host_us, four.intra.latency_us) == (0.1, 10, 300)


def test_links_are_shared_by_those_that_they_were_measured_among():
    four = with_processes(replace(NODE, sharing=replace(NODE.sharing, linked=4)), 4)
    assert (four.intra, four.accelerator.fp32_tflops) == (NODE.intra, 0.1)


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_second_time_changes_nothing(first, second):
    once = with_processes(NODE, first)
    assert with_processes(once, second) == once


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([2, 4, 8, 16]))
def test_rates_fall_with_the_number_of_processes(few, measured):
    node = replace(NODE, sharing=Sharing(16, measured, 0, 0.9 * measured, 0.6 * measured))
    each = [with_processes(node, n).accelerator for n in (few, 2 * few)]
    assert each[0].fp32_tflops > each[1].fp32_tflops
    assert each[0].bandwidth_gbs > each[1].bandwidth_gbs


def test_devices_of_their_own_share_nothing():
    machine = CLUSTERS["dgx-h100"]
    assert with_processes(machine, 4) == machine


# What stored fit errors and spreads say about predictions.

HERE = Provenance("2026-11-22", "a-host", "a cpu", 2, "phalanx 0")
GOOD = FitQuality(0.03, 0.02, 3)
COMPUTE = ComputeCalibration(HERE, GOOD, FitQuality(0.08, 0.02, 3), GOOD, FitQuality(0.0, 0.04, 3))
CALIBRATION = Calibration(COMPUTE, LinkCalibration(HERE, FitQuality(0.27, 0.06, 5)))


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(calibration, "processor", lambda: "a cpu")
    monkeypatch.setattr(calibration, "core_count", lambda: 2)


def test_the_spread_is_relative():
    assert relative_spread([1.0, 2.0, 4.0]) == 1.5
    assert relative_spread([3.0]) == 0


def test_a_good_measurement_is_reliable():
    found = assess(CALIBRATION, ("compute", "comm"), here=True, cpu="a cpu")
    assert (found.status, found.problem, found.remedy, found.changed) == ("reliable", "", "", "")
    assert found.line() == (
        "measured 2026-11-22 on a-host (a cpu, 2 cores); fit error: products 3.0%, attention 8.0%, streams 3.0%, links "
        "in a node 27.0%; spread: products 2.0%, attention 2.0%, streams 2.0%, blocks 4.0%, links in a node 6.0%"
    )
    document = found.as_dict()
    assert (document["status"], document["fit_error"], document["spread"]) == ("reliable", 0.27, 0.06)
    assert document["measured"]["comm"]["host"] == "a-host"
    assert document["parts"]["products"] == {"error": 0.03, "spread": 0.02, "rounds": 3}


@pytest.mark.parametrize(
    ("products", "status", "problem"),
    [
        (FitQuality(DEVICE_ERROR.unreliable, SPREAD.unreliable, 3), "reliable", ""),
        (FitQuality(0.26, 0.02, 3), "unreliable", "products: fit error 26.0% > 25%"),
        (FitQuality(0.03, 0.3, 9), "unreliable", "products: spread 30.0% > 25%"),
        (FitQuality(0.51, 0.3, 9), "refused", "products: fit error 51.0% > 25%, spread 30.0% > 25%"),
        (FitQuality(0.03, 1.2, 9), "refused", "products: spread 120.0% > 25%"),
    ],
)
def test_noisy_products_are_unreliable_or_refused(products, status, problem):
    noisy = replace(CALIBRATION, compute=replace(COMPUTE, products=products))
    found = assess(noisy, ("compute", "comm"), here=True)
    assert (found.status, found.problem) == (status, problem)
    assert found.remedy == ("run `phalanx bench compute` again on an idle machine" if problem else "")
    assert found.line().endswith(f"unreliable ({problem}): {found.remedy}" if problem else "links in a node 6.0%")


def test_links_have_bounds_of_their_own_and_matter_only_to_several_devices():
    noisy = replace(CALIBRATION, comm=LinkCalibration(HERE, FitQuality(0.5, 0.06, 5), FitQuality(0.9, 0.1, 3)))
    assert LINK_ERROR.unreliable < 0.5 < LINK_ERROR.refused < 0.9
    assert assess(noisy, ("compute",), here=True).status == "reliable"
    found = assess(noisy, ("compute", "comm"), here=True)
    assert found.status == "refused"
    assert "links in a node: fit error 50.0% > 40%; links between nodes: fit error 90.0% > 40%" in found.line()
    assert found.line().endswith("run `phalanx bench comm` again on an idle machine")


def test_a_file_without_quality_is_of_unknown_quality():
    found = assess(Calibration(), ("compute", "comm"), here=True, cpu="a cpu")
    assert found.status == "unknown"
    assert found.line() == (
        "compute and comm of unknown quality (no fit error or spread is stored): run `phalanx bench compute` and "
        "`phalanx bench comm` again on an idle machine"
    )
    document = found.as_dict()
    assert (document["fit_error"], document["spread"], document["unknown"]) == (None, None, ["compute", "comm"])
    half = assess(replace(CALIBRATION, comm=LinkCalibration()), ("compute", "comm"), here=True)
    assert (half.status, half.unknown) == ("unknown", ["comm"])
    assert half.line().endswith(": run `phalanx bench comm` again on an idle machine")


@pytest.mark.parametrize(("processor", "cores"), [("another cpu", 2), ("a cpu", 64)])
def test_a_changed_machine_is_reported(monkeypatch, processor, cores):
    monkeypatch.setattr(calibration, "processor", lambda: processor)
    monkeypatch.setattr(calibration, "core_count", lambda: cores)
    found = assess(CALIBRATION, ("compute", "comm"), here=True, cpu="a cpu")
    said = f"this machine ({processor}, {cores} cores) is not the measured one (a cpu, 2 cores)"
    assert found.changed == said
    again = "run `phalanx bench compute` and `phalanx bench comm` again on an idle machine"
    assert found.line().endswith(f"{said}: {again}")
    assert assess(CALIBRATION, ("compute", "comm"), here=False, cpu="a cpu").changed == ""
    old = assess(Calibration(), ("compute",), here=True, cpu="a cpu")
    assert bool(old.changed) == (processor != "a cpu"), "an old file stores the processor's name only"


def test_this_machine_has_a_name():
    assert calibration.host_name()
