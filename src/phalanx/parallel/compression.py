"""Compressed sums of gradients over replicas: codes of 8 or 4 bits (ZeRO++'s, codec.py), and PowerSGD.

Codes: a rank sums its share of the matrices' elements from the codes that all ranks send it (an all-to-all in place of
the reduce-scatter), and sends the sum as codes again (all-gather), so that all ranks decode the same bytes. Each
element is rounded once per rank and once as a sum: with s the scale of its block, it is off by at most s/2 of every
rank's gradient and s/2 of their sum.

PowerSGD (Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2): the sum M of all ranks' matrices M_i is approximated
by one power iteration, P = M Q, orthonormalised, then Q = M^T P, which the next step starts with. The ranks sum the
P_i = M_i Q and Q_i = M_i^T P, (rows + columns) x rank numbers instead of rows x columns. M_i is the gradient plus what
the projection left of earlier ones, M_i - P P^T M_i (error feedback), whose norm is at most that of M_i. A sum that is
not finite changes no state, so that a step that is given up leaves none behind. Factors are summed in fp32 or wider.

Vectors, and matrices whose factors are no smaller than themselves, are summed as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.comm.axis import Axis, Pending
from phalanx.config.layout import Layout
from phalanx.model.seeding import derive_seed
from phalanx.parallel.codec import Codec, CodedShare, CodedSum
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.derived import codes_of, has_factors
from phalanx.partition.tensor_slices import TensorSlice

ALONE = Axis("alone")
STATE = "powersgd"
"""The kind of the tensors that checkpoints hold of this state, one per rank."""


class Summand(NamedTuple):
    """This rank's elements of one gradient."""

    shard: ParameterShard
    value: Tensor
    """A contiguous view of the memory that gets the sum."""


@dataclass
class Factors:
    """The state of one matrix on a rank between steps: views of one tensor."""

    q: Tensor
    """(columns, rank), the same on all replicas."""
    error: Tensor
    """(rows, columns), this rank's."""


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a new tensor (n,) with the elements of all `tensors`, in their order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of `flat` (n,) with the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


