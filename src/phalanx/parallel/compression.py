"""Compressed sums of gradients over replicas: codes of 8 or 4 bits (ZeRO++'s), and PowerSGD.

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

The codes are block-wise and symmetric (qwZ and qgZ: Wang et al. 2023, sections 3.1 and 3.3). A block's scale is its
largest magnitude over the largest code (partition/derived.py); an element becomes the nearest code, half to even. So an
element's error is at most half its block's scale, 1/254 of the block's largest magnitude in 8 bits and 1/14 in 4, and
nothing depends on chance. A block with an infinite or NaN element has such a scale, and all of its elements come out as
NaN or infinite: none is lost.

A reduce-scatter cannot add codes, so ranks exchange them by all-to-all and add numbers: inside a node each rank gets
the shares of the ranks at its own place in every node, and adds what its neighbours have; only these sums cross to
other nodes, again as codes. So gradients are rounded twice: with s the scale of an element's block, its sum is off by
at most s/2 of every rank's gradient and s/2 of every node's sum, all added up.

Matrices that are multiplied in fp8 are sent in e4m3 as their product rounds them (scaled.py), with a scale per row.
FSDP2 shards rows, so that no row's largest element has to be agreed, and all scales are powers of two, so that what has
been rounded is rounded to itself: the product is that of numbers that were never sent, but for elements smaller than
2^-14 of their row where another scale, of a column or a block, is finer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.comm.axis import Axis, Pending
from phalanx.config.layout import Layout
from phalanx.model.seeding import derive_seed
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.parallel.scaled import rounded
from phalanx.partition.derived import BLOCK, LARGEST, SCALE_BYTES, Format, codes_of, has_factors, wire_bytes
from phalanx.partition.tensor_slices import TensorSlice

TINY = torch.finfo(torch.float32).tiny
"""Least scale: a block of zeros has one, too."""


class CodedShare(NamedTuple):
    """One rank's share of a parameter, or of its gradient."""

    elements: int
    format: Format
    columns: int = 0
    """In fp8: elements that share a scale, a row of the matrix."""

    def wire_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes in which it is sent, of numbers of a type."""
        return wire_bytes(self.elements, self.format, dtype.itemsize, self.columns)


class Codec:
    """Translates rows of numbers, the shares of a group's parameters end to end, into rows of bytes, and back."""

    def __init__(self, parts: Sequence[CodedShare]):
        self.parts = [part for part in parts if part.elements]
        self.elements = sum(part.elements for part in self.parts)

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of a row of numbers of a type."""
        return sum(part.wire_bytes(dtype) for part in self.parts)

    def encode(self, rows: Tensor) -> Tensor:
        """Returns bytes (rows, row_bytes) for numbers (rows, elements)."""
        wires = []
        for part, numbers in zip(self.parts, rows.split([part.elements for part in self.parts], dim=1), strict=True):
            if part.format == "none":
                wires.append(numbers.contiguous().view(torch.uint8))
                continue
            if part.format == "fp8":
                narrow, scales = rounded(numbers.unflatten(1, (-1, part.columns)), torch.float8_e4m3fn, "rowwise")
                wires += [each.flatten(1).view(torch.uint8) for each in (narrow, scales)]
                continue
            codes, scales = quantise(numbers, part.format)
            wires += [_packed(codes, part.format), scales.view(torch.uint8)]
        return torch.cat(wires, dim=1)

    def decode(self, wire: Tensor, rows: Tensor) -> None:
        """Writes the numbers (rows, elements) of bytes (rows, row_bytes)."""
        sizes = [part.wire_bytes(rows.dtype) for part in self.parts]
        targets = rows.split([part.elements for part in self.parts], dim=1)
        for part, numbers, sent in zip(self.parts, targets, wire.split(sizes, dim=1), strict=True):
            if part.format == "none":
                numbers.copy_(_aligned(sent).view(rows.dtype))
                continue
            scale_bytes = -(-part.elements // (part.columns or BLOCK)) * SCALE_BYTES
            packed, scales = sent.split([sent.shape[1] - scale_bytes, scale_bytes], dim=1)
            if part.format == "fp8":
                narrow = packed.view(torch.float8_e4m3fn).unflatten(1, (-1, part.columns)).to(rows.dtype)
                scale = _aligned(scales).view(torch.float32).unsqueeze(2).to(rows.dtype)
                torch.mul(narrow, scale, out=numbers.unflatten(1, (-1, part.columns)))
                continue
            codes = _unpacked(packed, part.elements, part.format)
            numbers.copy_(dequantise(codes, _aligned(scales).view(torch.float32), rows.dtype))


def quantise(numbers: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Returns codes (rows, n), int8, and scales (rows, blocks), fp32, of numbers (rows, n)."""
    blocks = _blocks(numbers if numbers.dtype == torch.float64 else numbers.float())
    largest = LARGEST[format]
    scales = blocks.abs().amax(dim=2).div_(largest).float().clamp_(min=TINY)
    # NaN over NaN has no code; the scale says what it was.
    codes = (blocks / scales.unsqueeze(2)).round_().nan_to_num_(0.0).clamp_(-largest, largest).to(torch.int8)
    return codes.flatten(1)[:, : numbers.shape[1]], scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers (rows, n) of codes of that shape and scales (rows, blocks)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (_blocks(codes).to(wide) * scales.unsqueeze(2)).flatten(1)[:, : codes.shape[1]]


