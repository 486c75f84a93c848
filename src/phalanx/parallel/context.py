"""Context parallelism: the ranks along the cp axis each hold a part of every sequence, and communicate in attention.

In a grid of ring × ulysses ranks (Fang and Zhao 2024, USP), those at one place of the ring exchange heads for tokens
(Ulysses: Jacobs et al. 2023), so that in between attention is that of one device with fewer heads, and between the
places keys and values are sent (ring.py). partition/tensor_slices.py says which positions a rank holds. Everything
else in a model works on single tokens, except for experts' counts over whole sequences. Micro-batches whose documents
are short are computed without any exchange: then every rank has whole documents (partition/documents.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm.axis import Axis
from phalanx.config.layout import Layout
from phalanx.config.model import window_within
from phalanx.model.attention import CoreAttention, Reach
from phalanx.model.documents import Documents, in_chunks
from phalanx.model.layers import uncompiled
from phalanx.model.moe import Sequences
from phalanx.model.recurrent import GatedDeltaNet, Mix
from phalanx.model.seeding import Noise
from phalanx.model.sparse import ChosenAttention
from phalanx.parallel.linear import replace_modules
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.ring import Dropping, ring_attention
from phalanx.partition.tensor_slices import rank_positions


@uncompiled
def to_heads(x: Tensor, ulysses: Axis, slices: int = 1) -> Tensor:
    """Maps (batch, heads, tokens, size) of all heads to (batch, heads / ranks, tokens × ranks, size), the ranks' tokens
    in rank order; those of a sequence in `slices` slice by slice. If there are fewer key heads than ranks, a head goes
    to several ranks."""
    if x.shape[1] < ulysses.size:
        x = x.repeat_interleave(ulysses.size // x.shape[1], dim=1)
    return _ExchangeHeads.apply(x, ulysses, slices, True)


@uncompiled
def to_tokens(x: Tensor, ulysses: Axis) -> Tensor:
    """Maps (batch, heads / ranks, tokens × ranks, size) back to (batch, heads, tokens, size)."""
    return _ExchangeHeads.apply(x, ulysses, 1, False)


class _ExchangeHeads(torch.autograd.Function):
    """An all-to-all whose gradient is the reverse one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ulysses: Axis, slices: int, heads: bool) -> Tensor:
        ctx.exchange = ulysses, slices, heads
        return (_gather_tokens if heads else _gather_heads)(x, ulysses, slices)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        ulysses, slices, heads = ctx.exchange
        return (_gather_heads if heads else _gather_tokens)(grad_outputs[0], ulysses, slices), None, None, None


# What travels is (ranks, batch, slices, tokens, heads, size): attention's kernels keep the heads of a token together,
# so that with one sequence a share of all tokens is sent from where it stands, and read where it arrives.


def _gather_tokens(x: Tensor, ulysses: Axis, slices: int) -> Tensor:
    parts = x.unflatten(1, (ulysses.size, -1)).unflatten(3, (slices, -1)).permute(1, 0, 3, 4, 2, 5)
    received = _exchanged(parts, ulysses)
    return received.permute(1, 2, 0, 3, 4, 5).flatten(1, 3).transpose(1, 2)


def _gather_heads(x: Tensor, ulysses: Axis, slices: int) -> Tensor:
    parts = x.unflatten(2, (slices, ulysses.size, -1)).permute(3, 0, 2, 4, 1, 5)
    received = _exchanged(parts, ulysses)
    return received.permute(1, 2, 3, 0, 4, 5).flatten(3, 4).flatten(1, 2).transpose(1, 2)


def _exchanged(parts: Tensor, ulysses: Axis) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    ulysses.all_to_all(received, parts).wait()
    return received


def connect(model: nn.Module, mesh: Mesh, layout: Layout) -> None:
    """Lets the attention of `model`, which gets a part of every sequence's tokens, see those of all cp ranks."""
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            module.mix = ContextMix(module.mix, layout, mesh.axis("cp"))
        if isinstance(module, ChosenAttention):
            whole = WholeSequences(layout, mesh.axis("cp"))
            module.gather, module.places = whole, whole.places
    ring, ulysses = mesh.axis("ring"), mesh.axis("ulysses")

    def connected(core: CoreAttention) -> CoreAttention:
        return core if isinstance(core, ChosenAttention) else ContextAttention(core, ring, ulysses)

    replace_modules(model, CoreAttention, connected)


