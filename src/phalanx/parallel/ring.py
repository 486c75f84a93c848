"""Ring attention: every rank keeps its queries, and the keys and values come to it (Liu et al. 2023).

While a rank computes with one block of keys, the next one arrives. In the backward pass keys and values come again, and
their gradients return. Only q, k, v, the output and its log-sum-exp are saved in between, so that memory is that of
this rank's tokens. Places of the ring have zig-zag parts (blocks/attention.py), so that with a causal mask all
compute the same at every hop. Both ways of travel yield every place's keys in an order in which a place sends and gets
one message at a time, and all ranks make the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.blocks.attention import reached_runs, ring_hops, sliced_runs
from phalanx.comm.axis import Axis, Pending
from phalanx.model.attention import Reach, gradient_of_sinks, join_sinks, visible
from phalanx.model.attention_blocks import Seen, attend, gradients, is_flash
from phalanx.model.layers import uncompiled
from phalanx.model.seeding import Noise, scale
from phalanx.partition.documents import RingBlock, windowed
from phalanx.partition.tensor_slices import window_blocks


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


class Sight:
    """The visibility of every place's keys to one rank's queries, and with a window the keys that places send each
    other."""

    def __init__(
        self, ring: Axis, tokens: int, slices: int, reach: Reach, dropping: Dropping | None, at_once: bool = False
    ):
        """`at_once`: whether one call computes this rank's own keys, if it has whole documents."""
        self.ring, self.dropping, self.tokens, self.slices = ring, dropping, tokens, slices
        self.place, self.whole = ring.rank, slices * tokens * ring.size
        """This rank's place, and the tokens of whole sequences so far."""
        self.window, self.documents, self.scoring = reach.window, reach.documents, reach.scoring
        self.straight = bool(self.window)
        """Whether keys go straight to the places that see them."""
        self.cut = self.local = None
        if self.documents is not None and self.documents.places:
            assert slices == 1, "slices are cut by position"
            self.cut, self.place = self.documents.cut(self.window), self.documents.place
            self.keys, self.straight, self.hops = self.cut.keys, True, self.cut.hops
            self.queries, self.whole = self.keys[self.place], tokens * len(self.keys)
            self.local = self.documents.local if at_once else None
            everything = RingBlock(slice(None), slice(None), causal=True)
            self.blocks = self.cut.blocks if self.local is None else [[everything]] * len(self.keys)
            return
        self.hops = ring_hops(tokens * ring.size, ring.size, slices, self.window)
        self.queries = self._own_keys()[-2:]
        """Positions of this rank's queries, as two runs."""
        places = range(ring.size)
        if self.window:
            self.keys = [self._reached(ring.rank, source) for source in places]
            self.keys[ring.rank] = self._own_keys()
            self.blocks = [self._within_window(source) for source in places]
        else:
            self.keys = [sliced_runs(tokens * ring.size, ring.size, source, slices) for source in places]
            self.blocks = [zigzag(ring.rank, source, tokens, (slices - 1) * tokens) for source in places]
        """Positions of the keys that a place sends here, as runs, and their blocks, both by the place."""
        if self.documents is not None:
            if not self.window:
                self.blocks = [_halved(blocks, tokens // 2) for blocks in self.blocks]
            self.blocks = self._within_documents()

    def keys_for(self, place: int) -> list[slice]:
        """Returns the indices of this rank's keys that a place sees, as slices; some may be empty."""
        if self.cut is not None:
            return self.cut.sent[place]
        indices, start = [], 0
        for own, run in zip(self._own_keys(), self._reached(place, self.ring.rank), strict=True):
            indices.append(_part(slice(start, start + len(own)), own, run))
            start += len(own)
        return indices

    def arriving(self, source: int) -> int:
        """Returns the number of keys that a place sends here."""
        return sum(map(len, self.keys[source]))

    def keep(self, device: torch.device) -> Tensor | None:
        """Returns which probabilities dropout keeps, (batch, heads, queries, all places' keys by position), if any."""
        if self.dropping is None:
            return None
        return self.dropping.keep(_positions(self.queries, device), self.whole)

    def seen(self, source: int, block: RingBlock, keep: Tensor | None, q: Tensor, v: Tensor) -> Seen:
        """Returns which keys of one block its queries see; `q` and `v` are those of all blocks."""
        mask, device = None, q.device
        if self.local is not None:
            return Seen(causal=True, documents=self.local, window=self.window)
        if block.window and keep is None and not self.scoring.softcap and is_flash(q, v):
            return Seen(block.causal, window=block.window)
        if block.masked:
            documents = self.documents and self.documents.part(block.row)
            mask = visible(*self._positions(source, block, device), self.window, documents)
            mask = mask.view(-1, 1, *mask.shape[-2:])
        causal = block.causal and mask is None
        if keep is None or self.dropping is None:
            return Seen(causal, mask)
        keep = keep[block.row, :, block.queries][..., _positions(self.keys[source], device)[block.keys]]
        return Seen(causal, mask, keep, scale(self.dropping.p))

    def _within_window(self, source: int) -> list[RingBlock]:
        """Returns the blocks inside the window, each of one run of queries and one of keys. The diagonal comes first: a
        query sees itself, so that all later blocks find a finite log-sum-exp."""
        diagonal, others, start = list[RingBlock](), list[RingBlock](), 0
        for keys in self.keys[source]:
            for number, queries in enumerate(self.queries):
                for rows, columns in window_blocks(queries, keys, self.window):
                    of_queries = _part(slice(number * len(queries), (number + 1) * len(queries)), queries, rows)
                    of_keys = _part(slice(start, start + len(keys)), keys, columns)
                    block = windowed(of_queries, of_keys, rows, columns, self.window, slice(None))
                    (diagonal if queries == keys else others).append(block)
            start += len(keys)
        return diagonal + others

    def _within_documents(self) -> list[list[RingBlock]]:
        """Returns the blocks in which queries and keys share documents, marked where these differ within a block."""
        masks = (self._same(source, block) for source, blocks in enumerate(self.blocks) for block in blocks)
        # One wait for the device, not one a block.
        verdicts = iter(torch.stack([torch.stack([same.any(), same.all()]) for same in masks]).tolist())
        judged = [[(block, *next(verdicts)) for block in blocks] for blocks in self.blocks]
        return [
            [replace(b, masked=b.masked or not every, window=b.window * every) for b, some, every in blocks if some]
            for blocks in judged
        ]

    def _same(self, source: int, block: RingBlock) -> Tensor:
        """Returns where queries and keys of a block are of one document, (batch, queries, keys)."""
        assert self.documents is not None
        numbers = self.documents.numbers
        queries, keys = self._positions(source, block, numbers.device)
        return numbers[:, queries, None] == numbers[:, None, keys]

    def _positions(self, source: int, block: RingBlock, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the positions of a block's queries and of its keys."""
        return _positions(self.queries, device)[block.queries], _positions(self.keys[source], device)[block.keys]

    def _own_keys(self) -> list[range]:
        """Returns the positions of this rank's keys as runs: two per slice of the sequences."""
        return sliced_runs(self.tokens * self.ring.size, self.ring.size, self.ring.rank, self.slices)

    def _reached(self, place: int, source: int) -> list[range]:
        """Returns the positions of the keys of `source` that a place sees, as runs, some of which may be empty."""
        return reached_runs(self.tokens * self.ring.size, self.ring.size, self.slices, self.window, place, source)


def _positions(runs: list[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


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


def travel(sight: Sight, k: Tensor, v: Tensor) -> Around | Straight:
    """Returns the way of this rank's keys `k` and values `v`: around the ring, or with a window straight to the places
    that see them."""
    return Straight(sight, k, v) if sight.straight else Around(sight.ring, k, v)


def pair(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a buffer for keys and values of the shapes of `k` and `v`, or for their gradients, in one message, and
    its two parts."""
    return _split(torch.empty(k.numel() + v.numel(), dtype=dtype, device=k.device), k.shape, v.shape)


def _split(both: Tensor, k: torch.Size, v: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    return both, both[: k.numel()].view(k), both[k.numel() :].view(v)


class Around:
    """All keys and values travel around the ring. Their gradients follow them, accumulate every rank's contribution,
    and reach the owner, which has kept its own, with the last hop.

    One object has the messages of one pass through a layer."""

    def __init__(self, ring: Axis, k: Tensor, v: Tensor):
        self.ring, self.k, self.v = ring, k, v
        self.home: Tensor | None = None
        self.moving: tuple[Pending, Tensor] | None = None

    def arriving(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields places with their keys and values, (batch, kv_heads, keys, size), this rank's own first. The next ones
        are in flight while the caller uses these."""
        ring, source = self.ring, self.ring.rank
        here, keys, values = pair(self.k, self.v, self.k.dtype)
        keys.copy_(self.k)
        values.copy_(self.v)
        for _ in range(ring.size - 1):
            there, next_keys, next_values = pair(self.k, self.v, self.k.dtype)
            moving = ring.rotate(there, here)
            yield source, keys, values
            moving.wait()
            source = (source - 1) % ring.size
            here, keys, values = there, next_keys, next_values
        yield source, keys, values

    def give_back(self, source: int, gradients: Tensor) -> None:
        """Takes this rank's contribution to the gradients of the keys and values of `source`, both in one buffer. Each
        place's follows its keys and values, before the next ones."""
        if source == self.ring.rank:
            self.home = gradients
            return
        self._take_in(gradients)
        received = torch.empty_like(gradients)
        self.moving = self.ring.rotate(received, gradients), received

    def collected(self) -> tuple[Tensor, Tensor]:
        """Returns the gradients of this rank's keys and values, after all contributions."""
        assert self.home is not None, "a ring's first keys are its own"
        self._take_in(self.home)
        _, of_k, of_v = _split(self.home, self.k.shape, self.v.shape)
        return of_k, of_v

    def _take_in(self, gradients: Tensor) -> None:
        """Adds the contributions of the earlier ranks to the gradients of a block."""
        if self.moving is not None:
            pending, received = self.moving
            pending.wait()
            gradients += received
            self.moving = None


class Straight:
    """With a window, or documents, a place sends keys and values straight to the places that see them, and their
    gradients come straight back. To the others it sends nothing: with whole documents to none."""

    def __init__(self, sight: Sight, k: Tensor, v: Tensor):
        self.sight, self.ring, self.k, self.v = sight, sight.ring, k, v
        self.home: tuple[Tensor, Tensor] | None = None
        self.moving: tuple[Pending, tuple[Tensor, Tensor, Tensor], list[slice]] | None = None

    def arriving(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        source, keys, values = self.sight.place, self.k, self.v
        for hops in self.sight.hops:
            after, before = self._places(hops)
            columns = self.sight.keys_for(after)
            sent, *parts = pair(*self._sized(sum(run.stop - run.start for run in columns)), self.k.dtype)
            for part, whole in zip(parts, (self.k, self.v), strict=True):
                torch.cat([whole[:, :, run] for run in columns] or [whole[:, :, :0]], dim=2, out=part)
            received, next_keys, next_values = pair(*self._sized(self.sight.arriving(before)), self.k.dtype)
            moving = self.ring.shift(received, sent, hops)
            yield source, keys, values
            moving.wait()
            source, keys, values = before, next_keys, next_values
        yield source, keys, values

    def give_back(self, source: int, gradients: Tensor) -> None:
        if source == self.sight.place:
            self.home = _split(gradients, self.k.shape, self.v.shape)[1:]
            return
        self._take_in()
        hops = (self.ring.rank - source) % self.ring.size
        columns = self.sight.keys_for(self._places(hops)[0])
        received = pair(*self._sized(sum(run.stop - run.start for run in columns)), gradients.dtype)
        self.moving = self.ring.shift(received[0], gradients, -hops), received, columns

    def collected(self) -> tuple[Tensor, Tensor]:
        assert self.home is not None, "a place's first keys are its own"
        self._take_in()
        of_k, of_v = self.home
        return of_k, of_v

    def _places(self, hops: int) -> tuple[int, int]:
        """Returns the places so far after this one, and before it."""
        return (self.ring.rank + hops) % self.ring.size, (self.ring.rank - hops) % self.ring.size

    def _sized(self, keys: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values in the shape of `keys` of them."""
        k, v = (x[:, :, :1].expand(-1, -1, keys, -1) for x in (self.k, self.v))
        return k, v

    def _take_in(self) -> None:
        """Adds the contributions that a place has sent to the gradients of the keys that it got from here."""
        if self.moving is None:
            return
        pending, (_, *parts), columns = self.moving
        pending.wait()
        assert self.home is not None
        for whole, part in zip(self.home, parts, strict=True):
            start = 0
            for run in columns:
                length = run.stop - run.start
                whole[:, :, run] += part[:, :, start : start + length]
                start += length
        self.moving = None


@uncompiled
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Axis,
    reach: Reach,
    dropping: Dropping | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of this rank's queries `q` (batch, heads, tokens, head_size) over all ranks' `k`
    (batch, kv_heads, keys, head_size) and `v`: (batch, heads, tokens, size of v's heads). Where ranks have whole
    documents, nothing is sent.

    If sequences pass a pipeline in slices, the keys are those of all slices so far, in order, and the queries those of
    the last. The documents of `reach` are those of at least all ranks' keys. `sinks` (heads,) join each
    head's softmax."""
    at_once = is_flash(q, v) and dropping is None and not reach.scoring.softcap
    sight = Sight(ring, q.shape[2], k.shape[2] // q.shape[2], reach, dropping, at_once)
    return _Ring.apply(q, k, v, sinks, sight)


class _Ring(torch.autograd.Function):
    """Ring attention: queries, keys and values of this rank's tokens to their output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sight: Sight) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        batch, heads, tokens, _ = q.shape
        # In memory as the projection after it reads it: token by token.
        o = torch.zeros(batch, tokens, heads, v.shape[-1], dtype=wide, device=q.device).transpose(1, 2)
        lse = torch.full((batch, heads, tokens), float("-inf"), dtype=wide, device=q.device)
        keep = sight.keep(q.device)
        for source, keys, values in travel(sight, k, v).arriving():
            for block in sight.blocks[source]:
                row, rows, columns = block.row, block.queries, block.keys
                seen = sight.seen(source, block, keep, q, v)
                inputs = q[row, :, rows], keys[row, :, columns], values[row, :, columns]
                _merge(o[row, :, rows], lse[row, :, rows], *attend(*inputs, seen, sight.scoring))
        join_sinks(o, lse, sinks)
        o = o.to(q.dtype)
        ctx.sight = sight
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        sight: Sight = ctx.sight
        gradient = grad_outputs[0]
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()
        of_q = torch.zeros_like(q, dtype=lse.dtype)
        keep = sight.keep(q.device)

        def contribution(source: int, keys: Tensor, values: Tensor) -> Tensor:
            both, of_k, of_v = pair(keys, values, lse.dtype)
            both.zero_()
            for block in sight.blocks[source]:
                row, rows, columns = block.row, block.queries, block.keys
                inputs = q[row, :, rows], keys[row, :, columns], values[row, :, columns], o[row, :, rows]
                seen = sight.seen(source, block, keep, q, v)
                results = gradients(gradient[row, :, rows], *inputs, lse[row, :, rows], seen, sight.scoring)
                for whole, part, part_of in zip((of_q, of_k, of_v), results, (rows, columns, columns), strict=True):
                    whole[row, :, part_of].add_(part)
            return both

        messages = travel(sight, k, v)
        for source, keys, values in messages.arriving():
            messages.give_back(source, contribution(source, keys, values))
        keys = values = None  # nothing of the last block is there while the gradients are narrowed
        of_k, of_v = messages.collected()
        of_sinks = gradient_of_sinks(gradient, o, lse, sinks)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_sinks, None


def _merge(o: Tensor, lse: Tensor, o_block: Tensor, lse_block: Tensor) -> None:
    """Merges a further block's result into the output and the log-sum-exp so far, in place. One of the two has seen at
    least one key of every query."""
    both = torch.logaddexp(lse, lse_block)
    o.mul_((lse - both).exp().unsqueeze(-1)).add_(o_block * (lse_block - both).exp().unsqueeze(-1))
    lse.copy_(both)