def _blocks(rows: Tensor) -> Tensor:
    """Returns rows (rows, n) as (rows, blocks, BLOCK), the last block filled up with zeros."""
    if rest := -rows.shape[1] % BLOCK:
        rows = F.pad(rows, (0, rest))
    return rows.unflatten(1, (-1, BLOCK))


def _aligned(wire: Tensor) -> Tensor:
    """Returns a copy of bytes (rows, n) at an address from which numbers can be read."""
    return wire.clone(memory_format=torch.contiguous_format)


def _packed(codes: Tensor, format: Format) -> Tensor:
    """Returns the bytes of codes (rows, n): two codes per byte in 4 bits."""
    if format == "int8":
        return codes.contiguous().view(torch.uint8)
    pairs = (F.pad(codes, (0, codes.shape[1] % 2)) + 8).view(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def _unpacked(wire: Tensor, elements: int, format: Format) -> Tensor:
    """Returns the codes (rows, elements) of these bytes."""
    if format == "int8":
        return wire.view(torch.int8)
    codes = torch.stack([wire & 15, wire >> 4], dim=2).flatten(1)[:, :elements]
    return codes.view(torch.int8) - 8


class CodedSum:
    """The ranks that sum gradients: `near` inside a node, then `across` nodes; both have one rank if all of `shard`
    exchange at once."""

    def __init__(self, shard: Axis, near: Axis, across: Axis):
        self.near = near
        self.across = across if across.size > 1 else shard

    def reduce_scatter(self, part: Tensor, whole: Tensor, codec: Codec) -> Pending:
        """Sets `part` (n,) to this rank's part of the sum of all ranks' `whole` (ranks × n,), as Axis.reduce_scatter
        does. Numbers are added in fp32 or wider, in rank order."""
        nodes, near = self.across.size, self.near.size
        codes = codec.encode(whole.view(nodes * near, -1))
        return _Hops(self, part, codes.view(nodes, near, -1).transpose(0, 1).flatten(0, 1), codec)

    def exchange(self, axis: Axis, sent: Tensor) -> tuple[Pending, Tensor]:
        """Starts an all-to-all of rows of bytes. Returns it with what arrives."""
        received = torch.empty_like(sent)
        return axis.all_to_all(received, sent), received


class _Hops:
    """A sum of codes in flight: the second exchange begins once the first is awaited."""

    def __init__(self, ranks: CodedSum, part: Tensor, sent: Tensor, codec: Codec):
        self.ranks, self.part, self.codec = ranks, part, codec
        self.sent = sent
        first = ranks.near if ranks.near.size > 1 else ranks.across
        self.pending, self.received = ranks.exchange(first, sent)

    def wait(self) -> None:
        """Returns once the sum is there."""
        self.pending.wait()
        ranks = self.ranks
        if ranks.near.size > 1:
            sums = self._added(ranks.near.size)
            self.pending, self.received = ranks.exchange(ranks.across, self.codec.encode(sums))
            self.pending.wait()
        self.part.copy_(self._added(ranks.across.size).view(-1))

    def _added(self, ranks: int) -> Tensor:
        """Returns the sums (rows / ranks, n) of what `ranks` ranks have sent."""
        numbers = self.part.new_empty(len(self.received), self.codec.elements)
        self.codec.decode(self.received, numbers)
        wide = torch.float64 if numbers.dtype == torch.float64 else torch.float32
        return numbers.view(ranks, -1, numbers.shape[1]).sum(0, dtype=wide).to(numbers.dtype)


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
