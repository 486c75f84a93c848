"""Layouts whose messages travel through host memory, as on a GPU that ranks share, equal one process."""

from __future__ import annotations

from unittest import mock

import pytest

from phalanx.comm.axis import StagedAxis
from phalanx.config.job import Job
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig
from phalanx.parallel import mesh
from phalanx.verify.measure import TOLERANCE, compare, record
from phalanx.verify.run import first_difference
from phalanx.verify.select import select

JOB = Job(model=ModelConfig(n_layers=4, d_model=16, n_heads=2, seq_len=8, vocab_size=11, dropout=0.1))
LINES = [
    "dp_shard=2,zero=2,accumulation=2",
    "dp_shard=2,zero=3,reshard=false,accumulation=2",
    "dp_replicate=2,dp_shard=2,zero=3",
    "tp=2,sp=true",
    "pp=2,schedule=zb_v,accumulation=4",
    "pp=2,schedule=dualpipe,accumulation=4",
    "cp=2",
    "cp=2,cp_ulysses=2",
    "dp_shard=2,ep=2",
]


def compare_staged(ranks, *args):
    with mock.patch.object(mesh, "Axis", StagedAxis):
        return compare(ranks, *args)


@pytest.mark.parametrize("line", LINES)
def test_messages_through_host_memory_change_nothing(ranks, tmp_path, line):
    selection, path = select(JOB, lines=[line]), tmp_path / "record"
    (layout,) = selection.layouts
    ranks(record, 1, selection.alone(layout), selection.compared.vocab_size, 2, path)
    found = ranks(compare_staged, layout.processes, selection.case(layout), selection.compared.vocab_size, 2, path)[0]
    assert first_difference(found, TOLERANCE) is None


def test_a_cuda_job_is_compared_on_cuda():
    from dataclasses import replace

    from phalanx.config.cluster import Cluster

    for device, expected in (("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")):
        selection = select(replace(JOB, cluster=Cluster(device=device)), lines=["tp=2"])
        assert selection.case(parse("tp=2")).cluster.device == expected
