"""All ranks agree on job, program and data before they train, or all stop and say who differs."""

import dataclasses
import platform
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.config.fields import leaves, replace
from phalanx.config.layout import Layout
from phalanx.data.prepare import prepare
from phalanx.errors import DataError, JobError, PhalanxError, RunError
from phalanx.train import agreement
from phalanx.train import run_directory as shared_facts
from train.runs import change, train

HOST = platform.node()


def refusal(ranks, job, culprit: int, fault: str, *values):
    """The class and message of the error with which a rank's run ends, if `culprit` has a fault."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:  # the processes of the ranks serve other tests
        if ranks.rank == culprit:
            job = FAULTS[fault](patch, job, *values)
        with pytest.raises(PhalanxError) as caught:
            train(ranks, job)
    torch.set_num_threads(threads)
    return type(caught.value), str(caught.value)


def with_field(patch, job, path, value):
    return replace(job, path, value)


def of_another_version(patch, job):
    patch.setattr(phalanx, "__version__", "9.9")
    patch.setattr(agreement, "source_digest", lambda: "edited")
    patch.setattr(agreement, "extension_facts", lambda: {"phalanx-lab": "2.0, source 0123"})
    return job


def with_threads(patch, job):
    torch.set_num_threads(3)
    return job


def in_another_folder(patch, job, folder):
    """`data.dir` is relative: this rank is on a node with a disk of its own."""
    patch.chdir(folder)
    return job


FAULTS = {
    "field": with_field,
    "version": of_another_version,
    "threads": with_threads,
    "folder": in_another_folder,
}


def of_world(job, world: int):
    return dataclasses.replace(job, layout=Layout(dp_replicate=world))


def test_another_learning_rate_and_seed_on_one_rank(ranks, job):
    found = ranks(refusal, 4, of_world(job, 4), 2, "field", "optimizer.lr", 0.5)
    assert found == [found[0]] * 4
    kind, message = found[0]
    assert kind is JobError
    assert message == (
        "The ranks do not run the same job:\n"
        f"  rank 2 on host {HOST} has optimizer.lr 0.5, the other 3 ranks 0.01\n"
        "Start every rank with the same job file and the same overrides."
    )
    found = ranks(refusal, 2, of_world(job, 2), 0, "field", "train.seed", 7)
    assert {kind for kind, _ in found} == {JobError}
    # Two ranks are no majority: the first one's value counts as the usual one.
    assert all(f"rank 1 on host {HOST} has train.seed 1337, the other rank 7" in message for _, message in found)


def test_another_layout_is_named_before_the_mesh_refuses_it(ranks, job):
    found = ranks(refusal, 2, of_world(job, 2), 1, "field", "layout.dp_replicate", 4)
    assert all("rank 1 on host" in message and "has layout.dp_replicate 4" in message for _, message in found)


def test_another_version_on_one_rank(ranks, job):
    found = ranks(refusal, 3, of_world(job, 3), 1, "version")
    assert found == [found[0]] * 3
    kind, message = found[0]
    assert kind is RunError
    assert f"rank 1 on host {HOST} has phalanx version 9.9, the other 2 ranks {phalanx.__version__}" in message
    assert "has phalanx source edited" in message
    assert 'has extensions {"phalanx-lab": "2.0, source 0123"}, the other 2 ranks {}' in message
    assert "Install the same versions" in message


def test_another_number_of_threads_on_one_rank(ranks, job):
    found = ranks(refusal, 2, of_world(job, 2), 1, "threads")
    assert {kind for kind, _ in found} == {RunError}
    assert all("has threads 3, the other rank 1" in message for _, message in found)


@pytest.mark.parametrize("there", [True, False])
def test_other_data_on_one_node(ranks, job, tmp_path, there):
    """Nodes with a disk of their own: the second one has other shards at the same path, or none."""
    job = of_world(change(job, "data", dir="data"), 2)
    other = tmp_path / "other"
    other.mkdir()
    folder = prepare(change(job, "data", dir=str(tmp_path / "data")).data)
    if there:
        made = prepare(change(job, "data", dir=str(other / "data"), random_tokens=4000).data)
        made.rename(made.with_name(folder.name))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = ranks(refusal, 2, job, 1, "folder", str(other))
    assert found == [found[0]] * 2
    kind, message = found[0]
    if there:
        assert kind is RunError
        assert f"read different data in data/{folder.name}" in message
        assert f"rank 1 on host {HOST} has data fingerprint" in message
    else:
        assert kind is DataError
        assert f"Rank 1 on host {HOST} has no data it can use: cannot read data/{folder.name}/index.json" in message


def skewed(ranks, off_s: float):
    clock = time.time_ns
    if ranks.rank == 1:
        time.time_ns = lambda: clock() + int(off_s * 1e9)
    try:
        return agreement.clock_skew(agreement.MAX_CLOCK_SKEW_S)
    finally:
        time.time_ns = clock


def test_a_clock_that_is_off_is_named(ranks):
    assert ranks(skewed, 3, 0.0) == [""] * 3
    [first, *others] = ranks(skewed, 3, -3600.0)
    assert others == [first] * 2
    assert first.startswith(f"the clock of rank 1 on host {HOST} is 3")
    assert "s behind the median" in first


def test_every_field_is_compared_but_for_an_explicit_list(job):
    facts = agreement.job_facts(job)
    assert {path for path in leaves() if path.startswith("run.")} - set(facts) == {
        "run.threads",
        "run.log_level",
        "run.all_ranks",
    }
    assert all(path.startswith(("run.", "cluster.")) for path in leaves() if path not in facts)
    assert all(any(path.startswith(listed) for path in leaves()) for listed in shared_facts.MAY_DIFFER)


def test_the_source_digest_follows_every_file(tmp_path, monkeypatch):
    (tmp_path / "room").mkdir()
    for name in ("__init__.py", "room/one.py"):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(phalanx, "__file__", str(tmp_path / "__init__.py"))
    digest = shared_facts.source_digest.__wrapped__
    before = digest()
    assert before == digest()
    Path(tmp_path / "room" / "one.py").write_text("x = 2\n")
    assert digest() != before


def without_object_collectives(ranks, job):
    def refuse(*_, **__):
        raise AssertionError("a collective of objects unpickles what peers send")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_object_to_tensor", "_tensor_to_object"):
            patch.setattr(dist.distributed_c10d, name, refuse)
        return train(ranks, job)["step"]


@pytest.mark.parametrize("layout", [Layout(pp=2, tp=2, accumulation=2), Layout(dp_replicate=2, dp_shard=2, zero=3)])
def test_neither_we_nor_torch_unpickle_anything_in_a_run(ranks, job, layout):
    """Meshes, DTensor, FSDP, a pipeline, a validation and a checkpoint."""
    job = dataclasses.replace(change(job, "train", steps=2), layout=layout)
    assert ranks(without_object_collectives, 4, job) == [2] * 4
