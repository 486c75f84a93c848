"""Asynchronous SGD, local SGD and DiLoCo: equal to serial replays, and whole runs."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from checkpoint.contents import require_same_bits
from checkpoint.trained import small_job
from covering import also_whole
from parallel.steps import micro_batches
from phalanx.check.job import problems_of
from phalanx.checkpoint.inventory import newest_valid
from phalanx.config.job import Data, Job, Optimizer, RunOptions, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.data.loader import MicroBatch
from phalanx.errors import NotFiniteError, RunError, StoppedError
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.parallel.parameter_shards import wholes
from phalanx.train import drivers, loop
from phalanx.train.drivers import Asynchronous, Update
from phalanx.train.requests import NO_REQUESTS, Requests, StopRequest
from phalanx.train.step import StepInputs, Stepper
from train.runs import change, optimizer_of, rows, weights


class Ramped(NamedTuple):
    """The pieces from which a run with ramps is made."""

    job: Job
    vocab: int
    chunks: list[list[MicroBatch]]
    """Each replica's part of each step, in their order."""


# Asynchronous SGD: whatever order the gradients came in, a serial replay of that order gives the same parameters.


SHAPE = ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=8, vocab_size=13)
VOCAB = 13
STEPS = 5
SHARE = 4
TOKENS = SHARE * SHAPE.seq_len
CPU = torch.device("cpu")


def job_of(layout: Layout, timeout_s: float = 60.0) -> Job:
    train = Train(steps=STEPS, global_batch=SHARE * layout.dp_replicate, precision="fp64")
    optimizer = Optimizer(clip=0.5)
    return Job(model=SHAPE, layout=layout, optimizer=optimizer, train=train, run=RunOptions(timeout_s=timeout_s))


def lr(step: int) -> float:
    return 1e-2 / (1 + step)


def read(job: Job, chunk: int, part: int):
    """The micro-batches of a chunk of some step, of one of the replica's data ranks."""
    step, replica = divmod(chunk, job.layout.dp_replicate)
    return micro_batches(job, step, replica * job.layout.dp_shard + part, VOCAB)[0]


class Slow:
    """A stepper's gradients with a sleep before them on one replica."""

    def __init__(self, stepper: Stepper, seconds: float):
        self.real, self.seconds = stepper.gradients, seconds
        stepper.gradients = self

    def __call__(self, *args):
        time.sleep(self.seconds)
        return self.real(*args)


def trained(ranks: Ranks, layout: Layout, slow: float = 0.0, stop_at: int = -1, poison_at: int = -1):
    """Two rounds, with a meeting after step 2: what was done, every update, and the parameters on rank 0 and here."""
    job = job_of(layout)
    mesh = meshes.build(layout, "cpu")
    stepper = Stepper(job, mesh, CPU, VOCAB)
    asynchronous = Asynchronous(stepper)
    if slow and mesh.coordinates["dp_replicate"] == layout.dp_replicate - 1:
        Slow(stepper, slow)
    updates: list[Update] = []
    seen = []

    def chunk_of(chunk: int):
        seen.append(chunk)
        if chunk == poison_at:
            real = stepper.replica.forward_backward
            stepper.replica.forward_backward = lambda micro, factor, *, last: real(micro, factor * math.nan, last=last)
        return read(job, chunk, mesh.coordinates["dp_shard"])

    done, requests = 0, NO_REQUESTS
    for until in (2, STEPS):
        if not requests.stop:
            done, requests = asynchronous.round(
                done,
                until,
                read=chunk_of,
                chunk_tokens=lambda chunk: TOKENS,
                lr=lr,
                requests=lambda: Requests(stop=bool(seen) and 0 <= stop_at <= seen[-1]),
                note=updates.append,
            )
    shards = stepper.replica.shards
    values = {f.name: f.value.detach().clone() for f in shards}
    found = dict(wholes(shards, values, mesh, True))
    sent = mesh.ledger.traffic()["dp_replicate"]["send"]
    return done, requests.stop, updates, found, sent


