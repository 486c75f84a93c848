"""What the heartbeats of whole runs say: ranks that do as they should are never accused."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.config.layout import Layout
from phalanx.launch.watchdog.diagnosis import diagnose
from phalanx.launch.watchdog.layout import Phase
from train.beating import beating, views
from train.runs import train


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (
            Layout(dp_replicate=2, dp_shard=2, pp=2, zero=3, accumulation=3),
            {"world", "pp", "dp_shard", "dp_replicate"},
        ),
        (Layout(cp=2, tp=2, sp=True, accumulation=3), {"world", "cp", "tp", "dp_shard_cp"}),
    ],
)
def test_the_records_of_a_run_are_complete_and_match(ranks, job, tmp_path, layout, axes):
    """Also FSDP2's own all-reduce over replicas is recorded."""
    ranks(beating, layout.world, tmp_path, train, dataclasses.replace(job, layout=layout))
    found = views(tmp_path)
    diagnosis = diagnose(found)
    assert not diagnosis.mismatch
    assert not diagnosis.waits
    for view in found.values():
        record = view.record
        assert record is not None
        assert (record.step, record.phase, record.trained) == (6, Phase.END, True)
        assert record.own_s > 0
        assert {call.axis for call in record.calls} == axes
        assert {call.operation for call in record.calls if not call.done} <= {"send"}  # never waited for
        assert all(call.source.startswith("phalanx/") for call in record.calls)
        assert not any(call.source.startswith("phalanx/comm/") for call in record.calls)
