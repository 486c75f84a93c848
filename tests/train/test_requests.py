"""Requests to stop and to save, and heartbeats of whole runs."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.contents import require_same_bits
from phalanx.checkpoint.inventory import newest_valid
from phalanx.comm import agree, calls
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.data import loader
from phalanx.errors import MismatchError, StoppedError
from phalanx.launch.watchdog.diagnosis import diagnose
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.train import feed, loop
from phalanx.train.requests import SIGNALS, Requests, SaveTimer, StopRequest
from train.beating import beating, views
from train.runs import change, rows, train, weights

# Requests to stop and to save: how ranks agree on them, and that no phase of a run keeps one waiting.


ONE_RANK = st.builds(Requests, stop=st.booleans(), void=st.booleans())


@given(st.booleans(), st.lists(ONE_RANK, min_size=1, max_size=8), st.integers(1, 100_000))
def test_a_sum_over_the_ranks_has_the_requests_of_any_of_them(saves, ranks, times):
    """The same few ranks `times` over, because the sum of a million ranks must be exact too."""
    ranks[0] = dataclasses.replace(ranks[0], save=saves)
    encoded = torch.tensor([float(each.encode()) for each in ranks], dtype=torch.float64)
    found = Requests.decode((encoded[1:].sum() * times + encoded[0]).item())
    assert found == Requests(any(r.stop for r in ranks), saves, any(r.void for r in ranks))
    assert found.pauses == (found.stop or found.save)


def test_the_timer_is_due_until_a_checkpoint_is_written():
    now = [100.0]
    timer = SaveTimer(2, lambda: now[0])
    assert not timer.due
    now[0] += 120
    assert timer.due
    assert timer.due
    timer.restart()
    assert not timer.due
    assert not SaveTimer(0, lambda: now[0] * 1e9).due


def timed(ranks, job: Job) -> tuple[int, list[str]]:
    """Trains by a clock that shows one minute per step. Returns the last step, and the checkpoints that were kept."""
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    trainer.save_timer.clock = lambda: 60.0 * trainer.state.step
    step = trainer.run()["step"]
    return step, sorted(path.name for path in (Path(job.run.dir) / job.run.name / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        (Layout(dp_replicate=2), [3, 6, 7]),
        (Layout(dp_shard=2), [3, 6, 7]),
        (Layout(pp=2, accumulation=3, schedule="pipedream"), [5, 7]),  # a step's requests are known one step later
        (Layout(dp_replicate=2, sync="diloco", sync_every=4), [4, 7]),
        (Layout(dp_replicate=2, sync="asp"), [7]),  # rounds end where something is due, and its clock stands until then
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else "",
)
def test_all_ranks_save_after_the_same_step_when_rank_0_finds_that_it_is_time(ranks, job, layout, steps):
    job = dataclasses.replace(change(job, "train", steps=7), layout=layout)
    for found in ranks(timed, 2, change(job, "checkpoint", every_minutes=2.0)):
        assert found == (7, [f"step-{step:06d}" for step in steps])


def asked_in(ranks, job: Job, where: str) -> str:
    """Trains; the last rank alone is asked to stop inside its first validation, save, or wait for data after step 2."""
    stop = StopRequest()
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), stop)
    never = threading.Event()

    def then_ask(real):
        def asked(*args, **kwargs):
            if ranks.rank == ranks.world - 1 and trainer.state.step == 2:
                stop.signal = signal.SIGTERM
                if where == "wait for data":
                    never.wait(60)  # storage that hangs, in the thread that reads ahead
            return real(*args, **kwargs)

        return asked

    if where == "validation":
        trainer.stepper.replica.loss = then_ask(trainer.stepper.replica.loss)
    elif where == "save":
        trainer.saving.save = then_ask(trainer.saving.save)
    else:
        trainer.train_data.samples = then_ask(trainer.train_data.samples)
    try:
        with patch.object(feed, "_PATIENCE_S", 0.3), patch.object(loader, "_LAST_ITEM_S", 0.1):
            trainer.run()
    except StoppedError as stopped:
        return str(stopped)
    finally:
        never.set()
    return "ran to its end"


@pytest.mark.parametrize("where", ["validation", "save"])
@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(pp=2, accumulation=3)], ids=Layout.line)
def test_a_request_in_a_validation_or_a_save_is_not_kept_waiting_for_the_next_step(ranks, job, where, layout):
    job = dataclasses.replace(change(job, "train", eval_every=2, eval_samples=200), layout=layout)
    job = change(job, "checkpoint", every=2)
    messages = ranks(asked_in, 2, job, where)
    assert all(message.startswith("stopped by a signal at step 2 of 6, with a checkpoint") for message in messages)
    assert [row["step"] for row in rows(job, "validation")] == ([2] if where == "save" else [])


DATA_LAYOUTS = [
    (Layout(), "fp32"),
    (Layout(dp_replicate=2), "fp32"),
    (Layout(dp_replicate=2), "fp16"),
    (Layout(dp_shard=2, zero=3, accumulation=3), "fp32"),
    (Layout(tp=2, sp=True), "fp32"),
    (Layout(pp=2, accumulation=3), "fp32"),
]


@pytest.mark.parametrize(("layout", "precision"), DATA_LAYOUTS, ids=lambda v: v if isinstance(v, str) else v.line())
def test_a_request_while_data_do_not_come_drops_the_step_and_nothing_else(ranks, job, layout, precision):
    job = dataclasses.replace(change(job, "train", precision=precision), layout=layout)
    job = change(job, "data", prefetch=1)
    ranks(train, layout.processes, job)
    broken = change(job, "run", name="broken")
    messages = ranks(asked_in, layout.processes, broken, "wait for data")
    step = [int(message.split()[6]) for message in messages]  # those read before step 2 may be two steps
    assert set(step) <= {2, 3, 4}
    assert len(set(step)) == 1
    ranks(train, layout.processes, broken)
    require_same_bits(weights(broken), weights(job))


def test_signals_ask_once_and_a_second_one_means_now():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)  # nohup
            assert not stop.requested
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)  # `timeout` sends it to the process and to its group
            assert stop.signal == signal.SIGUSR1
            stop.time -= 1
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        for number in SIGNALS:
            os.kill(os.getpid(), number)  # a copy, passed on by the launcher, while the process ends
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_without_a_request_signals_act_as_before():
    """But SIGUSR1, which would end the process, does nothing."""
    own = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        before = {number: signal.getsignal(number) for number in SIGNALS}
        with StopRequest() as stop:
            stop.ask("since the test says so")
        after = {number: signal.getsignal(number) for number in SIGNALS}
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, own)
    assert {number for number in SIGNALS if after[number] != before[number]} == {signal.SIGUSR1}


def test_the_time_left_counts_from_the_signal(monkeypatch):
    stop = StopRequest()
    assert stop.seconds_left(30.0) == math.inf
    stop.signal, stop.time = signal.SIGTERM, time.monotonic() - 100
    assert stop.seconds_left(30.0) < -60
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 500))
    assert 400 < stop.seconds_left(30.0) <= 500


# What the heartbeats of whole runs say: ranks that do as they should are never accused.


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
    calls = [call for call in views(tmp_path)[0].record.calls if "test_requests" in call.source or call.root >= 0]
    operations = [call.operation for call in calls]
    assert {"send", "receive", "broadcast", "all_reduce_max"} <= set(operations)
    assert (operations.count("send"), operations.count("receive")) == (4, 2)
    assert any((call.operation, call.dtype, call.shape) == ("all_gather", "float32", (2,)) for call in calls)
    assert any(call.root == 1 for call in calls)
    assert any(call.operation == "all_reduce" for call in views(tmp_path)[0].record.calls)
