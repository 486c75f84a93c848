"""What the heartbeats of whole runs say: ranks that do as they should are never accused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from phalanx.checkpoint.inventory import newest_valid
from phalanx.comm import agree, calls
from phalanx.config.layout import Layout
from phalanx.errors import MismatchError
from phalanx.launch.watchdog.diagnosis import diagnose
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.train import loop
from phalanx.train.requests import StopRequest
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
        modules = {call.module for call in record.calls if call.axis == "tp" and call.operation != "all_to_all"}
        assert "tp" not in axes or {"blocks.0.attn", "blocks.1.attn", "blocks.0.mlp", "blocks.1.mlp"} <= modules
        assert not any(call.module for call in record.calls if call.axis == "world")


def differing_norm(ranks, job):
    """Rank 1 sums another type than the others before the last norm, past the mesh's axes."""
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    calls.record()
    norm = trainer.stepper.replica.model.objective.model.final_norm

    def sum_again(*_) -> None:
        dist.all_reduce(torch.ones(2, dtype=torch.int32 if ranks.rank == 1 else torch.float32))

    norm.register_forward_pre_hook(sum_again)
    with pytest.raises(
        MismatchError, match=r"all-reduce #\d+ of world in final_norm \((int|float)32, 2; tests/"
    ) as error:
        trainer.run()
    assert "rank 1 called" in str(error.value) or "rank 0 called" in str(error.value)


def test_calls_that_differ_end_a_run_before_its_checkpoint_under_any_launcher(ranks, job, tmp_path):
    """The ranks compare themselves; no watchdog looks at them."""
    job = dataclasses.replace(job, layout=Layout(dp_replicate=2))
    ranks(beating, 2, tmp_path, differing_norm, job)
    assert newest_valid(tmp_path / "runs/run/checkpoints") is None


def several_ways(ranks):
    """Calls of a plug-in in all forms, as rank 0 and rank 1 make them."""
    calls.record()
    differentiable.all_reduce(torch.ones(2))
    dist.all_gather_object([None, None], "x" * ranks.rank)
    if ranks.rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(3), 0)
    dist.broadcast(torch.ones(2), src=1)
    other, mine, theirs = 1 - ranks.rank, torch.full((2,), ranks.rank), torch.empty(2, dtype=torch.int64)
    sent_and_received = [
        [dist.isend(mine, other), dist.irecv(theirs, other)],
        dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]),
    ]
    for work in (work for works in sent_and_received for work in works):
        work.wait()
    assert theirs.tolist() == [other, other]
    functional.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD)
    assert functional.all_reduce(torch.ones(2), "max", dist.group.WORLD.group_name).tolist() == [1, 1]
    agree.require_same_calls()
    if ranks.rank == 0:
        dist.isend(torch.ones(3), 1).wait()
    else:
        dist.irecv(torch.ones(3, dtype=torch.int32), 0).wait()
    with pytest.raises(MismatchError, match="#4 of world 0 → 1"):
        agree.require_same_calls()


def test_every_way_of_calling_torch_distributed_is_recorded(ranks, tmp_path):
    ranks(beating, 2, tmp_path, several_ways)
    calls = [call for call in views(tmp_path)[0].record.calls if "test_heartbeats" in call.source or call.root >= 0]
    operations = [call.operation for call in calls]
    assert {"send", "receive", "broadcast", "all_reduce_max"} <= set(operations)
    assert (operations.count("send"), operations.count("receive")) == (4, 2)
    assert any((call.operation, call.dtype, call.shape) == ("all_gather", "float32", (2,)) for call in calls)
    assert any(call.root == 1 for call in calls)
    assert any(call.operation == "all_reduce" for call in views(tmp_path)[0].record.calls)
