"""Machines that users describe: a known device with other links, or the figures of a data sheet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.check.load import LoadedJob, load_file, load_words
from phalanx.config.clusters import ACCELERATORS
from phalanx.config.overrides import parse
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import predict
from phalanx.errors import JobError

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
    assert replace(own.job.cluster, preset="", host=preset.job.cluster.host) == replace(preset.job.cluster, preset="")
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
    assert any("h100-80gb, the nearest known device" in answer and "sustained 0.82" in answer for answer in own.answers)


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
