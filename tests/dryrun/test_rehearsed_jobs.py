"""Rehearsals before a job is recommended, trained or submitted, and as a function."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from phalanx import api
from phalanx.api import load_job, plan_layout
from phalanx.cli.main import main
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.dryrun import check as checking
from phalanx.dryrun.check import check, rehearse_ranks, shortened
from phalanx.dryrun.rehearse import RankRehearsal
from phalanx.dryrun.world import DryWorld
from phalanx.errors import DoesNotFitError, JobError

LLAMA = ModelConfig(n_layers=2, d_model=64, n_heads=4, seq_len=64, vocab_size=64, positions="rope", activation="swiglu")
TIGHT = [
    *("cluster.device=cpu", "cluster.accelerator.name=small", "cluster.accelerator.memory_gib=0.001"),
    *("cluster.accelerator.bandwidth_gbs=10", "cluster.accelerator.bf16_tflops=1", "cluster.accelerator.fp16_tflops=1"),
]
WORDS = ["model=tiny", "data.corpus=random", "data.random_tokens=2000", "global_batch=4", "run.sample_tokens=0"]
PLAN = ["plan", "model=gpt2", "cluster=dgx-h100:1", "precision=bf16", "global_batch=32", "--check"]


def job_of(layout: Layout, batch: int) -> Job:
    return Job(model=LLAMA, layout=layout, train=Train(global_batch=batch))


def test_micro_batches_that_change_no_memory_are_left_out():
    """They change that of their tokens, which wait on the device: two int64 each, and a count."""
    assert shortened(job_of(Layout(pp=2, micro_batch=1), 8), 64, "cpu").layout.accumulation == 4
    job = job_of(Layout(micro_batch=1), 4)
    assert shortened(job, 64, "cpu").layout.accumulation == 2
    found, whole = check(job, 64).fullest, rehearse_ranks(job, 64, [0]).fullest
    assert found.peak <= whole.peak <= found.peak + 2 * (2 * 8 * LLAMA.seq_len + 8)


def test_gpipe_keeps_every_micro_batch():
    job = job_of(Layout(pp=2, micro_batch=1, schedule="gpipe"), 16)
    assert shortened(job, 64, "cpu") == job


def test_a_long_job_is_rehearsed_where_it_is_predicted_fullest(monkeypatch):
    monkeypatch.setattr(checking, "CHEAP", 1)
    job = job_of(Layout(pp=2, micro_batch=1), 2)
    found = check(job, 64)
    needed = [each.needed for each in found.predicted]
    assert [found.stage(each) for each in found.ranks] == [needed.index(max(needed))]


def test_the_context_and_what_compiling_saves_count():
    words = ["model=gpt2", "cluster=dgx-h100:1", "precision=bf16", "layout=dp_shard=8", "global_batch=8", "n_layers=2"]
    job = api.load_job(*words)
    found = api.rehearse_job(job, ranks=[7])
    eager = api.rehearse_job(replace(job, train=replace(job.train, compile=False)), ranks=[7])
    assert found.fullest.peak == eager.fullest.peak
    assert found.predicted == eager.predicted
    assert eager.needed(eager.fullest) == eager.fullest.peak + eager.predicted[0].context
    assert found.needed(found.fullest) == eager.needed(eager.fullest) - found.saved[0]
    assert found.saved[0] > 0 == eager.saved[0]
    assert "less when compiled" in found.verdict


def test_ranks_that_are_not_there():
    with pytest.raises(JobError, match="rank 9: the layout has ranks 0 to 7"):
        api.rehearse_job(api.load_job("model=tiny", "data.corpus=random", "dp_shard=8", "global_batch=8"), ranks=[9])


def test_a_value_that_depends_on_data_is_refused_by_operation_and_module():
    dry = DryWorld(lambda: "forward", "cpu", {})
    with pytest.raises(JobError, match=r"operation item in no module \(forward\).*torch.int64.*phalanx predict"):
        dry._read(torch.ones((), dtype=torch.int64))


def heavier(monkeypatch: pytest.MonkeyPatch, *, every: bool = False) -> None:
    """Makes the first layout, or every one, need 100 GiB when rehearsed, without running it."""
    seen: list[str] = []

    def rehearse(job: Job, rank: int, *_: object) -> RankRehearsal:
        size = 2**30 if seen and not every else 100 * 2**30
        seen.append(job.layout.line())
        return RankRehearsal(rank, {}, {"parameters": size}, "forward")

    monkeypatch.setattr(checking, "rehearse", rehearse)


def test_plan_strikes_what_does_not_fit_and_takes_the_next(monkeypatch, capsys):
    words = [*PLAN, "model=llama3-8b", "global_batch=64"]
    words.remove("model=gpt2")
    words.remove("global_batch=32")
    heavier(monkeypatch)
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (struck,) = document["struck"]
    assert struck["line"].startswith("dp_shard=8,zero=2")
    assert "100.0GiB" in struck["why"]
    assert "does not fit" in struck["why"]
    assert document["best"]["line"] != struck["line"]
    assert document["candidates"][0]["rehearsed_bytes"] > 2**30
    assert document["notes"] == document["alternatives"] == []
    heavier(monkeypatch)
    job = load_job(*(word for word in words if "=" in word), "layout=auto")
    plan = plan_layout(job, check=True, top=2)
    assert plan.struck == {struck["line"]: struck["why"]}
    assert [each.layout.line() for each in plan.best] == [each["line"] for each in document["candidates"][:2]]
    assert [each.rehearsed for each in plan.best] == [each["rehearsed_bytes"] for each in document["candidates"][:2]]


def test_the_api_recommends_nothing_if_nothing_fits(monkeypatch):
    heavier(monkeypatch, every=True)
    job = load_job(*(word for word in PLAN if "=" in word), "layout=auto")
    with pytest.raises(DoesNotFitError, match="none can be recommended"):
        plan_layout(job, check=True)


def test_plan_recommends_nothing_if_nothing_fits(monkeypatch, capsys):
    heavier(monkeypatch, every=True)
    assert main(PLAN) == 3
    error = capsys.readouterr().err
    assert "none can be recommended" in error
    assert "100.0GiB" in error


def test_plan_shows_the_rehearsed_peak(tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main([*PLAN, "n_layers=2", "--html", str(page)]) == 0
    assert "rehearsed" in capsys.readouterr().out
    assert ">rehearsed" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", ["plan", "dryrun"])
def test_ctrl_c_ends_a_rehearsal_and_leaves_nothing_behind(verb, tmp_path, monkeypatch, capsys):
    def interrupted(*args, **rest):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checking, "rehearse", interrupted)
    words = [*PLAN, "--html", "plan.html"] if verb == "plan" else ["dryrun", *WORDS, "--svg", "memory.svg"]
    assert main(words) == 130
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == "phalanx: interrupted"
    assert "Traceback" not in error
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("word", ["--framework=megatron", "--products=fp8"])
def test_plan_rehearses_only_its_own_program(word, capsys):
    assert main([*PLAN, word]) == 2
    assert "--check rehearses Phalanx's own program" in capsys.readouterr().err


def test_train_rehearses_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", *WORDS, "train.steps=1", "--json"]
    assert main([*words, "run.name=plain"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*words, "run.name=first", "--rehearse"]) == 0
    said = capsys.readouterr()
    assert "rehearsed in" in said.err
    assert json.loads(said.out)["loss"] == plain["loss"]  # nothing of the rehearsal is left in this process


def test_train_stops_before_a_job_that_does_not_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", *WORDS, *TIGHT, "--rehearse", "run.name=big"]
    assert main(words) == 3
    error = capsys.readouterr().err
    assert "exceeds 1.0MiB per device: does not fit" in error
    assert "phalanx plan --check" in error


def test_launch_rehearses_before_it_submits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["launch", *WORDS, "--submit", "slurm", "--time", "1h", "--dry-run", "--rehearse"]
    assert main([*words, *TIGHT]) == 3
    assert "does not fit" in capsys.readouterr().err
    assert main([*words, "layout=auto", "--nproc-per-node", "1"]) == 2
    assert "--rehearse: layout=auto" in capsys.readouterr().err


def test_launch_offers_a_rehearsal_of_a_large_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["launch", "model=llama3-8b", "data.corpus=random", "layout=dp_shard=8", "--submit", "slurm", "--dry-run"]
    assert main(words) == 0
    assert "--rehearse runs its fullest ranks here first" in capsys.readouterr().err