@torch.no_grad()
def spread(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Copies the elements of `join`'s result back into tensors of those shapes."""
    for tensor, part in zip(into, parts(flat, into), strict=True):
        tensor.copy_(part)


class CompressedSum:
    """Sums gradients over the replicas as a layout compresses them."""

    step = 0
    """Steps done: the first `layout.compression_start` are summed as they are."""

    def __init__(self, replicas: Axis, layout: Layout, seed: int, shards: Sequence[ParameterShard], width: int):
        """Begins without an error. `shards` are this rank's, gradients have `width` bytes per element."""
        self.replicas, self.layout, self.seed = replicas, layout, seed
        self.factors: dict[str, Factors] = {}
        """By shard."""
        device = shards[0].value.device
        self.state = torch.empty(0, dtype=torch.float64 if width == 8 else torch.float32, device=device)
        if layout.compression != "powersgd":
            return
        rank = layout.compression_rank
        shapes = {each.name: matrix for each in shards if not each.frozen and (matrix := matrix_of(each))}
        shapes = {name: shape for name, shape in shapes.items() if has_factors(*shape, rank, width)}
        sizes = [size for rows, columns in shapes.values() for size in (columns * rank, rows * columns)]
        self.state = torch.zeros(sum(sizes), dtype=self.state.dtype, device=device)
        views = iter(self.state.split(sizes))
        for name, (rows, columns) in shapes.items():
            self.factors[name] = Factors(next(views).view(columns, rank), next(views).view(rows, columns))
        self.restart()

    def restart(self) -> None:
        """Forgets what earlier steps have left."""
        self.state.zero_()
        for name, each in self.factors.items():
            generator = torch.Generator().manual_seed(derive_seed(self.seed, STATE, name))
            each.q.copy_(torch.randn(each.q.shape, generator=generator, dtype=torch.float64))

    def held(self, rank: int) -> ParameterShard:
        """Returns the place of `state`, that of world rank `rank`, in checkpoints."""
        return ParameterShard(f"rank{rank}", (TensorSlice((self.state.numel(),)),), 0, 0, self.state)

    @torch.no_grad()
    def all_reduce(self, summands: Sequence[Summand]) -> Pending:
        """Starts replacing the gradients of a bucket by their sums. Ranks wait for these in the order in which they
        started them."""
        return Phases(self._phases([each for each in summands if each.value.numel()]))

    def _phases(self, summands: Sequence[Summand]) -> Iterator[Pending]:
        lossy, begun = self.layout.compression == "powersgd", self.step >= self.layout.compression_start
        begun &= self.layout.compression != "none" and self.replicas.size > 1
        compressed = [s for s in summands if begun and (s.shard.name in self.factors if lossy else matrix_of(s.shard))]
        names = {each.shard.name for each in compressed}
        plain = [each.value for each in summands if each.shard.name not in names]
        flat = join(plain) if plain else None
        together = None if flat is None else self.replicas.all_reduce(flat)
        if compressed:
            yield from self._low_rank(compressed) if lossy else self._coded([each.value for each in compressed])
        if together is not None and flat is not None:
            yield together
            spread(flat, plain)

    def _coded(self, values: Sequence[Tensor]) -> Iterator[Pending]:
        ranks, elements = self.replicas.size, sum(value.numel() for value in values)
        each = -(-elements // ranks)
        codec = Codec([CodedShare(each, codes_of(self.layout))])
        part = values[0].new_empty(each)
        # Until the end of the backward pass only codes are kept.
        padded = [*values, part.new_zeros(each * ranks - elements)]
        yield CodedSum(self.replicas, ALONE, ALONE).reduce_scatter(part, join(padded), codec)
        mine = codec.encode(part.view(1, -1))
        wire = mine.new_empty(ranks, mine.shape[1])
        yield self.replicas.all_gather(wire.view(-1), mine.view(-1))
        whole = part.new_empty(ranks, each)
        codec.decode(wire, whole)
        spread(whole.view(-1)[:elements], values)

    def _low_rank(self, summands: Sequence[Summand]) -> Iterator[Pending]:
        factors = [self.factors[each.shard.name] for each in summands]
        wide = self.state.dtype

        def own(number: int) -> Tensor:
            """A matrix of this rank with the error of earlier steps, made anew each time: one is there at once."""
            error = factors[number].error
            return summands[number].value.view(error.shape).to(wide) + error

        every = range(len(summands))
        left = [own(number) @ factors[number].q for number in every]
        flat = join(left)
        yield self.replicas.all_reduce(flat)
        left = parts(flat, left)
        finite = [each.isfinite().all() for each in left]
        left = [torch.linalg.qr(each)[0] for each in left]  # an orthonormal basis
        right = []
        for number, p, error in zip(every, left, (each.error for each in factors), strict=True):
            matrix = own(number)
            right.append(matrix.T @ p)
            error.copy_(torch.where(finite[number], matrix.sub_(p @ right[-1].T), error))
        flat = join(right)
        yield self.replicas.all_reduce(flat)
        for summand, each, p, q, good in zip(summands, factors, left, parts(flat, right), finite, strict=True):
            summand.value.copy_((p @ q.T).view(summand.value.shape))
            each.q.copy_(torch.where(good, q, each.q))


def matrix_of(shard: ParameterShard) -> tuple[int, int] | None:
    """Returns rows and columns of a shard with whole rows of a matrix or of experts' matrices; of others a length; None
    for a vector."""
    whole = shard.tensor_slice.shape
    return (shard.value.numel() // whole[-1], whole[-1]) if len(whole) > 1 else None


class Phases:
    """Sums in flight, each of which begins once the one before it is awaited."""

    def __init__(self, phases: Iterator[Pending]):
        self.phases, self.pending = phases, next(phases, None)

    @torch.no_grad()
    def advance(self) -> None:
        """Waits for the sum in flight, and begins the next one."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = next(self.phases, None)

    def wait(self) -> None:
        """Returns once the last sum is there."""
        while self.pending is not None:
            self.advance()
