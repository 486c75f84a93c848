"""A node with a disk of its own: ranks that do not see the run directory or the data are named, on every rank."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from unittest import mock

import pytest

from phalanx.data.index import INDEX
from phalanx.errors import RunError
from phalanx.launch.ranks import Ranks
from phalanx.train import agreement as shared
from phalanx.train.run_directory import RunDirectory


def complaint(ranks: Ranks, other_disk: str) -> str:
    """Asks as one rank of three nodes, of which the last has another disk; returns the error's message."""
    if ranks.rank == 2:
        os.chdir(other_disk)
    nodes = dataclasses.replace(ranks, local_world=1, local_rank=0, node_rank=ranks.rank)
    with mock.patch.object(shared, "VISIBLE_S", 0.2):
        try:
            shared.require_shared(RunDirectory(Path("runs/job")), Path("data/tokens"), nodes)
        except RunError as error:
            return str(error)
    return ""


def test_the_rank_that_sees_nothing_is_named(ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    (here / "data" / "tokens").mkdir(parents=True)
    (here / "data" / "tokens" / INDEX).touch()
    (other / "runs" / "job").mkdir(parents=True)  # an equal path on another disk
    monkeypatch.chdir(here)
    assert ranks(complaint, 3, str(here)) == ["", "", ""]
    messages = set(ranks(complaint, 3, str(other)))
    assert len(messages) == 1, "every rank ends with the same message"
    run, data = messages.pop().splitlines()
    blind = f"is not shared: rank 2 on {platform.node()} does not see {other}/"
    assert run.startswith(f"run.dir {blind}runs/job, as rank 0 on {platform.node()} does; ")
    assert data.startswith(f"data.dir {blind}data/tokens, as rank 0 ")
    assert list((here / "runs" / "job").iterdir()) == [], "the token is removed"