def replayed(layout: Layout, updates: list[Update], ramped: Ramped | None = None) -> dict[str, torch.Tensor]:
    """One process that applies the same gradients in the same order, each from the version it was computed from; those
    of a `ramped` run with its chunks and its rate."""
    job, vocab = job_of(Layout(dp_replicate=layout.dp_replicate)), VOCAB
    if ramped:
        job, vocab = ramped.job, ramped.vocab
    alone = dataclasses.replace(job, layout=Layout())
    server, worker = (Stepper(alone, meshes.build(Layout(), "cpu"), CPU, vocab) for _ in range(2))

    def values():
        return [f.value.detach().clone() for f in server.replica.shards]

    versions = [values()]
    for number, update in enumerate(updates):
        assert update.version == number + 1
        with torch.no_grad():
            for shard, value in zip(worker.replica.shards, versions[update.push.based_on], strict=True):
                shard.value.copy_(value)
        step = update.push.chunk // layout.dp_replicate
        batches = ramped.chunks[update.push.chunk] if ramped else read(job, update.push.chunk, 0)
        tokens = sum(micro.tokens.size for micro in batches)
        loss = worker.gradients(batches, step, tokens)
        assert update.push.loss == pytest.approx(loss.item() / tokens, rel=1e-9)
        for mine, theirs in zip(server.replica.shards, worker.replica.shards, strict=True):
            mine.gradient = theirs.gradient
        norm = server.optimizer.square_norm().sqrt()
        assert update.push.norm == pytest.approx(norm.item(), rel=1e-9)
        server.optimizer.step(job.optimizer.lr if ramped else lr(step), norm)
        worker.replica.clear()
        versions.append(values())
    return {f.name: f.value.detach() for f in server.replica.shards}


@pytest.mark.parametrize(
    "inside",
    [
        *({}, {"dp_replicate": 3}, {"zero": 3, "dp_shard": 2}, {"tp": 2}),
        *also_whole({"zero": 1, "dp_shard": 2}, {"dp_replicate": 4}),
    ],
    ids=str,
)
def test_a_serial_replay_of_the_order_of_arrival_gives_the_same_parameters(ranks, inside):
    layout = Layout(**{"dp_replicate": 2, "sync": "asp", **inside})
    results = ranks(trained, layout.world, layout)
    done, stopped, updates, found, _ = results[0]
    assert (done, stopped) == (STEPS, False)
    assert sorted(update.push.chunk for update in updates) == list(range(STEPS * layout.dp_replicate))
    torch.testing.assert_close(found, replayed(layout, updates), rtol=1e-9, atol=1e-12)
    for other in results[1:]:
        torch.testing.assert_close(other[3], found, rtol=0, atol=0)


def test_a_slow_replica_is_stale_and_keeps_nobody_waiting(ranks):
    layout = Layout(dp_replicate=2, sync="asp")
    results = ranks(trained, 2, layout, 0.3)
    updates = results[0][2]
    slow = [update for update in updates if update.push.chunk in (1, 5)]  # replica 1's first of each round
    assert max(update.staleness for update in slow) >= 2
    assert updates[0].staleness == 0
    torch.testing.assert_close(results[0][3], replayed(layout, updates), rtol=1e-9, atol=1e-12)
    parameters = 8 * sum(tensor.numel() for tensor in results[0][3].values())
    pushes = results[1][4] / parameters
    assert 2 <= pushes < 4, "a gradient of D bytes for each of the few chunks that the slow replica computed"


def test_a_request_to_stop_ends_all_after_a_whole_step(ranks):
    layout = Layout(dp_replicate=3, sync="asp")
    # From a chunk of step 2 on, the first after the meeting, whoever is first: three are on the way at a time.
    results = ranks(trained, 3, layout, 0.0, 7)
    assert {(done, stopped) for done, stopped, *_ in results} <= {(3, True), (4, True)}
    assert len({done for done, *_ in results}) == 1
    assert len(results[0][2]) == 3 * results[0][0]


