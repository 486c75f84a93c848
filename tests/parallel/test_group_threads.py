"""What a call leaves behind in a rank's process: process groups have threads, which live as long as the groups."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from phalanx.config import layout_line
from phalanx.config.job import Job, Train
from phalanx.config.presets import PRESETS
from phalanx.parallel import mesh
from phalanx.train.step import Stepper


def built(ranks, line: str) -> int:
    """Build a replica and leave it; the threads that there were before, without what waits for the collector."""
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    job = Job(model=PRESETS["tiny"], layout=layout_line.parse(line), train=Train(global_batch=2))
    Stepper(job, mesh.build(job.layout, "cpu"), torch.device("cpu"), 64)
    return before


@pytest.mark.parametrize("line", ["dp_replicate=2", "dp_shard=2,zero=1"])
def test_groups_are_gone_after_a_call(ranks, line: str) -> None:
    ranks(built, 2, line)
    first, *_ = ranks(built, 2, line)
    for _ in range(3):
        last, *_ = ranks(built, 2, line)
    assert last <= first
