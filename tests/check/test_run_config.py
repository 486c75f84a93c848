"""A run's own config.yaml as a job: it reads back to the same job, and presets replace what it merely resolved."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.check.load import LoadedJob, as_yaml, load_file, load_words, origins_of
from phalanx.config import overrides


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Returns the config.yaml of a run of gpt2 with two layers on 16 GPUs."""
    words = overrides.parse(
        ["model=gpt2", "model.n_layers=2", "cluster=dgx-h100:2", "layout.dp_shard=16", "train.global_batch=16"]
    )
    file = tmp_path / "config.yaml"
    file.write_text(as_yaml(load_words(words)))
    return file


def test_a_config_reads_back_to_the_same_job_again_and_again(written: Path, tmp_path: Path) -> None:
    first = load_file(written)
    again = tmp_path / "again.yaml"
    again.write_text(as_yaml(first))
    assert load_file(again).job == first.job
    assert first.job.model.d_model == 768
    assert first.origins["train.steps"] == "default"
    assert again.read_text().splitlines()[1] == written.read_text().splitlines()[1]  # what was set is still known


def test_a_cluster_replaces_the_resolved_one(written: Path) -> None:
    job = load_file(written, ["cluster=dgx-a100:1", "layout.dp_shard=8"]).job
    assert (job.cluster.accelerator.name, job.cluster.nodes) == ("a100-80gb", 1)
    assert job.model.d_model == 768


def test_a_model_replaces_the_resolved_one_and_leaves_what_was_set(written: Path) -> None:
    model = load_file(written, ["model=llama3-8b"]).job.model
    assert (model.d_model, model.norm, model.n_layers) == (4096, "rmsnorm", 2)


def test_an_optimizer_brings_its_own_defaults(written: Path) -> None:
    told, fresh = (load_file(file, ["optimizer=lion"]).job.optimizer for file in (written, _bare(written)))
    assert told == fresh


def test_a_job_made_in_python_moves_as_well(written: Path, tmp_path: Path) -> None:
    job = load_file(written).job
    file = tmp_path / "python.yaml"
    file.write_text(as_yaml(LoadedJob(job, origins_of(job, "Python"))))
    assert load_file(file).job == job
    moved = load_file(file, ["cluster=dgx-a100:1", "layout.dp_shard=8"]).job
    assert moved.cluster.accelerator.name == "a100-80gb"


def _bare(written: Path) -> Path:
    """Returns a job file that has no optimizer."""
    bare = written.with_name("bare.yaml")
    bare.write_text(
        "model: {preset: gpt2, n_layers: 2}\ncluster: {preset: 'dgx-h100:2'}\n"
        "layout: {dp_shard: 16}\ntrain: {global_batch: 16}\n"
    )
    return bare
