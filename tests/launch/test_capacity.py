"""Ranks beyond a machine's resources are refused before any of them starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.check.load import load_words
from phalanx.cli.train import _require_cores
from phalanx.config.overrides import parse
from phalanx.errors import JobError
from phalanx.launch.grid import Machine, problems, tasks_per_node
from phalanx.launch.ranks import Ranks

LAPTOP = Machine(cores=8, free_bytes=12 * 2**30, devices=0)
SERVER = Machine(cores=64, free_bytes=400 * 2**30, devices=8)


def said(ranks: int, device: str, machine: Machine, oversubscribe: bool = False) -> str:
    return "\n".join(problems(ranks, device, machine, oversubscribe=oversubscribe))


@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 40])
def test_a_laptop_bears_some_ranks(ranks: int) -> None:
    assert not said(ranks, "auto", LAPTOP)


@pytest.mark.parametrize("ranks", [200, 5000])
def test_too_many_ranks_are_refused_unless_the_user_insists(ranks: int) -> None:
    text = said(ranks, "auto", LAPTOP)
    assert f"{ranks} ranks" in text
    assert "8 cores bear 64" in text
    assert "--oversubscribe" in text
    assert not said(ranks, "cpu", LAPTOP, oversubscribe=True)


def test_training_in_fp8_needs_an_accelerator() -> None:
    (text,) = problems(1, "auto", LAPTOP, oversubscribe=True, precision="fp8")
    assert "only emulated" in text
    assert text.endswith("nearest legal: bf16")
    assert [*problems(1, "cpu", SERVER, oversubscribe=False, precision="fp8")] == [text]
    assert not [*problems(1, "auto", SERVER, oversubscribe=False, precision="fp8")]


def test_memory_counts_as_well_as_cores() -> None:
    assert "0.5 GiB are free" in said(8, "cpu", Machine(8, 2**29, 0))
    assert not said(2, "cpu", Machine(8, 2**29, 0))


def test_the_ranks_that_other_launchers_started_on_a_host_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tasks_per_node({"SLURM_STEP_TASKS_PER_NODE": "64(x2)", "SLURM_TASKS_PER_NODE": "1"}) == 64
    assert tasks_per_node({"SLURM_TASKS_PER_NODE": "4,3"}) == tasks_per_node({}) == 0
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    job = load_words(parse(["cluster.device=cpu", "dp_shard=64", "global_batch=64"])).job
    torchrun = Ranks(rank=3, world=64, local_rank=3, local_world=64, node_rank=0, source="torchrun")
    with pytest.raises(JobError, match="64 ranks on this machine, whose 2 cores bear 16"):
        _require_cores(job, torchrun, oversubscribe=False)
    _require_cores(job, torchrun, oversubscribe=True)
    slurm = replace(torchrun, local_world=None, source="slurm")
    _require_cores(job, slurm, oversubscribe=False)  # unknown: they may be on 64 nodes
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "64")
    with pytest.raises(JobError, match="insist with --oversubscribe"):
        _require_cores(job, slurm, oversubscribe=False)


def test_an_accelerator_has_one_rank_and_cuda_needs_one() -> None:
    assert not said(8, "auto", SERVER)
    assert "9 ranks on this machine, which has 8 devices" in said(9, "cuda", SERVER, oversubscribe=True)
    assert not said(64, "cpu", SERVER)
    assert "0 CUDA devices" in said(1, "cuda", LAPTOP)
