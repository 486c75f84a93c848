"""`phalanx verify --resume`: runs that change their layout equal one without interruption, and faults are named."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from covering import also_whole
from phalanx.cli.main import main
from phalanx.config.job import Job, Optimizer
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig
from phalanx.launch.ranks import Ranks
from phalanx.train.saving import Saving
from phalanx.train.state import TrainState
from phalanx.verify import cases, resume
from phalanx.verify.select import RESUMED, resumed_pairs

JOB = Job(
    model=ModelConfig(n_layers=4, d_model=16, n_heads=2, d_ff=16, seq_len=8, vocab_size=17),
    optimizer=Optimizer(lr=1e-2),
)


def test_pairs_are_there_and_back_and_from_one_to_the_next():
    selection, pairs = resumed_pairs(Job(model=JOB.model, layout=Layout(dp_replicate=4)))
    assert not selection.skipped
    lines = [(a.layout.line(), b.layout.line()) for a, b in pairs]
    own, others = "dp_replicate=4", [parse(line).line() for line in RESUMED]
    bucket = selection.compared.job.layout.bucket_mb
    assert all(own in pair[0] or own in pair[1] for pair in lines[: 2 * len(others)])
    assert len(lines) == len(set(lines)) == 3 * len(others) - 1
    for a, b in pairs:
        assert (a.model, a.train) == (b.model, b.train)
        assert bool(a.model.moe.n_experts) == (max(a.layout.ep, b.layout.ep) > 1)
        assert {a.layout.bucket_mb, b.layout.bucket_mb} == {bucket}


def test_named_layouts_go_on_in_each_other_and_one_alone_in_one_process():
    lines = ["tp=2", "dp_shard=2,zero=1", "pp=2"]
    assert len(resumed_pairs(JOB, lines=lines)[1]) == 6
    _, pairs = resumed_pairs(JOB, lines=["tp=2"])
    assert [(a.layout.world, b.layout.world) for a, b in pairs] == [(1, 2), (2, 1)]
    selection, pairs = resumed_pairs(JOB, lines=["pp=2,schedule=pipedream,accumulation=4"])
    assert not pairs
    assert "without a flush" in selection.skipped[0].reason
    assert len(resumed_pairs(JOB, max_ranks=1)[1]) == 0


@pytest.mark.parametrize(
    "lines",
    [
        ("dp_shard=2,zero=1,tp=2,sp=true", "pp=2,schedule=interleaved_1f1b"),
        *also_whole(("tp=2,sp=true", "dp_shard=2,zero=1", "pp=2,schedule=interleaved_1f1b")),
    ],
)
def test_runs_equal_one_without_interruption(tmp_path, capsys, lines):
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: {n_layers: 4, d_model: 16, n_heads: 2, d_ff: 16, seq_len: 8, vocab_size: 17}\noptimizer: {lr: 0.01}\n"
    )
    assert main(["verify", str(job), "--resume", "--json", "--layouts", *lines]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["ok"]
    worlds = itertools.permutations([parse(line).world for line in lines], 2)
    assert sorted(pair["ranks"] for pair in document["pairs"]) == sorted(map(list, worlds))
    for pair in document["pairs"]:
        assert pair["restored"], pair
        assert max(pair[name] for name in pair if name.endswith("_max_rel")) <= 1e-9
    assert captured.err.count("ok  ") == len(document["pairs"])


def faulty(ranks: Ranks, job: Job, vocab: int, until: int, root: Path, start: Path | None, fault: str) -> list[float]:
    """Trains as `train_until` does, with a fault in saving or loading."""
    load, save = TrainState.load, Saving.save
    with pytest.MonkeyPatch.context() as patch:

        def loaded(self: TrainState, path: Path) -> None:
            load(self, path)
            optimizer = self.stepper.optimizer
            if fault == "moments":
                for tensors in optimizer.state_tensors().values():
                    for tensor in tensors.values():
                        tensor.zero_()
            elif fault == "updates":
                optimizer.updates = 0
            elif fault == "step":
                self.step, self.samples = self.step - 1, self.samples - job.train.global_batch

        def saved(self: Saving, last: bool = False) -> float:
            if fault == "slice" and job.layout.tp > 1 and ranks.rank == 1:
                for shard in self.state.stepper.replica.shards:
                    if shard.name.endswith("blocks.1.mlp.up.weight"):
                        with torch.no_grad():
                            shard.value.view(-1)[0] += 1e-6
            return save(self, last)

        patch.setattr(TrainState, "load", loaded)
        patch.setattr(Saving, "save", saved)
        return resume.train_until(ranks, job, vocab, until, root, start)


FAULTS = {
    "moments": "what is loaded is not the checkpoint: exp_avg/embed.weight",
    "updates": "what is loaded is not the checkpoint: ",
    "step": "the checkpoint of step 2 resumes at step 1",
    "slice": "blocks.1.mlp.up.weight: the parameter after step 2 differs by",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault, monkeypatch, ranks):
    class Warm:
        """The pool of all tests."""

        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Warm:
            return self

        def __exit__(self, *_: object) -> None: ...
        def run(self, function, world, *args, timeout=60.0):
            if function is resume.train_until:
                return ranks(faulty, world, *args, fault)
            return ranks(function, world, *args)

    monkeypatch.setattr(cases, "Pool", Warm)
    selection, pairs = resumed_pairs(JOB, lines=["tp=2"])
    report = resume.resume_all(selection, pairs[1:], 2, lambda case: None)
    (case,) = report.cases
    assert not case.ok
    assert FAULTS[fault] in case.complaint(), case.complaint()
    assert case.complaint() in report.text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", "--full"], "--resume has its own layouts"),
        (["--resume", "--layouts", "tp=3"], "tp=3"),
    ],
)
def test_mistakes_are_named(words, message, capsys):
    assert main(["verify", "model.n_heads=2", "model.d_model=16", *words]) == 2
    assert message in capsys.readouterr().err
