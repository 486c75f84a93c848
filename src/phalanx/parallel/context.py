"""Context parallelism: the ranks along the cp axis each hold a part of every sequence, and communicate in attention.

In a grid of ring × ulysses ranks (Fang and Zhao 2024, USP), those at one place of the ring exchange heads for tokens
(ulysses.py), and between the places keys and values are sent (ring.py). partition/tensor_slices.py says which positions
a rank holds. Everything else in a model works on single tokens, except for experts' counts over whole sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from phalanx.comm.axis import Axis
from phalanx.config.layout import Layout
from phalanx.config.model import window_within
from phalanx.model.attention import CoreAttention
from phalanx.model.blocked_attention import Reach
from phalanx.model.documents import Documents
from phalanx.model.layers import uncompiled
from phalanx.model.noise import Noise
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.modules import replace_modules
from phalanx.parallel.ring import ring_attention
from phalanx.parallel.ring_blocks import Dropping
from phalanx.parallel.ulysses import to_heads, to_tokens
from phalanx.partition.tensor_slices import rank_positions


def connect(model: nn.Module, mesh: Mesh) -> None:
    """Lets the attention of `model`, which gets a part of every sequence's tokens, see those of all cp ranks."""
    ring, ulysses = mesh.axis("ring"), mesh.axis("ulysses")
    replace_modules(model, CoreAttention, lambda core: ContextAttention(core, ring, ulysses))


class ContextAttention(CoreAttention):
    """The attention core of a rank that has a part of every sequence's tokens."""

    def __init__(self, core: CoreAttention, ring: Axis, ulysses: Axis):
        nn.Module.__init__(self)
        self.n_heads, self.dropout, self.site = core.n_heads, core.dropout, core.site
        # A window over whole sequences is none: keys then travel around the ring.
        self.window, self.scoring = window_within(core.window, core.seq_len), core.scoring
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
        if ulysses.size > 1:
            q, k, v = to_heads(q, ulysses), to_heads(k, ulysses, slices), to_heads(v, ulysses, slices)
            if sinks is not None:
                sinks = sinks.chunk(ulysses.size)[ulysses.rank]
            if noise is not None:
                part, parts = noise.heads
                noise = replace(noise, heads=(part * ulysses.size + ulysses.rank, parts * ulysses.size))
        if ring.size > 1:
            dropping = None
            if noise is not None and self.dropout > 0:
                dropping = Dropping(noise, self.dropout, self.site, self.n_heads)
            o = ring_attention(q, k, v, ring, Reach(self.window, documents, self.scoring), dropping, sinks)
        else:
            if noise is not None:  # the queries that are now here are those of whole slices
                last = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
                noise = replace(noise, places=last, seq_len=noise.seq_len or k.shape[2])
            o = super().attend(q, k, v, noise, documents, sinks)
        return to_tokens(o, ulysses) if ulysses.size > 1 else o


class SplitSequences:
    """Access to whole sequences, of which every cp rank holds a part, for the routers of a mixture of experts. Nothing
    here has gradients."""

    def __init__(self, layout: Layout, cp: Axis):
        self.layout, self.cp = layout, cp

    @uncompiled
    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over the cp ranks."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self.cp.all_reduce(total).wait()
        return total

    @uncompiled
    def whole(self, x: Tensor) -> Tensor:
        """Gathers all tokens, (batch, sequence, ...) in order of position, from those here, (batch, tokens, ...)."""
        parts = x.new_empty(self.cp.size, *x.shape)
        self.cp.all_gather(parts.view(-1), x.detach().contiguous().view(-1)).wait()
        seq_len = self.cp.size * x.shape[1]
        whole = x.new_empty(x.shape[0], seq_len, *x.shape[2:])
        for rank, part in enumerate(parts):
            whole[:, self._places(seq_len, rank, x.device)] = part
        return whole

    @uncompiled
    def mine(self, x: Tensor) -> Tensor:
        """Selects the tokens here, (batch, tokens, ...), from `x` (batch, sequence, ...) of all."""
        return x[:, self._places(x.shape[1], self.cp.rank, x.device)]

    def _places(self, seq_len: int, rank: int, device: torch.device) -> Tensor:
        runs = rank_positions(self.layout, seq_len, rank)
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])