def test_a_gradient_that_is_not_finite_ends_all_and_is_not_applied(ranks):
    with pytest.raises(NotFiniteError, match=r"replica \d, step 3: loss .*, gradient norm nan, first in embed.weight"):
        ranks(trained, 2, Layout(dp_replicate=2, sync="asp"), 0.0, -1, 5)


def lost(ranks: Ranks, gone: int) -> str:
    """One replica, or the one that serves, leaves without a word. What the other sees."""
    job = job_of(Layout(dp_replicate=2, sync="asp"), timeout_s=2.0)
    mesh = meshes.build(job.layout, "cpu")
    asynchronous = Asynchronous(Stepper(job, mesh, CPU, VOCAB))
    if ranks.rank == gone:
        return ""
    try:
        asynchronous.round(0, STEPS, read=lambda chunk: read(job, chunk, 0), chunk_tokens=lambda chunk: TOKENS, lr=lr)
    except (RunError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize(("gone", "seen"), [(1, "RunError: the parameter server lost replica 1"), (0, "RuntimeError")])
def test_a_lost_replica_leaves_nobody_waiting_longer_than_the_timeout(ranks, gone, seen):
    began = time.perf_counter()
    assert ranks(lost, 2, gone)[1 - gone].startswith(seen)
    assert time.perf_counter() - began < 30


# Local SGD and DiLoCo: equal to replicas simulated one after the other in one process, whatever a replica is.

WIDE = dataclasses.replace(SHAPE, n_layers=1, d_model=32, d_ff=128)
"""Has a matrix of 4,096 elements in rows of 128: state=8bit quantises its moments."""
LOCAL_STEPS = 7
EVERY = 3


def local_job(layout: Layout, optimizer: str = "adamw") -> Job:
    train = Train(steps=LOCAL_STEPS, global_batch=8, precision="fp64")
    shape = SHAPE if optimizer == "adamw" else WIDE
    return Job(model=shape, layout=layout, optimizer=optimizer_of(optimizer, clip=0.5), train=train)


def trained_locally(ranks: Ranks, layout: Layout, optimizer: str = "adamw") -> tuple[dict[str, torch.Tensor], float]:
    """The parameters after STEPS steps, on rank 0, and the bytes that this rank sent to other replicas."""
    job = local_job(layout, optimizer)
    mesh = meshes.build(layout, "cpu")
    stepper = Stepper(job, mesh, CPU, VOCAB)
    mesh.ledger.clear()
    for step in range(LOCAL_STEPS):
        batches, valid = micro_batches(job, step, mesh.data_rank, VOCAB)
        stepper.step(StepInputs(batches, step, valid, 1e-2))
    sent = mesh.ledger.traffic()["dp_replicate"]["all_reduce"]
    shards = stepper.replica.shards
    values = {f.name: f.value for f in shards}
    return dict(wholes(shards, values, mesh, ranks.rank == 0)), sent


def simulated(layout: Layout, optimizer: str = "adamw", ramped: Ramped | None = None) -> dict[str, torch.Tensor]:
    """The same by plain steppers of one process, a replica after the other, and sums written out."""
    job, vocab, count = local_job(Layout(dp_replicate=layout.dp_replicate), optimizer), VOCAB, LOCAL_STEPS
    if ramped:
        job, vocab, count = ramped.job, ramped.vocab, ramped.job.train.steps
    alone = dataclasses.replace(job, layout=Layout())
    replicas = [Stepper(alone, meshes.build(Layout(), "cpu"), CPU, vocab) for _ in range(layout.dp_replicate)]
    anchor = {f.name: f.value.detach().clone() for f in replicas[0].replica.shards}
    momentum = {name: torch.zeros_like(value) for name, value in anchor.items()}
    for step in range(count):
        for number, stepper in enumerate(replicas):
            if ramped:
                batches = ramped.chunks[step * layout.dp_replicate + number]
                tokens = sum(micro.tokens.size for micro in batches)
            else:
                batches, valid = micro_batches(job, step, number, VOCAB)
                tokens = valid // layout.dp_replicate
            stepper.step(StepInputs(batches, step, tokens, job.optimizer.lr if ramped else 1e-2))
        if (step + 1) % EVERY and step + 1 < count:
            continue
        for shards in zip(*(stepper.replica.shards for stepper in replicas), strict=True):
            name = shards[0].name
            mean = torch.stack([f.value.detach() for f in shards]).mean(dim=0)
            if layout.sync == "diloco":
                gradient = anchor[name] - mean
                momentum[name] = 0.9 * momentum[name] + gradient
                mean = anchor[name] = anchor[name] - 0.7 * (gradient + 0.9 * momentum[name])
            with torch.no_grad():
                for shard in shards:
                    shard.value.copy_(mean)
    return {f.name: f.value.detach() for f in replicas[0].replica.shards}


@pytest.mark.parametrize(
    ("sync", "inside"),
    [
        ("local_sgd", {}),
        ("diloco", {}),
        *also_whole(
            ("diloco", {"zero": 1, "dp_shard": 2}),
            ("diloco", {"zero": 2, "dp_shard": 2}),
            ("local_sgd", {"zero": 3, "dp_shard": 2}),
        ),
    ],
)
def test_replicas_that_agree_now_and_then_are_those_of_one_process(ranks, sync, inside):
    layout = Layout(dp_replicate=2, sync=sync, sync_every=EVERY, **inside)
    (found, sent), *_ = ranks(trained_locally, layout.world, layout)
    expected = simulated(layout)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    if not inside:
        parameters = 8 * sum(tensor.numel() for tensor in expected.values())
        assert sent == 3 * parameters, "steps 3, 6 and 7: an all-reduce of D bytes, 2 D (P - 1) / P = D for two"


def test_four_replicas_average(ranks):
    layout = Layout(dp_replicate=4, sync="local_sgd", sync_every=EVERY)
    torch.testing.assert_close(ranks(trained_locally, 4, layout)[0][0], simulated(layout), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "sync", "inside"),
    [
        ("sgd", "diloco", {}),
        ("lion", "local_sgd", {"zero": 2, "dp_shard": 2}),
        ("muon", "diloco", {"tp": 2}),
        ("adamw state=8bit", "diloco", {"zero": 3, "dp_shard": 2}),
        *also_whole(
            ("sgd", "local_sgd", {}),
            ("lion", "diloco", {}),
            ("muon", "local_sgd", {"zero": 2, "dp_shard": 2}),
            ("adamw state=8bit", "local_sgd", {"tp": 2}),
        ),
    ],
)
def test_replicas_agree_with_every_optimizer(ranks, optimizer, sync, inside):
    """State stays local, whatever it is: also matrices' momentum, and codes of moments that parameters then leave. Here
    meet the kinds of replicas and ways to agree that do not above."""
    layout = Layout(dp_replicate=2, sync=sync, sync_every=EVERY, **inside)
    (found, _), *_ = ranks(trained_locally, layout.world, layout, optimizer)
    torch.testing.assert_close(found, simulated(layout, optimizer), rtol=1e-9, atol=1e-12)


