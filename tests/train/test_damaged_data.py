"""Damaged token shards in whole runs: the run stops and names the block, or skips the same samples in any layout."""

import dataclasses
import platform
import shutil
from pathlib import Path

import pytest

from phalanx.config.layout import Layout
from phalanx.data import prepare as preparation
from phalanx.data.prepare import prepare
from phalanx.errors import DataError
from phalanx.train import agreement
from train.runs import change, losses, train

BLOCK = 256
"""Bytes: 128 tokens, 8 samples."""


@pytest.fixture
def nodes(job, tmp_path, monkeypatch):
    """A job whose shards, in small blocks, lie under the same relative path on two nodes: here and in `other`."""
    monkeypatch.setattr(preparation, "BLOCK_BYTES", BLOCK)
    monkeypatch.chdir(tmp_path)
    job = change(job, "data", dir="data")
    folder = prepare(job.data)
    shutil.copytree("data", "other/data")
    return job, folder, tmp_path / "other" / folder


def flip(folder: Path, block: int) -> None:
    path = folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[block * BLOCK + 5] ^= 1
    path.write_bytes(content)


def train_on_node(ranks, job, elsewhere: dict[int, str]):
    """Train; some ranks are on the node whose disk is in another folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "VERIFIED_BYTES", 0)  # as if the shards were larger
        if ranks.rank in elsewhere:
            patch.chdir(elsewhere[ranks.rank])
            patch.setattr(platform, "node", lambda: "other")
        return train(ranks, job)


def test_the_rank_that_reads_a_damaged_block_stops_the_run(ranks, nodes):
    job, _, other = nodes
    for block in range(30):
        flip(other, block)
    job = dataclasses.replace(job, layout=Layout(dp_replicate=2))
    with pytest.raises(
        DataError, match=r"train-00000\.bin: block \d+ \(from byte .* is damaged: .*phalanx data prepare"
    ):
        ranks(train_on_node, 2, job, {1: "other"})


LAYOUTS = [Layout(dp_replicate=3), Layout(tp=2), Layout(dp_replicate=2, pp=2, accumulation=2)]


def test_skipped_samples_do_not_depend_on_the_layout_or_on_who_sees_the_damage(ranks, nodes):
    job, _, other = nodes
    job = change(job, "data", on_corruption="skip", skip_quota=20)
    job = change(job, "train", steps=25)  # 300 samples, more than an epoch
    whole = change(job, "run", name="whole")
    ranks(train_on_node, 1, whole, {})
    flip(other, 3)
    flip(other, 17)
    alone = change(job, "run", name="alone")
    ranks(train_on_node, 1, alone, {0: "other"})
    assert losses(alone) != losses(whole)
    for number, layout in enumerate(LAYOUTS):
        # Only the last rank is on the node with the damage.
        several = change(dataclasses.replace(alone, layout=layout), "run", name=f"several{number}")
        ranks(train_on_node, layout.processes, several, {layout.processes - 1: "other"})
        assert losses(several) == pytest.approx(losses(alone), rel=1e-9)


def test_more_damage_than_the_quota_stops_all_ranks(ranks, nodes):
    job, _, other = nodes
    flip(other, 3)
    job = change(dataclasses.replace(job, layout=Layout(dp_replicate=2)), "data", on_corruption="skip", skip_quota=8)
    with pytest.raises(
        DataError, match=r"9 samples of split train are damaged, more than data\.skip_quota 8(.|\n)*block 3"
    ):
        ranks(train_on_node, 2, job, {1: "other"})
