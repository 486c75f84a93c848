"""Asynchronous SGD: whatever order the gradients came in, a serial replay of that order gives the same parameters."""

import dataclasses
import math
import time

import pytest
import torch

from parallel.steps import micro_batches
from phalanx.config.job import Job, Optimizer, RunOptions, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import NotFiniteError, RunError
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.parallel.parameter_shards import wholes
from phalanx.train.asp import Asynchronous, Update
from phalanx.train.requests import NO_REQUESTS, Requests
from phalanx.train.step import Stepper

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


def replayed(layout: Layout, updates: list[Update]) -> dict[str, torch.Tensor]:
    """One process that applies the same gradients in the same order, each from the version it was computed from."""
    job = job_of(Layout(dp_replicate=layout.dp_replicate))
    alone = dataclasses.replace(job, layout=Layout())
    server, worker = (Stepper(alone, meshes.build(Layout(), "cpu"), CPU, VOCAB) for _ in range(2))

    def values():
        return [f.value.detach().clone() for f in server.replica.shards]

    versions = [values()]
    for number, update in enumerate(updates):
        assert update.version == number + 1
        with torch.no_grad():
            for shard, value in zip(worker.replica.shards, versions[update.push.based_on], strict=True):
                shard.value.copy_(value)
        step = update.push.chunk // layout.dp_replicate
        loss = worker.gradients(read(job, update.push.chunk, 0), step, TOKENS)
        assert update.push.loss == pytest.approx(loss.item() / TOKENS, rel=1e-9)
        for mine, theirs in zip(server.replica.shards, worker.replica.shards, strict=True):
            mine.gradient = theirs.gradient
        norm = server.optimizer.square_norm().sqrt()
        assert update.push.norm == pytest.approx(norm.item(), rel=1e-9)
        server.optimizer.step(lr(step), norm)
        worker.replica.clear()
        versions.append(values())
    return {f.name: f.value.detach() for f in server.replica.shards}


@pytest.mark.parametrize(
    "inside",
    [{}, {"dp_replicate": 3}, {"zero": 1, "dp_shard": 2}, {"zero": 3, "dp_shard": 2}, {"tp": 2}, {"dp_replicate": 4}],
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
