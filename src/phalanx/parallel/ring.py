"""Ring attention: every rank keeps its queries, and the keys and values circulate (Liu et al. 2023).

While a rank computes with one block of keys, the next one arrives. In the backward pass keys and values circulate
again, followed by their gradients: those of a block begin at the first rank after its owner, accumulate every rank's
contribution, and reach the owner, which has kept its own part, with the last hop. Only q, k, v, the output and its
log-sum-exp are saved in between, so that memory is that of this rank's tokens.

Places of the ring have zig-zag parts (partition/sequence.py), so that with a causal mask all compute the same at every
hop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.axis import Axis, Pending
from phalanx.config.layout import Layout
from phalanx.model.attention_blocks import Seen, attend, gradients
from phalanx.model.blocked_attention import Reach, gradient_of_sinks, join_sinks
from phalanx.model.noise import Noise, scale
from phalanx.model.window import visible
from phalanx.partition.sequence import ring_positions, window_blocks


@dataclass(frozen=True)
class Dropping:
    """Dropout of attention probabilities."""

    noise: Noise
    p: float
    site: str
    n_heads: int

    def keep(self, queries: Tensor, keys: int) -> Tensor:
        """Returns the mask of kept probabilities of some queries and the first keys: (batch, heads, queries, keys)."""
        whole = self.noise.seq_len or keys
        places = queries, torch.arange(keys, device=queries.device)
        return self.noise.keep_heads(self.p, self.site, self.n_heads, (whole, whole), queries.device, places)


@dataclass(frozen=True)
class RingBlock:
    """Queries of this rank and keys of one place of the ring that are computed in one call."""

    queries: slice
    keys: slice
    causal: bool = False
    masked: bool = False
    """Documents or windows end within the block."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Axis,
    layout: Layout,
    reach: Reach,
    dropping: Dropping | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of this rank's queries `q` (batch, heads, tokens, head_size) over all ranks' `k`
    (batch, kv_heads, keys, head_size) and `v`: (batch, heads, tokens, size of v's heads).

    If sequences pass a pipeline in slices, the keys are those of all slices so far, in order, and the queries those of
    the last. The documents of `reach` (batch, at least all ranks' keys) are by position. `sinks` (heads,) join each
    head's softmax."""
    sight = _Sight(ring, layout, q.shape[2], k.shape[2] // q.shape[2], reach, dropping)
    return _Ring.apply(q, k, v, sinks, sight)  # pyright: ignore[reportReturnType]


def zigzag(place: int, source: int, tokens: int, earlier: int) -> list[RingBlock]:
    """Returns the blocks of the `tokens` queries of a place of the ring with the keys of place `source`: as many, after
    `earlier` keys of earlier slices of the sequence, which all queries see.

    Of two places that share a sequence in zig-zag, all of the later one's queries see the first half of the other's
    keys, and the second half of the earlier one's queries see all keys: in both cases half of all pairs."""
    everything, half, last = slice(tokens), tokens // 2, earlier + tokens
    if source == place:
        blocks = [RingBlock(everything, slice(earlier, last), causal=True)]
        return [*blocks, RingBlock(everything, slice(earlier))] if earlier else blocks
    if source < place:
        return [RingBlock(everything, slice(earlier + half))]
    blocks = [RingBlock(slice(half, tokens), slice(last))]
    return [*blocks, RingBlock(slice(half), slice(earlier))] if earlier else blocks


class _Sight:
    """The visibility of every place's keys to one rank's queries."""

    def __init__(
        self,
        ring: Axis,
        layout: Layout,
        tokens: int,
        slices: int,
        reach: Reach,
        dropping: Dropping | None,
    ):
        self.ring, self.layout, self.dropping = ring, layout, dropping
        self.tokens, self.slices, self.documents, self.scoring = tokens, slices, reach.documents, reach.scoring
        self.window = reach.window if reach.window < slices * tokens * ring.size else 0
        earlier = (slices - 1) * tokens
        self.blocks = [zigzag(ring.rank, source, tokens, earlier) for source in range(ring.size)]
        """By the place where the keys come from."""
        if self.window or self.documents is not None:
            self.blocks = [_halved(blocks, tokens // 2) for blocks in self.blocks]
        if self.window:
            self.blocks = [self._within_window(source, blocks) for source, blocks in enumerate(self.blocks)]
        if self.documents is not None:
            self.blocks = self._within_documents()

    def keep(self, device: torch.device) -> Tensor | None:
        """Returns which probabilities dropout keeps, (batch, heads, queries, all places' keys by position), if any."""
        if self.dropping is None:
            return None
        queries = self._places(self.ring.rank, device)[-self.tokens :]
        return self.dropping.keep(queries, self.slices * self.tokens * self.ring.size)

    def seen(self, source: int, block: RingBlock, keep: Tensor | None, device: torch.device) -> Seen:
        """Returns which keys of one block its queries see."""
        mask = None
        if block.masked:
            mask = visible(*self._positions(source, block, device), self.window, self.documents)
            mask = mask.view(-1, 1, *mask.shape[-2:])
        causal = block.causal and mask is None
        if keep is None or self.dropping is None:
            return Seen(causal, mask)
        keep = keep[:, :, block.queries][..., self._places(source, device)[block.keys]]
        return Seen(causal, mask, keep, scale(self.dropping.p))

    def _within_window(self, source: int, blocks: list[RingBlock]) -> list[RingBlock]:
        """Returns the parts of blocks inside the window, each of one chunk of queries and one of keys."""
        half, queries, keys = self.tokens // 2, self._chunks(self.ring.rank)[-2:], self._chunks(source)
        left = []
        for block in blocks:
            of_q, of_k = queries[block.queries.start // half], keys[block.keys.start // half]
            for rows, columns in window_blocks(of_q, of_k, self.window):
                causal = rows == columns and len(rows) <= self.window
                every = rows.start >= columns.stop - 1 and rows.stop - columns.start <= self.window
                parts = _part(block.queries, of_q, rows), _part(block.keys, of_k, columns)
                left.append(RingBlock(*parts, causal=causal, masked=not (causal or every)))
        return left

    def _within_documents(self) -> list[list[RingBlock]]:
        """Returns the blocks in which queries and keys share documents, marked where these differ within a block."""
        masks = (self._same(source, block) for source, blocks in enumerate(self.blocks) for block in blocks)
        # One wait for the device, not one a block.
        verdicts = iter(torch.stack([torch.stack([same.any(), same.all()]) for same in masks]).tolist())
        judged = [[(block, *next(verdicts)) for block in blocks] for blocks in self.blocks]
        return [
            [replace(block, masked=block.masked or not every) for block, some, every in blocks if some]
            for blocks in judged
        ]

    def _same(self, source: int, block: RingBlock) -> Tensor:
        """Returns where queries and keys of a block are of one document, (batch, queries, keys)."""
        assert self.documents is not None
        queries, keys = self._positions(source, block, self.documents.device)
        return self.documents[:, queries, None] == self.documents[:, None, keys]

    def _positions(self, source: int, block: RingBlock, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the positions of a block's queries and of its keys."""
        queries = self._places(self.ring.rank, device)[-self.tokens :][block.queries]
        return queries, self._places(source, device)[block.keys]

    def _places(self, place: int, device: torch.device) -> Tensor:
        """Returns positions of the keys of a place of the ring; its queries are the last `tokens` of them."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self._chunks(place)])

    def _chunks(self, place: int) -> list[range]:
        """Returns the same positions as runs: two per slice of the sequences."""
        whole = self.tokens * self.ring.size
        runs = ring_positions(self.layout, whole, place)
        return [
            range(start + run.start, start + run.stop) for start in range(0, self.slices * whole, whole) for run in runs
        ]


def _part(block: slice, positions: range, run: range) -> slice:
    """Returns the indices within a block of a run of its positions."""
    return slice(block.start + run.start - positions.start, block.start + run.stop - positions.start)


def _halved(blocks: list[RingBlock], half: int) -> list[RingBlock]:
    """Splits blocks into parts of one chunk of queries and one of keys. The diagonal comes first: a query sees itself,
    so that all later parts find a finite log-sum-exp."""
    halves = []
    for block in blocks:
        for i, queries in enumerate(_steps(block.queries, half)):
            for j, keys in enumerate(_steps(block.keys, half)):
                if not block.causal or j <= i:
                    halves.append(RingBlock(queries, keys, causal=block.causal and i == j))
    return sorted(halves, key=lambda piece: not piece.causal)


def _steps(run: slice, length: int) -> Iterator[slice]:
    return (slice(start, start + length) for start in range(run.start or 0, run.stop, length))


class _Ring(torch.autograd.Function):
    """Ring attention: queries, keys and values of this rank's tokens to their output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sight: _Sight) -> Tensor:
        ring, wide = sight.ring, torch.promote_types(q.dtype, torch.float32)
        batch, heads, tokens, _ = q.shape
        # In memory as the projection after it reads it: token by token.
        o = torch.zeros(batch, tokens, heads, v.shape[-1], dtype=wide, device=q.device).transpose(1, 2)
        lse = torch.full((batch, heads, tokens), float("-inf"), dtype=wide, device=q.device)
        keep = sight.keep(q.device)
        for source, keys, values in _travelling(ring, k, v):
            for block in sight.blocks[source]:
                rows, columns = block.queries, block.keys
                seen = sight.seen(source, block, keep, q.device)
                result = attend(q[:, :, rows], keys[:, :, columns], values[:, :, columns], seen, sight.scoring)
                _merge(o[:, :, rows], lse[:, :, rows], *result)
        join_sinks(o, lse, sinks)
        o = o.to(q.dtype)
        ctx.sight = sight
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        sight: _Sight = ctx.sight
        ring, gradient = sight.ring, grad_outputs[0]
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()
        of_q = torch.zeros_like(q, dtype=lse.dtype)
        home: tuple[Tensor, Tensor, Tensor] | None = None
        arriving: tuple[Pending, Tensor] | None = None
        keep = sight.keep(q.device)
        for source, keys, values in _travelling(ring, k, v):
            gathered, of_k, of_v = _pair(k, v, lse.dtype)
            gathered.zero_()
            for block in sight.blocks[source]:
                rows, columns = block.queries, block.keys
                inputs = q[:, :, rows], keys[:, :, columns], values[:, :, columns], o[:, :, rows], lse[:, :, rows]
                seen = sight.seen(source, block, keep, q.device)
                results = gradients(gradient[:, :, rows], *inputs, seen, sight.scoring)
                for whole, part, part_of in zip((of_q, of_k, of_v), results, (rows, columns, columns), strict=True):
                    whole[:, :, part_of].add_(part)
            if source == ring.rank:
                home = gathered, of_k, of_v
                continue
            if arriving is not None:
                _take_in(gathered, *arriving)
            received = torch.empty_like(gathered)
            arriving = ring.rotate(received, gathered), received
        assert home is not None, "a ring's first keys are its own"
        gathered, of_k, of_v = home
        if arriving is not None:
            _take_in(gathered, *arriving)
        of_sinks = gradient_of_sinks(gradient, o, lse, sinks)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_sinks, None


def _travelling(ring: Axis, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields every place's keys and values, this rank's own first, with their source. The next ones are in flight while
    the caller uses these."""
    source = ring.rank
    here, keys, values = _pair(k, v, k.dtype)
    keys.copy_(k)
    values.copy_(v)
    for _ in range(ring.size - 1):
        there, next_keys, next_values = _pair(k, v, k.dtype)
        moving = ring.rotate(there, here)
        yield source, keys, values
        moving.wait()
        source = (source - 1) % ring.size
        here, keys, values = there, next_keys, next_values
    yield source, keys, values


def _take_in(gathered: Tensor, arriving: Pending, received: Tensor) -> None:
    """Adds the contributions of the earlier ranks to the gradients of a block."""
    arriving.wait()
    gathered += received


def _pair(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a buffer for keys and values, or their gradients, in one message, and its two parts."""
    both = torch.empty(k.numel() + v.numel(), dtype=dtype, device=k.device)
    return both, both[: k.numel()].view(k.shape), both[k.numel() :].view(v.shape)


def _merge(o: Tensor, lse: Tensor, o_block: Tensor, lse_block: Tensor) -> None:
    """Merges a further block's result into the output and the log-sum-exp so far, in place. One of the two has seen at
    least one key of every query."""
    both = torch.logaddexp(lse, lse_block)
    o.mul_((lse - both).exp().unsqueeze(-1)).add_(o_block * (lse_block - both).exp().unsqueeze(-1))
    lse.copy_(both)
