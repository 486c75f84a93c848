"""`cluster=local`: where its file is, what it may hold, and what is missing from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.check.load import load_words
from phalanx.config.clusters import cluster_of, default_path
from phalanx.config.overrides import parse
from phalanx.errors import JobError

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
    with pytest.raises(JobError, match="'local:x': after the colon comes the number of nodes"):
        cluster_of("local:x")