# Whole runs with replicas apart: exact resuming, clean ends, and what is reported.


@pytest.fixture
def job(tmp_path):
    """Eight samples a step of a sentence said again and again."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    return dataclasses.replace(
        small_job(tmp_path),
        model=ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=16),
        data=Data(corpus="text", path=str(tmp_path / "text.txt"), dir=str(tmp_path / "data")),
        train=Train(steps=8, global_batch=8, precision="fp32", eval_samples=10),
    )


def train(ranks, job: Job, stop_at: int = -1, poison: bool = False):
    """Train; `stop_at` acts as if a signal came to the last rank before that call for gradients, or to both of two that
    train asynchronously: either may take most of the steps."""
    stop = StopRequest()
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), stop)
    stepper, calls = trainer.stepper, iter(range(1000))
    real = stepper.gradients

    def gradients(*args):
        if next(calls) == stop_at and (ranks.rank == ranks.world - 1 or job.layout.sync == "asp"):
            stop.signal = signal.SIGTERM
        loss = real(*args)
        if poison and ranks.rank == 1 and trainer.state.step >= 4:
            stepper.replica.shards[0].gradient.mul_(math.nan)
            return loss * math.nan
        return loss

    stepper.gradients = gradients
    return trainer.run()


@pytest.mark.parametrize(
    ("sync", "precision", "optimizer"),
    [
        ("local_sgd", "fp32", "adamw"),
        ("diloco", "bf16", "adamw state=8bit"),
        *also_whole(("diloco", "bf16", "adamw")),
    ],
)
def test_stopping_and_resuming_gives_the_same_bits_as_an_unbroken_run(ranks, job, sync, precision, optimizer):
    job = change(
        dataclasses.replace(job, layout=Layout(dp_replicate=2, sync=sync, sync_every=3)), "train", precision=precision
    )
    job = change(change(job, "optimizer", state="8bit" if "8bit" in optimizer else "fp32"), "model", d_ff=256)
    summary = ranks(train, 2, job)[0]
    assert summary["step"] == 8
    broken = change(job, "run", name="broken")
    with pytest.raises(StoppedError, match="stopped by a signal at step 6 of 8"):
        ranks(train, 2, broken, 3)  # asked in step 4: the replicas next meet after step 6
    ranks(train, 2, broken)
    straight = weights(job)
    assert "replica1/exp_avg/embed.weight" in straight
    assert ("outer_momentum/embed.weight" in straight) == (sync == "diloco")
    assert ("replica1/exp_avg_scale/blocks.0.mlp.down.weight" in straight) == ("8bit" in optimizer)
    require_same_bits(weights(broken), straight)


@pytest.mark.parametrize("sync", ["local_sgd", "diloco", "asp"])
def test_a_loss_that_is_not_finite_ends_all_at_the_next_meeting(ranks, job, sync):
    job = change(
        dataclasses.replace(job, layout=Layout(dp_replicate=2, sync=sync, sync_every=4)), "checkpoint", every=4
    )
    with pytest.raises(
        NotFiniteError, match=r"^replica 1, step \d: loss nan, gradient norm nan.*The optimizer did not apply it"
    ):
        ranks(train, 2, job, -1, True)
    assert all(tensor.isfinite().all() for tensor in weights(job).values())


def test_asynchronous_training_learns_and_measures_its_staleness(ranks, job):
    job = change(dataclasses.replace(job, layout=Layout(dp_replicate=2, sync="asp")), "train", steps=40, eval_every=15)
    first, second = ranks(train, 2, job)
    assert first["loss"] < 1.0
    assert first["val_loss"] == second["val_loss"] < 1.0
    assert [row["step"] for row in rows(job, "step")] == list(range(1, 41))
    assert [row["step"] for row in rows(job, "validation")] == [15, 30, 40]
    found = first["staleness"]
    assert found["updates"] == 80 == sum(found["histogram"].values())
    assert found["max"] >= found["mean"] > 0
    assert rows(job, "staleness")[0]["mean"] == found["mean"]


def test_asynchronous_training_stops_and_goes_on(ranks, job):
    job = change(dataclasses.replace(job, layout=Layout(dp_replicate=2, sync="asp")), "train", steps=24)
    with pytest.raises(StoppedError, match=r"stopped by a signal at step \d+ of 24"):
        ranks(train, 2, job, 2)
    held = weights(job)
    assert "exp_avg/embed.weight" in held
    assert not any(name.startswith("replica1") for name in held), "the moments are the server's"
    assert ranks(train, 2, job)[0]["step"] == 24
    assert [row["step"] for row in rows(job, "step")] == list(range(1, 25))


def test_a_run_may_change_how_its_replicas_agree(ranks, job):
    for steps, sync in ((2, "local_sgd"), (4, "diloco"), (6, "asp"), (8, "bsp")):
        layout = Layout(dp_replicate=2, sync=sync, sync_every=2)
        assert (
            ranks(train, 2, change(dataclasses.replace(job, layout=layout), "train", steps=steps))[0]["step"] == steps
        )


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("layout", {"dp_replicate": 1}, "nearest legal: dp_replicate=2, or sync=bsp"),
        ("layout", {"data_parallel": "threads"}, "data_parallel=ddp, or sync=bsp"),
        ("train", {"precision": "fp16"}, "precision=bf16, or sync=bsp"),
        ("train", {"eval_every": 25}, "25 is not a multiple of it, nearest: 20 or 30"),
        ("checkpoint", {"every": 4}, "4 is not a multiple of it, nearest: 10"),
        ("optimizer", {"outer_momentum": 1.0}, "must lie in [0, 1), is 1.0"),
        ("layout", {"sync_every": 0}, "must be at least 1, is 0"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_nearest_legal_choice(job, section, values, said):
    job = dataclasses.replace(job, layout=Layout(dp_replicate=2, sync="diloco"))
    assert not problems_of(job)
    assert any(said in message for _, message in problems_of(change(job, section, **values)))


def test_the_layout_says_how_replicas_agree():
    assert Layout(dp_replicate=2, sync="diloco", sync_every=5).line() == "dp_replicate=2,sync=diloco,sync_every=5"


# Ramps: every replica gets its equal part of a step of any size.

SIZES = [4, 4, 8, 8, 12, 12]
PARTS = [4, 2, 2, 2, 1, 1]


def trained_over_ramps(ranks, job: Job) -> tuple[list[Update], Ramped]:
    """Trains. Returns the updates of the parameter server, and each chunk read sample by sample."""
    trainer, updates, count = loop.Trainer(job, ranks, CPU, StopRequest()), list[Update](), drivers.Arrivals.__call__

    def kept(own: drivers.Arrivals, update: Update) -> None:
        updates.append(update)
        count(own, update)

    with mock.patch.object(drivers.Arrivals, "__call__", kept):
        trainer.run()
    data, chunks, first, replicas = trainer.train_data, list[list[MicroBatch]](), 0, job.layout.dp_replicate
    for size, parts in zip(SIZES, PARTS, strict=True):
        for _ in range(replicas):
            numbers = np.arange(first, first + size // replicas)
            chunks.append([data.micro_batch(data.order(first, numbers.size, job.train.seed), numbers).cut(parts)])
            first += numbers.size
    return updates, Ramped(job, trainer.state.vocab_size, chunks)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=2, sync="local_sgd", sync_every=EVERY),
        Layout(dp_replicate=2, dp_shard=2, zero=1, sync="diloco", sync_every=EVERY),
        Layout(dp_replicate=2, sync="asp"),
        Layout(dp_replicate=2, dp_shard=2, zero=3, sync="asp"),
    ],
    ids=Layout.line,
)
def test_replicas_apart_over_ramps_are_those_of_one_process(ranks, job, layout):
    job = change(dataclasses.replace(job, layout=layout), "optimizer", warmup_steps=0, schedule="constant")
    job = change(job, "model", bias=False)  # a key's has no gradient but rounding, which Adam would scale up
    ramps = {"batch_ramp": "2*4+2*8", "seq_ramp": "1*4+3*8"}
    job = change(job, "train", steps=6, global_batch=12, precision="fp64", **ramps)
    assert problems_of(job) == []
    updates, ramped = ranks(trained_over_ramps, layout.world, job)[0]
    expected = replayed(layout, updates, ramped) if layout.sync == "asp" else simulated(layout, ramped=ramped)
    found = weights(job)
    assert len(updates) == (len(ramped.chunks) if layout.sync == "asp" else 0)
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=1e-9, atol=1e-12)


def test_a_run_with_a_parameter_server_stops_in_a_ramp_and_reads_each_sample_once(ranks, job):
    job = change(dataclasses.replace(job, layout=Layout(dp_replicate=2, sync="asp")), "train", batch_ramp="4*4+8*6")
    job = change(job, "train", steps=20)
    with pytest.raises(StoppedError, match=r"stopped by a signal at step \d+ of 20"):
        ranks(train, 2, job, 2)
    ranks(train, 2, job)
    state = newest_valid(Path(job.run.dir) / job.run.name / "checkpoints")
    assert state is not None
    assert state.meta["samples"] == 4 * 4 + 8 * 6 + 8 * 8
