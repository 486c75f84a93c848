"""The comparisons with peers: the same work for every contender, and reports that name no folder."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.chaos.bench import without_root
from benchmarks.peers import harness, torch_tp
from benchmarks.report import RESULTS, without_places
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from benchmarks import snapshots
from benchmarks import tensor_parallel as benchmark
from phalanx.config.job import Job
from phalanx.config.model import ModelConfig

# The comparison of tensor-parallel degrees: the same work for every contender, and its memory counted whole.


def test_the_contenders_share_one_batch_on_four_ranks():
    jobs = [benchmark.load(tp, benchmark.QUICK) for tp in benchmark.DEGREES]
    assert [(job.layout.dp_shard, job.layout.tp, job.layout.world) for job in jobs] == [(4, 1, 4), (2, 2, 4), (1, 4, 4)]
    assert {benchmark.tokens(job) for job in jobs} == {16 * 32}
    whole = benchmark.batch(jobs[-1], 0).tokens
    for job in jobs:
        parts = [benchmark.batch(job, rank).tokens for rank in range(job.layout.data_ranks)]
        assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("measured", [True, False])
def test_the_table_has_predictions_where_the_machine_was_measured(measured):
    names = [benchmark.name_of(tp) for tp in benchmark.DEGREES]
    result = {
        "predicted": {name: {"step_s": 0.2, "bytes": 2**20} for name in names if measured},
        "median_s": dict.fromkeys(names, 0.1),
        "ratios": dict.fromkeys(names, 1.0),
        "peak_bytes": dict.fromkeys(names, 2**21),
        "tokens": 2048,
    }
    head, *rows = benchmark.table(result)
    assert len(rows) == 3
    expected = ("200 ms", "1.0 MiB") if measured else ("", "")
    assert rows[1] == ("dp_shard 2 × tp 2", "100 ms", expected[0], "20,480", "**1.000 ×**", "2.0 MiB", expected[1])
    assert len(head) == len(rows[1])


# torch's parallelize_module, as benchmarks compare with it, computes what one process does.

JOB = Job(model=ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=8, vocab_size=11))


def losses_and_parameters(sequence: bool | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps on one process (None), or cut over the ranks of the default group."""
    torch.set_default_dtype(torch.float64)
    model = harness.build(JOB)
    if sequence is not None:
        torch_tp.cut(model, 2, sequence)
    optimizer = harness.adamw(model, JOB)
    step = harness.plain_step(model, optimizer, lambda: torch_tp.clip(model, limit=0.1))
    tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = [step(tokens[:, :-1], tokens[:, 1:]).item() for _ in range(2)]
    named = dict(model.named_parameters())
    return losses, {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in named.items()}


def cut_over(ranks, sequence):
    return losses_and_parameters(sequence)


def alone(ranks):
    return losses_and_parameters(None)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp and sp"])
def test_two_ranks_equal_one_process(ranks, sequence):
    expected, parameters = ranks(alone, 1)[0]
    for losses, found in ranks(cut_over, 2, sequence):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert expected[1] < expected[0]
        for name, value in found.items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-9, atol=1e-12, msg=name)


# A peer measures what it is named after.


def test_another_parallel_module_than_asked_for_is_not_measured():
    harness.require(nn.Linear(2, 2), nn.Module)
    with pytest.raises(RuntimeError, match="asked for FSDPModule, the library made Linear: not measured"):
        harness.require(nn.Linear(2, 2), FSDPModule)


# Published results name no folder of the machine.


def test_no_folder_of_the_machine_is_left():
    root = RESULTS.parents[1]
    text = f'"{root}/.venv/bin/python", "{tempfile.gettempdir()}/x", "{sys.base_prefix}/lib", "{Path.home()}/y"'
    assert without_places(text) == '"./.venv/bin/python", "$TMPDIR/x", "$PYTHON/lib", "~/y"'


def test_no_folder_of_a_fault_is_left():
    root = Path(tempfile.gettempdir()) / "phalanx_chaos_x1y2" / "phalanx" / "faults" / "16-becomes-read-only"
    told = f"{root / 'work'}/runs/chaos/logs/stderr.log cannot be written; {root}/tmp/x is full"
    found = without_root({"told": told, "reasons": [told], "seconds": 3.5}, root)
    expected = "runs/chaos/logs/stderr.log cannot be written; tmp/x is full"
    assert found == {"told": expected, "reasons": [expected], "seconds": 3.5}


def test_committed_results_name_none():
    places = ('"/home/', '"/root/', "/site-packages/phalanx", '"/tmp/', "/phalanx_chaos_")
    for path in (*RESULTS.glob("*.json"), *RESULTS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert not [word for word in places if word in text], path


# Snapshots of what the program says: which differences count, and that a run of them is complete.


def test_differences_are_named_by_their_place():
    before = {"code": 0, "out": {"step_s": 1.0, "parts": [1, 2], "seconds": 3.0}, "error": "a"}
    after = {"code": 0, "out": {"step_s": 1.0 + 1e-13, "parts": [1, 3], "seconds": 4.0}, "error": "b", "more": 1}
    assert list(snapshots.differences(before, after)) == ["out / parts[1]: 2 -> 3", "error: a -> b", "more: None -> 1"]
    assert list(snapshots.differences(1.0, 1.0 + 1e-9, "x")) == ["x: 1.0 -> 1.000000001"]


def test_what_is_said_has_its_exit_code():
    wrong = snapshots.said(["predict", *snapshots.CALCULATED["predict a dense model"][1:], "++layout.tp=x"])
    assert wrong["code"] == 2
    assert "layout.tp" in wrong["error"]
    document = snapshots.said([*snapshots.CALCULATED["predict a dense model"], "--json"])
    assert document["out"]["step_time_s"] > 0


def test_a_second_run_finds_what_has_changed(monkeypatch, tmp_path, capsys):
    file, said = tmp_path / "before.json", {"a": 1}
    monkeypatch.setattr(snapshots, "PARTS", (said.items,))
    monkeypatch.setattr("sys.argv", ["snapshots", str(file)])
    assert (snapshots.main(), snapshots.main()) == (0, 0)
    said["a"] = 2
    assert snapshots.main() == 1
    assert "items: a: 1 -> 2\n1 differences" in capsys.readouterr().out
