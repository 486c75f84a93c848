"""Lustre's stripes of token shards and checkpoints, with a stand-in for `lfs`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from checkpoint.contents import contents, save_tensors
from disks import lustre
from phalanx.checkpoint import save as saving
from phalanx.checkpoint.save import Save
from phalanx.config.job import Data
from phalanx.data.files import auto_stripes, mount_of, stripe, striping_in
from phalanx.data.prepare import prepare

GIB = 2**30


@pytest.mark.parametrize(
    ("files", "gibs", "targets", "stripes"),
    [
        (1, 0, 16, 1),  # small
        (1, 5, 16, 5),  # a stripe per GiB
        (1, 100, 16, 16),  # as many as there are
        (4, 100, 16, 4),  # four files share them
        (64, 640, 16, 1),  # more files than targets
    ],
)
def test_files_that_are_written_together_share_the_targets(files, gibs, targets, stripes):
    assert auto_stripes(files, gibs * GIB, targets) == stripes


def test_a_folder_gets_the_stripes_that_are_asked_for(tmp_path, monkeypatch):
    calls = lustre(tmp_path, monkeypatch)
    told = stripe(tmp_path, 8, files=2, nbytes=0)
    assert told == f"Lustre: 8 stripes per file in {tmp_path}, 16 storage targets"
    assert calls.read_text().splitlines() == [f"osts {tmp_path}", f"setstripe --stripe-count 8 {tmp_path}"]
    calls.write_text("")
    assert not stripe(tmp_path, 0, files=2, nbytes=0)
    assert not stripe(Path("/"), 8, files=2, nbytes=0)
    assert not calls.read_text()


def test_a_link_is_followed_to_the_file_system_of_the_folder(tmp_path, monkeypatch):
    folder = tmp_path / "scratch"
    folder.mkdir()
    calls = lustre(folder, monkeypatch)
    (tmp_path / "link").symlink_to(folder)
    assert mount_of(tmp_path / "link")[0] == "ext4"
    assert stripe(tmp_path / "link", 2, files=1, nbytes=0)
    assert "setstripe --stripe-count 2" in calls.read_text()


@pytest.mark.parametrize("why", ["no lfs on PATH", "Operation not permitted", "no active storage targets"])
def test_striping_that_fails_is_told_and_raises_nothing(tmp_path, monkeypatch, why):
    lustre(tmp_path, monkeypatch, refuses="permitted" in why)
    if "PATH" in why:
        monkeypatch.setenv("PATH", str(tmp_path))
    if "active" in why:
        (tmp_path / ".bin" / "lfs").write_text("#!/bin/sh\n")
    assert why in stripe(tmp_path, "auto", files=1, nbytes=8 * GIB)


def test_the_striping_of_a_folder_may_have_several_parts():
    parts = "stripe_count: 1 stripe_size: 1048576\n stripe_count: -1 stripe_size: 4194304\n"
    assert striping_in(parts) == "stripe count 1 × 1.0MiB, then stripe count -1 × 4.0MiB"
    assert striping_in("") == "an unknown striping"


def test_token_shards_lie_on_one_target_each(data: Data, tmp_path, monkeypatch):
    calls, told = lustre(tmp_path, monkeypatch), list[str]()
    folder = prepare(data, progress=lambda what, done, total: told.append(what))
    assert f"setstripe --stripe-count 1 {folder}" in calls.read_text()
    assert f"Lustre: 1 stripe per file in {folder}, 16 storage targets" in told


@pytest.mark.parametrize("refuses", [False, True])
def test_a_checkpoint_is_striped_by_its_size_and_is_whole_whatever_lfs_says(tmp_path, monkeypatch, caplog, refuses):
    monkeypatch.setattr(saving, "_log_once", logging.getLogger(saving.__name__).info)
    calls, root = lustre(tmp_path, monkeypatch, refuses=refuses), tmp_path / "run" / "checkpoints"
    with caplog.at_level(logging.INFO, "phalanx"):
        path = save_tensors(root, 5, {"w": torch.ones(3)}, {})
    assert torch.equal(contents(path)["w"], torch.ones(3))
    assert f"setstripe --stripe-count 1 {root}/.step-000005.tmp-" in calls.read_text()
    told = "Lustre's own striping is used in" if refuses else "Lustre: 1 stripe per file in"
    assert f"{told} {root}" in caplog.text


def test_a_large_checkpoint_has_more_stripes_and_a_stated_number_counts(tmp_path, monkeypatch):
    calls, root = lustre(tmp_path, monkeypatch), tmp_path / "run" / "checkpoints"
    for step, stripes in enumerate(("auto", 3)):
        save = Save.begin(root, step, ranks=2, need=10 * GIB, stripes=stripes)
        assert save is not None
        save.discard()
    counts = [line.split()[2] for line in calls.read_text().splitlines() if line.startswith("setstripe")]
    assert counts == ["5", "3"]