class ContextAttention(CoreAttention):
    """The attention core of a rank that has a part of every sequence's tokens."""

    def __init__(self, core: CoreAttention, ring: Axis, ulysses: Axis):
        nn.Module.__init__(self)
        self.n_heads, self.dropout, self.site = core.n_heads, core.dropout, core.site
        # A window over whole sequences is none: keys then travel around the ring.
        self.window, self.scoring = window_within(core.window, core.seq_len), core.scoring
        self.chunks = core.chunks if self.window else 0
        self.ring, self.ulysses = ring, ulysses

    @uncompiled
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        noise: Noise | None,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Computes the same as CoreAttention.attend, for `q` (batch, heads, tokens here, head_size), `k` and `v` of the
        tokens here, of all slices of a sequence so far, `documents` of whole sequences and `sinks` (heads,)."""
        ring, ulysses, slices = self.ring, self.ulysses, k.shape[2] // q.shape[2]
        # More places than the ring has: each rank has whole documents, of which it computes all heads.
        alone = documents is not None and len(documents.places) > ring.size
        exchanges = ulysses.size > 1 and not alone
        if exchanges:
            q, k, v = to_heads(q, ulysses), to_heads(k, ulysses, slices), to_heads(v, ulysses, slices)
            if sinks is not None:
                sinks = sinks.chunk(ulysses.size)[ulysses.rank]
            if noise is not None:
                part, parts = noise.heads
                noise = replace(noise, heads=(part * ulysses.size + ulysses.rank, parts * ulysses.size))
        if ring.size > 1 or alone:
            dropping = None
            if self.chunks:
                every = k.new_empty(()).expand(len(k), 1, k.shape[2] * ring.size, 1)
                documents = in_chunks(documents, self.chunks, every)
            if noise is not None and self.dropout > 0:
                dropping = Dropping(noise, self.dropout, self.site, self.n_heads)
            o = ring_attention(q, k, v, ring, Reach(self.window, documents, self.scoring), dropping, sinks)
        else:
            if noise is not None:  # the queries that are now here are those of whole slices
                last = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
                noise = replace(noise, places=last, seq_len=noise.seq_len or k.shape[2])
            o = super().attend(q, k, v, noise, documents, sinks)
        return to_tokens(o, ulysses) if exchanges else o


@dataclass(frozen=True)
class ContextMix:
    """The `mix` of gated delta nets of a rank that has a part of every sequence's tokens: ranks exchange tokens for
    heads, whatever part of their heads attention exchanges."""

    alone: Mix
    layout: Layout
    cp: Axis

    @uncompiled
    def __call__(
        self, keys: Tensor, values: Tensor, constants: tuple[Tensor, ...], documents: Documents | None
    ) -> Tensor:
        """Computes what `alone` computes, for the tokens here of all heads."""
        seq_len = self.cp.size * keys.shape[2]
        order = torch.cat([places_of(self.layout, seq_len, rank, keys.device) for rank in range(self.cp.size)])
        own = keys.shape[1], values.shape[1]
        keys, values = (to_heads(x, self.cp)[:, :, order.argsort()] for x in (keys, values))
        shared = (own[0], own[0], own[1], own[1], own[1])
        mine = tuple(self._mine(each, heads) for each, heads in zip(constants, shared, strict=True))
        return to_tokens(self.alone(keys, values, mine, documents)[:, :, order], self.cp)

    def _mine(self, constant: Tensor, heads: int) -> Tensor:
        """Returns the part of a constant (heads, ...) that belongs to the heads here."""
        copies = max(1, self.cp.size // heads)
        return constant.repeat_interleave(copies, dim=0).chunk(self.cp.size)[self.cp.rank]


@dataclass(frozen=True)
class WholeSequences:
    """The `gather` and `places` of an attention to chosen keys, which may lie anywhere: a rank gathers what all tokens
    have for all heads, and its queries are those of its own tokens."""

    layout: Layout
    cp: Axis

    @uncompiled
    def __call__(self, x: Tensor) -> Tensor:
        """Maps (batch, tokens here, size) to (batch, tokens of all ranks, size), in order of position."""
        seq_len = self.cp.size * x.shape[1]
        order = torch.cat([places_of(self.layout, seq_len, rank, x.device) for rank in range(self.cp.size)])
        return _GatherSequences.apply(x, order, self.cp)

    def places(self, seq: int, device: torch.device) -> Tensor:
        """Returns the positions of `seq` tokens here, counted from the end of the sequence."""
        return places_of(self.layout, self.cp.size * seq, self.cp.rank, device) - self.cp.size * seq


class _GatherSequences(torch.autograd.Function):
    """An all-gather, whose gradient is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, cp: Axis) -> Tensor:
        ctx.order, ctx.cp = order, cp
        parts = x.new_empty(cp.size, *x.shape)
        cp.all_gather(parts.view(-1), x.contiguous().view(-1)).wait()
        return parts.transpose(0, 1).flatten(1, 2)[:, order.argsort()]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        whole = grad_outputs[0][:, ctx.order].unflatten(1, (ctx.cp.size, -1)).transpose(0, 1).contiguous()
        share = whole.new_empty(whole.shape[1:])
        ctx.cp.reduce_scatter(share.view(-1), whole.view(-1)).wait()
        return share, None, None


class SplitSequences(Sequences):
    """Access to whole sequences, of which every cp rank holds a part."""

    def __init__(self, layout: Layout, cp: Axis):
        self.layout, self.cp = layout, cp

    @uncompiled
    def sum(self, x: Tensor) -> Tensor:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self.cp.all_reduce(total).wait()
        return total

    @uncompiled
    def whole(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.cp.size, *x.shape)
        self.cp.all_gather(parts.view(-1), x.detach().contiguous().view(-1)).wait()
        seq_len = self.cp.size * x.shape[1]
        whole = x.new_empty(x.shape[0], seq_len, *x.shape[2:])
        for rank, part in enumerate(parts):
            whole[:, places_of(self.layout, seq_len, rank, x.device)] = part
        return whole

    @uncompiled
    def mine(self, x: Tensor) -> Tensor:
        return x[:, places_of(self.layout, x.shape[1], self.cp.rank, x.device)]


def places_of(layout: Layout, seq_len: int, rank: int, device: torch.device) -> Tensor:
    """Returns the positions that context-parallel rank `rank` holds, (seq_len / cp,), in storage order."""
    runs = rank_positions(layout, seq_len, rank)
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])
