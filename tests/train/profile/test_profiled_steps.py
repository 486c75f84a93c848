"""Profiles of whole runs: the same losses bit for bit, shares that add up, traces, and failures that stop nothing."""

import dataclasses
import errno
import gzip
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.config.job import Job, ProfileOptions
from phalanx.config.layout import Layout
from phalanx.train.profile import report, tracing
from phalanx.train.profile.window import StepProfile
from train.runs import change, losses, train


@pytest.fixture
def job(tmp_path, job):
    """The tests' job in fp32, without validation."""
    return change(job, "train", precision="fp32", steps=5, eval_samples=0)


def profiled(job: Job, name: str = "profiled", **options) -> Job:
    job = change(job, "run", name=name)
    return change(job, "train", profile=ProfileOptions(**options))


def traces(job: Job) -> Path:
    return Path(job.run.dir) / job.run.name / "traces"


def document(job: Job) -> dict:
    return report.read(Path(job.run.dir) / job.run.name)


def check_sums(found: dict) -> None:
    for row in found["ranks"]:
        for shares in (row["shares"], *row["by_step"]):
            assert sum(shares["parts"].values()) == pytest.approx(shares["step"], rel=1e-6)
            assert min(shares["parts"].values()) >= 0


def test_a_profile_changes_no_loss_and_shows_every_part(ranks, job):
    job = dataclasses.replace(job, layout=Layout(dp_shard=2, zero=1))
    watched = profiled(job, steps=(2, 3), memory=True, python=True)
    ranks(train, 2, job)
    ranks(train, 2, watched)
    assert losses(watched) == losses(job), "bit for bit"
    found = document(watched)
    assert found["notes"] == []
    check_sums(found)
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    shares = found["ranks"][0]["shares"]
    assert len(found["ranks"][0]["by_step"]) == 2
    assert min(shares["forward"], shares["backward"], shares["optimizer"]) > 0
    assert shares["exposed"]["dp_shard"].keys() == {"reduce_scatter", "all_gather"}
    assert "all_reduce" in shares["exposed"]["world"]
    for rank, memory in enumerate(found["memory"]):
        assert memory["rank"] == rank
        assert memory["peak_bytes"] > memory["held_bytes"] > 0
        assert {"parameters", "optimizer", "activations"} <= memory["parts"].keys()
        beside = {row["name"]: row for row in memory["compared"]}
        assert all(beside[part]["ratio"] == pytest.approx(1, abs=0.02) for part in ("parameters", "optimizer"))
        assert beside["all tensors"]["measured_bytes"] == memory["peak_bytes"]
        assert 0.8 < beside["all tensors"]["ratio"] < 1.5
        assert memory["tensors"] == sorted(memory["tensors"], key=lambda tensor: -tensor["bytes"])
    files = {f"{kind}-rank_{rank}.{end}" for kind in ("python",) for rank in (0, 1) for end in ("txt", "html")}
    files |= {"rank_0.json.gz", "rank_1.json.gz", "merged.json.gz", "profile.json", "profile.svg"}
    assert set(found["files"]) == files == {path.name for path in traces(watched).iterdir()}
    assert "compute" in (traces(watched) / "python-rank_0.txt").read_text()
    merged = json.loads(gzip.decompress((traces(watched) / "merged.json.gz").read_bytes()))["traceEvents"]
    own = [event for event in merged if event.get("cat") in ("step", "pass", "layer", "waiting", "in flight")]
    assert {event["pid"] for event in merged if event["ph"] == "X"} == {0, 1000}
    assert [event["name"] for event in own if event["cat"] == "step"] == ["step 2", "step 3"] * 2
    names = {event["name"] for event in own}
    assert {"forward", "backward", "forward layer 1", "backward layer 0", "dp_shard reduce_scatter"} <= names
    # torch's clock and ours agree: the embeddings are computed in forward passes.
    passes = [(event["ts"], event["ts"] + event["dur"]) for event in own if event["name"] == "forward"]
    inside = [event for event in merged if event["name"] == "aten::embedding"]
    assert inside
    assert all(any(start <= event["ts"] <= end for start, end in passes) for event in inside)


def test_a_pipeline_shows_its_bubble_and_its_messages(ranks, job):
    job = dataclasses.replace(job, layout=Layout(pp=2, schedule="1f1b", micro_batch=3, recompute="full"))
    job = profiled(job, steps=(2, 3), ranks=(1,))
    ranks(train, 2, job)
    found = document(job)
    check_sums(found)
    shares = found["ranks"][1]["shares"]
    assert shares["waiting"]["pp"] > 0
    assert shares["recompute"] > 0
    assert shares["exposed"]["pp"]["send"] > 0
    assert "rank_0.json.gz" not in found["files"]
    content = json.loads(gzip.decompress((traces(job) / "rank_1.json.gz").read_bytes()))
    names = {event["name"] for event in content["traceEvents"]}
    assert {"forward stage 1", "backward stage 1", "recompute", "pp send: wait"} <= names


def full_disk(ranks, job):
    """Trains while nothing can be written to traces. Returns the warnings of this rank."""

    def fail(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("phalanx.train.profile.window").addHandler(handler)
    before, tracing.write = tracing.write, fail
    try:
        train(ranks, job)
    finally:
        tracing.write = before
        logging.getLogger("phalanx.train.profile.window").removeHandler(handler)
    return warnings


def test_a_full_disk_is_one_warning(ranks, job):
    job = profiled(job, steps=(1, 1))
    (warnings,) = ranks(full_disk, 1, job)
    assert len(losses(job)) == 5
    (warning,) = warnings
    assert "rank 0 could not write its trace" in warning
    assert "No space left" in warning
    assert "profile.json" in warning


def test_steps_that_are_done_are_not_profiled_again(job, tmp_path):
    job = profiled(job, steps=(2, 4))
    stepper, directory = SimpleNamespace(job=job), SimpleNamespace(path=tmp_path)
    spans = {}
    for done in range(6):
        profile = StepProfile(stepper, directory, 0, done)
        spans[done] = (profile.first, profile.last) if profile.pending else None
    assert spans == {0: (2, 4), 1: (2, 4), 2: (3, 4), 3: (4, 4), 4: None, 5: None}


def test_without_a_profile_the_steps_are_passed_on_as_they_are(job, tmp_path):
    profile = StepProfile(SimpleNamespace(job=job), SimpleNamespace(path=tmp_path), 0, 0)
    steps = iter([])
    assert profile.around(steps, 0) is steps


def test_nothing_is_written_through_a_link(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "traces").symlink_to(target)
    with pytest.raises(Exception, match="is a link"):
        tracing.write(tmp_path / "traces" / "rank_0.json.gz", b"{}")
    assert list(target.iterdir()) == []
    (target / "victim").write_text("kept")
    (target / "rank_0.json").symlink_to(target / "victim")
    tracing.write(target / "rank_0.json", b"{}")
    assert (target / "victim").read_text() == "kept"
