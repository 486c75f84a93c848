"""The cost of an offloaded optimizer: tiers of memory, the host's update, exposed copies, and what is not known."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.blocks.parameters import count
from phalanx.cli.main import main
from phalanx.config.clusters import cluster_of
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.partition.derived import BUFFER_BYTES, BUFFERS
from phalanx.simulate.step import step_seconds

ONE = replace(cluster_of("dgx-h100"), devices_per_node=1)
LLAMA = PRESETS["llama3-8b"]
PARAMETERS = count(LLAMA)


def spec_of(offload: str = "optimizer", cluster=ONE, **layout) -> StepSpec:
    shape = Layout(offload=offload, recompute="full", micro_batch=1, **layout)
    train = Train(precision="bf16", global_batch=16)
    return step_spec(Job(model=LLAMA, cluster=cluster, layout=shape, train=train), LLAMA.vocab_size)


def test_state_moves_to_the_host_and_the_update_with_it():
    there, here = predict(spec_of("none")), predict(spec_of())
    assert not there.fits
    assert here.fits
    assert here.fullest.optimizer == 0
    assert here.fullest.host == pytest.approx(14 * PARAMETERS, rel=1e-6)
    assert here.tiers["host"] == (here.fullest.host, ONE.host.memory_gib * 2**30)
    assert here.parts.optimizer == pytest.approx(32 * PARAMETERS / ONE.host.update_gbs / 1e9)
    assert here.parts.optimizer > 10 * there.parts.optimizer
    # The last of 32 layers' gradients, the last of 16 parts of the parameters.
    copies = 2 * PARAMETERS / ONE.host.link_gbs / 1e9
    assert here.parts.copies == pytest.approx(copies / 32 + copies / 16)


@pytest.mark.parametrize("layout", [{}, {"dp_shard": 8}, {"dp_shard": 4, "pp": 2}], ids=str)
def test_the_simulation_agrees(layout):
    cluster = cluster_of("dgx-h100") if layout else ONE
    spec = spec_of(cluster=cluster, **layout)
    assert step_seconds(spec) == pytest.approx(predict(spec).step_time_s, rel=0.05)


@given(link=st.floats(1, 1000), update=st.floats(1, 1000), faster=st.floats(1, 10))
def test_a_faster_host_is_never_slower(link, update, faster):
    slow, fast = (
        predict(spec_of(cluster=replace(ONE, host=replace(ONE.host, link_gbs=link * f, update_gbs=update * f))))
        for f in (1, faster)
    )
    assert fast.step_time_s <= slow.step_time_s * (1 + 1e-9)
    assert slow.parts.copies >= 0


def test_a_host_that_is_too_small_does_not_fit():
    small = predict(spec_of(cluster=replace(ONE, host=replace(ONE.host, memory_gib=100))))
    assert small.short_tiers == ("host",)
    assert not small.fits


def test_nothing_is_predicted_of_an_unknown_host():
    unknown = replace(cluster_of("aurora"), devices_per_node=1)
    with pytest.raises(JobError, match=r"nothing is known; set cluster.host.link_gbs and cluster.host.update_gbs"):
        spec_of(cluster=unknown)


def test_copies_of_activations_are_exposed_where_a_block_is_faster():
    kept, moved = predict(spec_of("optimizer")), predict(spec_of("optimizer+activations"))
    # Of 32 layers the last keeps the input of its block: 8,192 tokens in bf16.
    each = 2 * 8192 * LLAMA.d_model
    assert moved.fullest.host - kept.fullest.host == 31 * each
    assert moved.parts.copies == kept.parts.copies
    slow = replace(ONE, host=replace(ONE.host, link_gbs=1))
    before, after = (predict(spec_of(offload, cluster=slow)) for offload in ("optimizer", "optimizer+activations"))
    # Down and up, in 16 micro-batches, but for the passes beside them.
    exposed = after.parts.copies - before.parts.copies
    assert 0 < exposed < 16 * 31 * 2 * each / 1e9
    assert exposed == pytest.approx(after.step_time_s - before.step_time_s, rel=1e-4)


def test_parameters_of_one_device_come_when_they_are_needed_and_of_several_beside_a_block():
    one = predict(spec_of("optimizer+parameters"))
    assert one.fullest.parameters == 0
    assert one.fullest.host == pytest.approx(16 * PARAMETERS, rel=1e-6)
    assert one.fullest.communication > 0
    once = 2 * PARAMETERS / ONE.host.link_gbs / 1e9
    assert 0.8 * 32 * once < one.parts.copies < 1.2 * 33 * once
    several = predict(spec_of("optimizer+parameters", cluster_of("dgx-h100"), dp_shard=8))
    assert several.parts.copies < once / 8


def test_a_plan_offloads_no_more_than_it_has_to(capsys):
    words = ["model=llama3-8b", "cluster=dgx-h100", "cluster.devices_per_node=1", "train.precision=bf16"]
    main(["plan", *words, "train.global_batch=1", "cluster.accelerator.memory_gib=18", "--json"])
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["offload"] == "all"


WORDS = ["model=llama3-8b", "cluster=dgx-h100", "cluster.devices_per_node=1", "train.precision=bf16"]
WORDS += ["recompute=full", "micro_batch=1", "train.global_batch=16", "offload=optimizer"]


def test_predict_says_what_every_tier_holds(capsys):
    assert main(["predict", *WORDS]) == 0
    assert "host: 104.7GiB of 232.8GiB per device: fits" in capsys.readouterr().out
    assert main(["predict", *WORDS, "cluster.host.memory_gib=100", "--json"]) == 3
    tiers = json.loads(capsys.readouterr().out)["memory_by_tier"]
    assert tiers["host"]["bytes"] > tiers["host"]["limit"] == 100 * 2**30
    assert set(tiers) == {"device", "host"}


def test_what_does_not_fit_is_planned_with_the_optimizer_on_the_host(capsys):
    assert main(["plan", *WORDS[:4], "train.global_batch=16", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["offload"] == "optimizer"


def test_published_thirteen_billion_parameters_fit_one_v100():
    """Ren et al. 2021, figure 7: on a DGX-2, with 1.5 TB of host memory."""
    words = ["cluster=dgx-v100", "cluster.devices_per_node=1", "cluster.host.memory_gib=1397", "train.precision=fp16"]
    words += ["model.n_layers=65", "model.d_model=4096", "model.n_heads=32", "model.seq_len=1024"]
    words += ["model.vocab_size=50257", "recompute=full", "micro_batch=1", "train.global_batch=1"]
    assert main(["predict", *words]) == 3
    assert main(["predict", *words, "offload=optimizer"]) == 0


IN_FILES = {"offload_to": "/scratch"}


def test_state_in_files_takes_the_disk_and_its_time():
    on_host, in_files = predict(spec_of()), predict(spec_of(**IN_FILES))
    assert in_files.fullest.disk == pytest.approx(12 * PARAMETERS, rel=1e-6)
    # Gradients in bf16, and three buffers.
    assert in_files.fullest.host == pytest.approx(2 * PARAMETERS + BUFFERS * BUFFER_BYTES, rel=1e-6)
    assert in_files.tiers["disk"] == (in_files.fullest.disk, ONE.host.disk_gib * 2**30)
    assert in_files.parts.optimizer == on_host.parts.optimizer
    moved = 2 * 12 * PARAMETERS / ONE.host.disk_gbs / 1e9
    assert in_files.parts.files == pytest.approx(moved - in_files.parts.optimizer, rel=0.01)
    # Copies to the device hide behind the disk.
    assert in_files.parts.copies <= on_host.parts.copies
    assert step_seconds(spec_of(**IN_FILES)) == pytest.approx(in_files.step_time_s, rel=0.05)


@given(disk=st.floats(0.1, 1000), faster=st.floats(1, 10))
def test_a_faster_disk_is_never_slower(disk, faster):
    slow, fast = (
        predict(spec_of(cluster=replace(ONE, host=replace(ONE.host, disk_gbs=disk * f)), **IN_FILES)).step_time_s
        for f in (1, faster)
    )
    assert fast <= slow * (1 + 1e-9)
    assert predict(spec_of()).step_time_s <= fast


def test_a_small_disk_does_not_fit_and_an_unknown_one_is_not_predicted():
    small = predict(spec_of(cluster=replace(ONE, host=replace(ONE.host, disk_gib=50)), **IN_FILES))
    assert (small.short_tiers, small.fits) == (("disk",), False)
    with pytest.raises(JobError, match=r"disks of the devices' host.* nothing is known; set cluster.host.disk_gbs,"):
        spec_of(cluster=replace(cluster_of("gh200"), devices_per_node=1), **IN_FILES)


def test_a_host_that_is_too_small_is_told_of_files(capsys):
    assert main(["predict", *WORDS, "cluster.host.memory_gib=100"]) == 3
    shown = capsys.readouterr()
    assert "peak memory 38.3GiB (at the loss) of 79.1GiB: fits" in shown.out
    assert "fits with layout.offload_to=DIR" in shown.err
    assert main(["predict", *WORDS[:-1], "cluster.host.memory_gib=100"]) == 3
    assert "layout.offload=optimizer layout.offload_to=DIR" in capsys.readouterr().err


def test_a_named_folder_is_planned_where_nothing_fits_without(capsys):
    words = [*WORDS[:4], "train.global_batch=16", "cluster.host.memory_gib=100", "offload_to=/scratch"]
    assert main(["plan", *words, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert (best["offload"], best["offload_to"]) == ("optimizer", "/scratch")


@pytest.mark.parametrize(("place", "legal"), [("nvme", "/a/folder/on/the/disk"), ("host", "cpu")])
def test_words_that_are_no_folder(capsys, place, legal):
    assert main(["predict", *WORDS, f"offload_to={place}"]) == 2
    expected = f"{place!r} is neither cpu nor a folder of files; nearest legal: offload_to={legal}"
    assert expected in capsys.readouterr().err
