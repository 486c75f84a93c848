"""Ranks beyond a machine's resources are refused before any of them starts."""

from __future__ import annotations

import pytest

from phalanx.launch.capacity import Machine, problems

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


def test_memory_counts_as_well_as_cores() -> None:
    assert "0.5 GiB are free" in said(8, "cpu", Machine(8, 2**29, 0))
    assert not said(2, "cpu", Machine(8, 2**29, 0))


def test_an_accelerator_has_one_rank_and_cuda_needs_one() -> None:
    assert not said(8, "auto", SERVER)
    assert "9 ranks on this machine, which has 8 devices" in said(9, "cuda", SERVER, oversubscribe=True)
    assert not said(64, "cpu", SERVER)
    assert "0 CUDA devices" in said(1, "cuda", LAPTOP)
