"""Steps of a job's model on the ranks of a test: loss, every gradient and every parameter, whole on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from phalanx.comm.axis import Axis
from phalanx.config.job import IGNORE, Job
from phalanx.config.layout import Layout
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.traffic import Traffic, step_traffic
from phalanx.data.loader import MicroBatch
from phalanx.parallel import expert
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import data_rank, place
from phalanx.parallel.parameter_shards import wholes
from phalanx.partition import derived as batch
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import schedule_of
from phalanx.partition.document_sample import DocumentSample
from phalanx.train.guard import Replicas, repeats_exactly
from phalanx.train.step import StepInputs, Stepper

CPU = torch.device("cpu")


def micro_batches(job: Job, step: int, data_rank: int, vocab: int) -> tuple[list[MicroBatch], int]:
    """This data rank's micro-batches of a step, and the valid tokens of the whole batch, which rows share unevenly."""
    equation = batch.solve(job.train.global_batch, job.layout)
    tokens = np.random.default_rng(step).integers(vocab, size=(equation.global_batch, job.model.seq_len + 1))
    targets = tokens[:, 1:].copy()
    targets[1, 3 - step % 3 :] = IGNORE
    size = equation.micro_batch
    first = data_rank * size * equation.accumulation
    starts = range(first, first + size * equation.accumulation, size)
    documents = None
    if job.data.document_mask:  # of uneven length, in odd steps so short that cp ranks have whole ones
        ends = tokens[:, :-1] < vocab // 3
        ends[:, :: max(1, job.model.seq_len // 8)] |= step % 2 == 1
        documents = ends.cumsum(1)
    batches = [
        MicroBatch(
            tokens[a : a + size, :-1],
            targets[a : a + size],
            np.arange(a, a + size),
            None if documents is None else documents[a : a + size],
        )
        for a in starts
    ]
    return batches, int((targets != IGNORE).sum())


Results = tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def steps(ranks, job: Job, vocab: int, count: int = 2, device: torch.device = CPU) -> Results:
    """Losses, norms, the gradients of the last step and the parameters after it. Tensors on rank 0 only."""
    return counted_steps(ranks, job, vocab, count, device)[0]


def counted_steps(
    ranks, job: Job, vocab: int, count: int = 2, device: torch.device = CPU
) -> tuple[Results, Traffic, tuple[float, float]]:
    """Also the bytes that this rank sent in a step, and the rows that it exchanged with other ranks' experts."""
    mesh = meshes.build(job.layout, device.type)
    stepper = Stepper(job, mesh, device, vocab)
    shards = stepper.replica.shards
    shown, gradients = [], {}
    real = stepper.optimizer.square_norm

    def square_norm(loss_scale: float = 1) -> torch.Tensor:
        if len(shown) < count - 1:
            return real(loss_scale)
        trained = [f for f in shards if not f.frozen]
        stepper.optimizer.residence.settle()  # gradients may be on their way
        found = {f.name: f.gradient for f in trained if f.gradient is not None}
        with mesh.ledger.untracked():
            # Copies: clipping works in place.
            gradients.update((name, t.clone()) for name, t in wholes(trained, found, mesh, ranks.rank == 0))
        square = real(loss_scale)
        if repeats_exactly(device) and stepper.independent_replicas == 1:
            # A second proof, without one process: a gradient that is still a part of a sum differs between ranks.
            differing = Replicas(stepper, exact=True).differing(gradients=True)
            assert not differing, [(each.name, each.suspects) for each in differing]
        return square

    stepper.optimizer.square_norm = square_norm
    mesh.ledger.clear()
    with counted_rows(job.layout) as rows:
        for step in range(count):
            batches, valid = micro_batches(job, step, mesh.data_rank, vocab)
            seen = stepper.step(StepInputs(batches, step, valid, 1e-2))
            shown.append((seen.loss, seen.grad_norm))
    traffic = mesh.ledger.traffic(count)
    parameters = dict(wholes(shards, {f.name: f.value for f in shards}, mesh, ranks.rank == 0))
    return (shown, gradients, parameters), traffic, of_step(job, rows, count)


def of_step(job: Job, rows: Sequence[tuple[int, int]], steps: int) -> tuple[float, float]:
    """Returns the rows of one step, of those that were counted in several."""
    again = 2 if job.layout.recompute == "full" else 1  # where blocks are recomputed, their experts count again
    sums = [sum(each) / steps / again for each in zip(*(rows or [(0, 0)]), strict=True)]
    return sums[0], sums[1]


@contextmanager
def counted_rows(layout: Layout) -> Iterator[list[tuple[int, int]]]:
    """Yields the numbers of rows, or of tokens that are sent once, that this rank sends to others and gets from them,
    on their way to experts inside groups of ep_node ranks and then between these, as it exchanges them."""
    near = layout.ep_node if layout.ep_nodes > 1 else layout.ep
    turns = cycle((False, True) if layout.redundant_experts else (True,))
    rows, table_of, paths_of = list[tuple[int, int]](), expert.gather_counts, expert.RowExchange.paths

    def counts_of_all(ep: Axis, *own: Any) -> torch.Tensor:
        counts = table_of(ep, *own)
        # With copies the rows of each expert are counted first, then the tokens for each rank.
        if layout.dispatch != "rows" and next(turns):
            note(ep, counts.tolist())
        return counts

    def paths(exchange: expert.RowExchange, parts: Sequence[Sequence[int]]) -> Any:
        note(exchange.ep, parts)
        return paths_of(exchange, parts)

    def note(ep: Axis, parts: Sequence[Sequence[int]]) -> None:
        ways = [(a, a // near * near + b % near, b) for a in range(ep.size) for b in range(ep.size)]
        hops = [(a, b, c, d) for a, middle, b in ways for c, d in ((a, middle), (middle, b))]
        out = sum(parts[a][b] for a, b, c, d in hops if c != d and ep.rank == c)
        rows.append((out, sum(parts[a][b] for a, b, c, d in hops if c != d and ep.rank == d)))

    with (
        mock.patch.object(expert, "gather_counts", counts_of_all),
        mock.patch.object(expert.RowExchange, "paths", paths),
    ):
        yield rows


def check_bytes(
    job: Job, vocab: int, found: list[tuple[Traffic, tuple[float, float]]], shares: Sequence[float] = (), count: int = 2
) -> None:
    """Compares the bytes that every rank sent in a step, given the rows that it exchanged, with those predicted. Which
    ranks send copies of experts depends on the loads: with these ranks' all-to-alls are compared together.

    Of asynchronous replicas `shares` are the parts of a step that each computed."""
    layout, equation = rank_spec(job, vocab, "cpu").layout, batch.solve(job.train.global_batch, job.layout)
    stages = None
    if layout.pp > 1:
        stages = stages_of(job.model, layout, schedule_of(layout, equation.accumulation).stages, vocab)
    known = layout.ep > 1 and not (job.model.moe.capacity and layout.dispatch == "rows")
    together = [0.0, 0.0]
    for rank, (sent, rows) in enumerate(found):
        expected = step_traffic(
            job.model,
            layout,
            equation,
            precision=job.train.precision,
            gradients=job.train.gradients,
            fp8_scaling=job.train.fp8_scaling,
            vocab=vocab,
            stages=stages,
            rank=rank,
            rows=rows if known else None,
            optimizer=job.optimizer,
            documents=documents_of(job, vocab, rank, count),
            share=shares[rank] if shares else 1.0,
        )
        # The ledger has entries for collectives of nothing, such as a share of few rows.
        real = {axis: {name: size for name, size in by.items() if size} for axis, by in sent.items()}
        if layout.redundant_experts:
            for number, traffic in enumerate((real, expected)):
                together[number] += traffic.get("ep", {}).pop("all_to_all", 0.0)
        exactly = {
            axis: {name: pytest.approx(size, 1e-13) for name, size in by.items()} for axis, by in expected.items()
        }
        assert {axis: by for axis, by in real.items() if by} == {axis: by for axis, by in exactly.items() if by}, (
            f"rank {rank}"
        )
    assert together[0] == pytest.approx(together[1], 1e-13)


def documents_of(job: Job, vocab: int, rank: int, count: int) -> DocumentSample | None:
    """The documents of a rank's micro-batches of some steps."""
    if not job.data.document_mask:
        return None
    here = data_rank(*place(job.layout, rank))
    micros = [micro for step in range(count) for micro in micro_batches(job, step, here, vocab)[0]]
    return DocumentSample.of(np.concatenate([micro.documents for micro in micros if micro.documents is not None]))


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], floor: float) -> float:
    """The largest difference of any tensor, relative to its largest element or to `floor`.

    A key bias has no influence, so its gradient is rounding noise, which Adam turns into a little of a step: `floor` is
    what such noise is compared with."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=floor))
        for name, tensor in expected.items()
    )
