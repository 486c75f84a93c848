"""Compressed sums over replicas: int8 and int4 codes, and PowerSGD."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.steps import CPU, counted_steps, micro_batches, steps, worst
from parallel.test_predicted_traffic import DEEP, DEEPSEEK, GPT, LLAMA, SWITCH, VOCAB, check, job_of
from parallel.test_quantised import some
from phalanx.comm.axis import Axis, Pending
from phalanx.config import layout_line
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, MoE, SparseAttention
from phalanx.model.seeding import derive_seed
from phalanx.parallel import mesh as meshes
from phalanx.parallel.compression import CompressedSum, Summand
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.tensor_slices import TensorSlice
from phalanx.train.step import Stepper

CHOSEN_KEYS = dataclasses.replace(
    DEEPSEEK,
    bias=False,
    moe=dataclasses.replace(DEEPSEEK.moe, capacity=0.0),
    sparse=SparseAttention(top_k=6, index_heads=4, index_head_dim=6),
)
CASES = [
    (GPT, "dp_replicate=3,accumulation=2,compression=int8"),
    (GPT, "dp_replicate=2,compression=powersgd,compression_rank=1"),
    (LLAMA, "dp_replicate=2,tp=2,compression=powersgd,compression_rank=2"),
    (LLAMA, "dp_replicate=2,dp_shard=2,zero=1,compression=int4"),
    (GPT, "dp_replicate=2,dp_shard=2,zero=2,accumulate=sharded,accumulation=2,compression=int8"),
    (GPT, "dp_replicate=2,dp_shard=2,accumulation=2,compression=int8"),
    (LLAMA, "dp_replicate=2,dp_shard=2,compression=powersgd,compression_rank=1"),
    (DEEP, "dp_replicate=2,pp=2,accumulation=4,compression=powersgd,compression_rank=1"),
    (SWITCH, "dp_replicate=2,dp_shard=2,ep=2,compression=int8"),
    (SWITCH, "dp_replicate=2,dp_shard=2,ep=2,compression=powersgd,compression_rank=1"),
    (CHOSEN_KEYS, "dp_replicate=2,tp=2,sp=true,ep=2,etp=1,compression=int8"),
]


@some(CASES, 1, 4, 6, 9, 10)
def test_every_byte(ranks, model, line):
    check(ranks, job_of(model, layout_line.parse(line)))


# One process that computes every replica's gradients and the same compression, and one that compresses nothing.

STEPS = 3


def job_64(layout: Layout, model=GPT, sequences: int = 12) -> Job:
    train = Train(global_batch=sequences, precision="fp64")
    return Job(model=model, layout=layout, train=train, optimizer=Optimizer(clip=0.5))


def rounded(numbers: torch.Tensor, largest: int) -> torch.Tensor:
    """Numbers (n,) as blocks of 256 codes bring them over."""
    found = []
    for block in numbers.split(256):
        scale = max((block.abs().max() / largest).float().double(), torch.tensor(torch.finfo(torch.float32).tiny))
        found.append((block / scale).round() * scale)
    return torch.cat(found)


class Oracle:
    """The sum of all replicas' gradients, {name: tensor} of each, in the form of a layout."""

    def __init__(self, layout: Layout, seed: int):
        self.layout, self.seed, self.done = layout, seed, 0
        self.q, self.error = {}, {}

    def __call__(self, every: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.done += 1
        exact = {name: sum(each[name] for each in every) for name in every[0]}
        if self.done <= self.layout.compression_start:
            return exact
        matrices = [name for name, value in exact.items() if value.ndim > 1]
        if self.layout.compression != "powersgd":
            largest = {"int8": 127, "int4": 7}[self.layout.compression]
            order, ranks = matrices[::-1], len(every)  # buckets hold the last layers first
            flats = [torch.cat([each[name].flatten() for name in order]) for each in every]
            length = -(-flats[0].numel() // ranks)
            shares = [[rounded(part, largest) for part in flat.split(length)] for flat in flats]
            whole = torch.cat([rounded(sum(parts), largest) for parts in zip(*shares, strict=True)])
            pieces = whole.split([exact[name].numel() for name in order])
            return exact | {n: piece.view_as(exact[n]) for n, piece in zip(order, pieces, strict=True)}
        for name in matrices:
            (rows, columns), rank = exact[name].shape, self.layout.compression_rank
            if (rows + columns) * rank >= rows * columns:
                continue
            if name not in self.q:
                generator = torch.Generator().manual_seed(derive_seed(self.seed, "powersgd", name))
                self.q[name] = torch.randn(columns, rank, generator=generator, dtype=torch.float64)
                self.error[name] = [torch.zeros(rows, columns, dtype=torch.float64) for _ in every]
            own = [each[name] + error for each, error in zip(every, self.error[name], strict=True)]
            # The basis of the space is another one than QR's: the projection does not depend on it.
            p = torch.linalg.svd(sum(own) @ self.q[name], full_matrices=False)[0]
            self.q[name] = sum(own).T @ p
            self.error[name] = [m - p @ (p.T @ m) for m in own]
            exact[name] = p @ self.q[name].T
        return exact


def replayed(ranks, job: Job) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses and parameters after each step of one process, and the norms of what PowerSGD held back."""
    alone = dataclasses.replace(job, layout=Layout())
    stepper = Stepper(alone, meshes.build(Layout(), "cpu"), CPU, VOCAB)
    oracle, losses, left = Oracle(job.layout, job.train.seed), [], []
    for step in range(STEPS):
        every, total = [], 0.0
        for replica in range(job.layout.dp_replicate):
            batches, valid = micro_batches(job, step, replica, VOCAB)
            total += stepper.gradients(batches, step, valid).item() / valid
            every.append({f.name: f.gradient.clone() for f in stepper.replica.shards})
            stepper.replica.clear()
        losses.append(total)
        summed = oracle(every)
        for shard in stepper.replica.shards:
            shard.gradient = summed[shard.name]
        stepper.optimizer.step(1e-2, stepper.optimizer.square_norm().sqrt())
        stepper.replica.clear()
        left.append(sum(float(e.norm()) for of in oracle.error.values() for e in of))
    return losses, {f.name: f.value.detach().clone() for f in stepper.replica.shards}, left


@pytest.mark.parametrize(
    "line",
    [
        "dp_replicate=3,compression=int8",
        "dp_replicate=2,compression=int4,compression_start=1",
        "dp_replicate=3,accumulation=2,compression=powersgd,compression_rank=2",
        "dp_replicate=2,compression=powersgd,compression_rank=1,compression_start=1",
    ],
)
def test_equals_one_process_with_the_same_compression(ranks, line):
    job = job_64(layout_line.parse(line))
    losses, parameters, _ = ranks(replayed, 1, job)[0]
    (shown, _, found), *others = ranks(steps, job.layout.world, job, VOCAB, STEPS)
    assert [loss for loss, _ in shown] == pytest.approx(losses, rel=1e-9)
    assert all(other[0] == shown for other in others)
    torch.testing.assert_close(found, parameters, rtol=1e-9, atol=1e-11)


WIDE = dataclasses.replace(GPT, n_layers=2, d_model=48, d_ff=192, seq_len=4, tied=False)


CHOSEN = dataclasses.replace(
    LLAMA,
    n_kv_heads=0,
    head_dim=0,
    seq_len=4,
    d_model=48,
    mla=MLA(q_rank=24, kv_rank=24, rope_head_dim=4, nope_head_dim=12, v_head_dim=12),
    sparse=SparseAttention(top_k=2, index_heads=8, index_head_dim=8),
    moe=MoE(n_experts=4, top_k=1, d_ff=36, renormalise=False),
)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (WIDE, "dp_replicate=2,compression=powersgd"),
        (WIDE, "dp_replicate=2,dp_shard=2,compression=powersgd"),
        (CHOSEN, "dp_replicate=2,tp=2,sp=true,ep=2,etp=1,compression=powersgd"),
    ],
    ids=["replicas", "shards", "chosen keys, whole experts"],
)
def test_the_rank_of_the_gradients_loses_nothing(ranks, model, line):
    """Gradients of few tokens have at most their number as rank: with it PowerSGD equals one process. (A later step's
    may have directions that the first one's factor lacks, which then wait for one step.)"""
    layout = layout_line.parse(line)
    job = job_64(layout, model, 4)
    tokens = 4 * model.seq_len
    job = dataclasses.replace(job, layout=dataclasses.replace(layout, compression_rank=tokens))
    expected = ranks(steps, 1, job_64(Layout(), model, 4), VOCAB, 1)[0]
    (shown, gradients, parameters), sent, _ = ranks(counted_steps, layout.world, job, VOCAB, 1)[0]
    numbers = sum(value.numel() for value in parameters.values()) / layout.dp_shard
    assert sent["dp_replicate"]["all_reduce"] < 0.8 * 8 * numbers  # of two ranks each sends what it has once
    assert shown[0] == pytest.approx(expected[0][0], rel=1e-9)
    assert worst(gradients, expected[1], 1e-4) < 1e-9
    assert worst(parameters, expected[2], 1e-3) < 1e-9


# Bounds of the errors, over a stub of the replicas that sums in this process.


class Together:
    """All replicas' ends of an axis in one process and thread: what a replica sends lies ready for the others, which
    send theirs before any of them waits."""

    def __init__(self, size: int):
        self.sent = [list[torch.Tensor]() for _ in range(size)]

    def end(self, rank: int) -> Axis:
        axis, sent = Axis("dp_replicate", 1), self.sent
        axis.size, axis.rank = len(sent), rank

        def call(x: torch.Tensor, receive: Callable[[list[torch.Tensor]], None]) -> Pending:
            number = len(sent[rank])
            sent[rank].append(x.clone())
            return Exchange(lambda: receive([each[number] for each in sent]))

        axis.all_reduce = lambda x: call(x, lambda every: x.copy_(sum(every[1:], every[0].clone())))
        axis.all_gather = lambda whole, part: call(part, lambda every: whole.copy_(torch.cat(every)))
        axis.all_to_all = lambda received, x: call(
            x, lambda every: received.copy_(torch.stack([each[rank] for each in every]).view_as(received))
        )
        return axis


class Exchange(NamedTuple):
    wait: Callable[[], None]


def shard_of(value: torch.Tensor) -> ParameterShard:
    return ParameterShard("matrix", (TensorSlice(tuple(value.shape)),), 0, 0, value)


def summed(layout: Layout, every: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[CompressedSum]]:
    """The sum that each of some replicas gets in each step of its gradients, of which all must be the same bits."""
    together, shape = Together(len(every)), every[0][0]
    ends = [CompressedSum(together.end(r), layout, 3, [shard_of(shape)], shape.itemsize) for r in range(len(every))]

    results = [[gradient.clone() for gradient in of] for of in every]
    for step, values in enumerate(zip(*results, strict=True)):
        pending = []
        for end, value in zip(ends, values, strict=True):
            end.step = step
            pending.append(end.all_reduce([Summand(shard_of(value), value)]))
        while pending[0].pending is not None:
            for each in pending:
                each.advance()
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0, equal_nan=True)
    return results[0], ends


def gradients(seed: int, shape: tuple[int, int], replicas: int, steps: int, scale: float) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [scale * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(steps)]
        for _ in range(replicas)
    ]


SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), SHAPES, st.integers(2, 4), st.sampled_from(["int8", "int4"]), st.floats(-6, 6))
def test_codes_are_within_their_bound(seed, shape, replicas, form, scale):
    """Half a step of every replica's block, and half a step of the block of what they sum to."""
    every = gradients(seed, shape, replicas, 1, 10**scale)
    (found,), _ = summed(Layout(dp_replicate=replicas, compression=form), every)
    exact, length = sum(each[0] for each in every), -(-exact_size(shape) // replicas)
    bound, largest = torch.zeros(exact_size(shape), dtype=torch.float64), {"int8": 127, "int4": 7}[form]

    def half_steps(flat: torch.Tensor) -> torch.Tensor:
        blocks = [block for part in flat.split(length) for block in part.split(256)]
        return torch.cat([(block.abs().max() / largest / 2).expand(len(block)) for block in blocks])

    first = sum(half_steps(each[0].flatten()) for each in every)
    sums = exact.flatten().abs() + first  # as large as what is rounded the second time can be
    bound = first + half_steps(sums)
    assert ((found - exact).abs().flatten() <= bound * (1 + 1e-6)).all()


def exact_size(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), SHAPES, st.integers(2, 4), st.integers(1, 6), st.integers(1, 4))
def test_what_powersgd_holds_back_arrives_later(seed, shape, replicas, rank, steps):
    """What was applied and what is held back are all gradients so far; no rank holds back more than it had; and the
    sum of a step is the nearest in the space of its basis."""
    every = gradients(seed, shape, replicas, steps, 1.0)
    found, ends = summed(Layout(dp_replicate=replicas, compression="powersgd", compression_rank=rank), every)
    exact = sum(gradient for of in every for gradient in of)
    if not ends[0].factors:
        torch.testing.assert_close(sum(found), exact, rtol=1e-12, atol=1e-12)
        return
    errors = [end.factors["matrix"].error for end in ends]
    torch.testing.assert_close(sum(found) + sum(errors), exact, rtol=1e-9, atol=1e-9)
    for error, of in zip(errors, every, strict=True):
        assert error.norm() <= sum(gradient.norm() for gradient in of) * (1 + 1e-12)
    assert torch.linalg.matrix_rank(found[-1]) <= rank
    assert sum(found[:1]).norm() <= sum(of[0] for of in every).norm() * (1 + 1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.integers(4, 40), st.integers(2, 3))
def test_powersgd_is_exact_for_matrices_of_its_rank(seed, size, replicas):
    """Also of a basis whose columns depend on each other, and of zeros."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    every = [[(replica + 1) * left @ right.T, 0 * left @ right.T] for replica in range(replicas)]
    found, _ = summed(Layout(dp_replicate=replicas, compression="powersgd", compression_rank=1), every)
    for step in range(2):
        torch.testing.assert_close(found[step], sum(of[step] for of in every), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["int8", "powersgd"])
def test_what_is_not_finite_is_seen_and_leaves_nothing_behind(form):
    layout = Layout(dp_replicate=2, compression=form, compression_rank=2)
    good, bad = gradients(1, (20, 30), 2, 2, 1.0), gradients(1, (20, 30), 2, 2, 1.0)
    for of in bad:
        of.insert(1, of[0].clone())
    bad[1][1][3, 4] = float("nan")
    found, _ = summed(layout, bad)
    assert not found[1].isfinite().all()
    wanted, _ = summed(layout, good)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[2], wanted[1])
