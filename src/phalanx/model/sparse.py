"""Latent attention to the keys that an indexer chooses (DeepSeek-AI 2025, arXiv 2512.02556, section 2).

The indexer scores every earlier key of a query: I = Σ_h w_h ReLU(q_h · k), with a few narrow heads that share one key.
The query attends to the `top_k` keys with the highest scores; of equal scores the earlier key comes first, so that the
choice depends on no layout. All heads read one vector per token, the latent with its rotary part: wkv_b's half for keys
multiplies the queries, its half for values the output.

The choice has no gradient. The indexer learns from inputs without one: its loss is KL(p || softmax(I)), summed over
queries, where p is the mean of the heads' probabilities. In the sparse stage both are over the chosen keys, and
everything is trained; in the dense stage over all, and the indexer alone is trained. The backward pass computes and
records that loss, as it does routers' penalties (moe.py), in runs of queries.

Shapes: batch, seq (queries), keys (seq, or more with a cache), heads, index_heads, size (kv_rank + rope_head_dim).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.blocks.sparse import INDEX_NORM_EPS, keys_of_query, sparse_rows
from phalanx.config.model import ModelConfig
from phalanx.model.attention import CoreAttention, KeysAndValues, LatentAttention, visible
from phalanx.model.documents import Documents
from phalanx.model.layers import Linear, rotate, uncompiled
from phalanx.model.moe import Routing, Statistics
from phalanx.model.seeding import Noise


class IndexTensors(NamedTuple):
    """What the indexer computes."""

    queries: Tensor
    """(batch, seq, index_heads, index_head_dim)."""
    keys: Tensor
    """(batch, keys, index_head_dim)."""
    weights: Tensor
    """The factor of each head's score, (batch, seq, index_heads)."""


class Indexer(nn.Module):
    """The matrices of the indexer."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        sparse = model.sparse
        heads, self.size = sparse.index_heads, sparse.index_head_dim
        self.wq = Linear(model.mla.q_rank or model.d_model, heads * self.size, bias=False)
        self.wk = Linear(model.d_model, self.size, bias=False)
        self.weights = Linear(model.d_model, heads, bias=False)
        self.norm = nn.LayerNorm(self.size, eps=INDEX_NORM_EPS)
        self.scale = (heads * self.size) ** -0.5

    def forward(self, x: Tensor, queries: Tensor, rotary: Tensor) -> IndexTensors:
        """Returns what it computes of a layer's input `x` (batch, seq, d_model) and its compressed queries, (batch,
        seq, q_rank)."""
        keys = rotate(self.norm(self.wk(x)).unsqueeze(2), rotary).squeeze(2)
        return IndexTensors(
            rotate(self.wq(queries).unflatten(-1, (-1, self.size)), rotary), keys, self.weights(x) * self.scale
        )


class IndexedAttention(LatentAttention):
    """The layer. A layout may replace its core's `gather` and `sum_heads`."""

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__(model, layer)
        out, self.index = self.wo, Indexer(model)
        del self.wo, self.core
        self.core, self.wo = ChosenAttention(model, layer), out

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Computes attention, (batch, seq, d_model) to the same shape."""
        assert rotary is not None, "latent attention needs rotary positions"
        queries, compressed = self.compress(x)
        read = self.q_norm(queries) if self.compresses_queries else x
        queries = self.wq_b(read) if self.compresses_queries else queries
        index = self.index(x.detach(), read.detach(), rotary)
        latent, k_turned = compressed.split([self.kv_rank, self.parts[1]], -1)
        latents = torch.cat((self.kv_norm(latent), rotate(k_turned.unsqueeze(2), rotary).squeeze(2)), -1)
        to_keys, to_values = self.halves()
        q, q_turned = queries.unflatten(-1, (-1, sum(self.parts))).split(self.parts, -1)
        q = torch.cat((torch.einsum("bshd,hdr->bshr", q, to_keys), rotate(q_turned, rotary)), -1)
        o = self.core(q, latents, index, cache, documents)
        return self.wo(torch.einsum("bshr,hdr->bshd", o, to_values).flatten(2))

    def halves(self) -> tuple[Tensor, ...]:
        """Returns the halves of wkv_b for keys, (heads, nope_head_dim, kv_rank), and for values."""
        layer = self.wkv_b
        weight = layer.weight
        if layer.lora_a is not None and layer.lora_b is not None:
            weight = weight + layer.lora_scale * (layer.lora_b.weight @ layer.lora_a.weight)
        return weight.unflatten(0, (-1, sum(self.kv_parts))).split(self.kv_parts, 1)


def _same(x: Tensor) -> Tensor:
    return x


def _last(seq: int, device: torch.device) -> Tensor:
    return torch.arange(-seq, 0, device=device)


class ChosenAttention(CoreAttention):
    """The choice of keys, and softmax(scale q latentsᵀ) latents over them. A layout may replace `gather` and `places`,
    where ranks hold parts of sequences, and `sum_heads`, which sums over the ranks that share the heads."""

    gather: Callable[[Tensor], Tensor] = staticmethod(_same)
    """Returns what all ranks with parts of the same sequences have of a tensor (batch, seq, ...), by position."""
    places: Callable[[int, torch.device], Tensor] = staticmethod(_last)
    """Returns the positions of this rank's queries, from their number: counted from the end of the keys, negative."""
    sum_heads: Callable[[Tensor], object] = staticmethod(_same)
    routing: Routing = Routing()
    """Takes the indexer's loss. The model sets its own."""

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__(model, layer)
        self.layer, self.model = layer, model
        self.scale = model.attention_scale or model.head_size**-0.5

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q: Tensor, latents: Tensor, index: IndexTensors, cache: KeysAndValues | None, documents: Documents | None
    ) -> Tensor:
        """Runs `attend` for all keys of the layer, those of the cache among them."""
        gathered, index_keys = self.keys_of(latents, index.keys, cache)
        return self.run(self.attend, q, gathered, index.queries, index_keys, index.weights, documents)

    @uncompiled
    def keys_of(self, latents: Tensor, keys: Tensor, cache: KeysAndValues | None) -> tuple[Tensor, Tensor]:
        """Returns latents and index keys of all tokens so far, (batch, keys, ...) both."""
        latents, keys = self.gather(latents), self.gather(keys)
        if cache is None:
            return latents, keys
        every, every_key = cache.extend(self.layer, latents.unsqueeze(1), keys.unsqueeze(1))
        return every.squeeze(1), every_key.squeeze(1)

    @uncompiled
    def attend(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q: Tensor,
        latents: Tensor,
        index_queries: Tensor,
        index_keys: Tensor,
        weights: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        """Maps `q` (batch, seq, heads, size) to (batch, seq, heads, kv_rank), over `latents` (batch, keys, size)."""
        places = self.places(q.shape[1], q.device) + latents.shape[1]
        return _Chosen.apply(q, latents, index_queries, index_keys, weights, self, places, documents)  # pyright: ignore[reportReturnType]

    def seen(self, places: Tensor, keys: int, documents: Documents | None) -> Tensor:
        """Returns which of `keys` keys the queries at `places` see, (batch or 1, queries, keys)."""
        mask = visible(places, torch.arange(keys, device=places.device), 0, documents)
        return mask.view(-1, *mask.shape[-2:])

    def choose(self, index: IndexTensors, seen: Tensor) -> Tensor:
        """Returns the keys that queries attend to, (batch, queries, top_k) of int32: those with the highest scores,
        and for a query with fewer some that it does not see."""
        scores = index_scores(index._replace(keys=index.keys.unsqueeze(1))).masked_fill_(~seen, float("-inf"))
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.model.sparse.top_k].int()

    def of_run(
        self, q: Tensor, latents: Tensor, index: IndexTensors, seen: Tensor, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output of a run of queries, (batch, queries, heads, kv_rank), the heads' probabilities, (batch,
        queries, heads, keys), and which keys are seen, (batch or 1, queries, keys): those `chosen`, or all."""
        keys = latents.unsqueeze(1)
        if chosen is not None:
            keys, seen = _taken(latents, chosen), seen.expand(len(q), -1, -1).gather(-1, chosen.long())
        scores = _meet(q * self.scale, keys.mT).to(torch.promote_types(q.dtype, torch.float32))
        probabilities = scores.masked_fill(~seen.unsqueeze(2), float("-inf")).softmax(-1)
        return _meet(probabilities.to(q.dtype), keys[..., : self.model.mla.kv_rank]), probabilities, seen

    def loss_of(self, index: IndexTensors, probabilities: Tensor, seen: Tensor, chosen: Tensor | None) -> Tensor:
        """Returns the indexer's loss of a run of queries, in at least fp32, from the heads' probabilities."""
        target = probabilities.detach().sum(2)
        self.sum_heads(target)
        target /= self.n_heads
        keys = index.keys.unsqueeze(1) if chosen is None else _taken(index.keys, chosen)
        scores = index_scores(index._replace(keys=keys)).masked_fill(~seen, float("-inf"))
        # Where nothing is seen both are zero, and so is their product.
        logs = scores.log_softmax(-1).masked_fill(~seen, 0.0)
        return (torch.xlogy(target, target) - target * logs).sum()

    def runs(self, q: Tensor, keys: int) -> Iterator[slice]:
        """Yields runs of queries, as many as fit in memory at once."""
        batch, seq, heads, _ = q.shape
        rows = sparse_rows(batch, seq, heads, keys, self.model)
        return (slice(start, start + rows) for start in range(0, seq, rows))


def index_scores(index: IndexTensors) -> Tensor:
    """Returns the scores of keys (batch, 1 or seq, keys, index_head_dim): (batch, seq, keys), in at least fp32."""
    wide = torch.promote_types(index.queries.dtype, torch.float32)
    each = F.relu(_meet(index.queries, index.keys.mT).to(wide))
    return (index.weights.to(wide).unsqueeze(2) @ each).squeeze(2)


def _meet(x: Tensor, y: Tensor) -> Tensor:
    """Returns x y of `x` (batch, seq, heads, inner) and `y` (batch, 1 or seq, inner, width): (batch, seq, heads,
    width)."""
    return (x.reshape(len(x), y.shape[1], -1, x.shape[-1]) @ y).view(*x.shape[:3], y.shape[-1])


def _taken(x: Tensor, chosen: Tensor) -> Tensor:
    """Returns the rows `chosen` (batch, seq, top_k) of `x` (batch, keys, width): (batch, seq, top_k, width)."""
    places = torch.arange(len(x), device=x.device)[:, None, None] * x.shape[1]
    # Its backward pass adds in the same order in every run, on a GPU too.
    return F.embedding(chosen.long() + places, x.reshape(-1, x.shape[-1]))


class _Chosen(torch.autograd.Function):
    """`ChosenAttention.attend`. It saves its inputs and the choice, and computes the rest again run by run."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latents: Tensor,
        index_queries: Tensor,
        index_keys: Tensor,
        weights: Tensor,
        core: ChosenAttention,
        places: Tensor,
        documents: Documents | None,
    ) -> Tensor:
        o = q.new_empty(*q.shape[:3], core.model.mla.kv_rank)
        keys, choices = latents.shape[1], list[Tensor]()
        sparse = keys_of_query(core.model, keys) < keys
        for rows in core.runs(q, keys):
            index = IndexTensors(index_queries[:, rows], index_keys, weights[:, rows])
            seen, chosen = core.seen(places[rows], keys, documents), None
            if sparse:
                chosen = core.choose(index, seen)
                choices.append(chosen)
            o[:, rows] = core.of_run(q[:, rows], latents, index, seen, chosen)[0]
        ctx.core, ctx.places, ctx.documents = core, places, documents
        ctx.save_for_backward(
            *(q, latents, index_queries, index_keys, weights), torch.cat(choices, 1) if choices else None
        )
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        *tensors, choice = ctx.saved_tensors
        core: ChosenAttention = ctx.core
        q, latents, _, index_keys, _ = tensors
        factor, keys = core.routing.factor * core.model.sparse.index_loss, latents.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        of_rows = [torch.empty_like(each) for each in (q, tensors[2], tensors[4])]
        of_keys = [torch.zeros_like(each, dtype=wide) for each in (latents, index_keys)]
        total = torch.zeros((), dtype=torch.float64, device=q.device)
        for rows in core.runs(q, keys):
            chosen = None if choice is None else choice[:, rows]
            by_row = [tensors[place][:, rows].detach().requires_grad_() for place in (0, 2, 4)]
            by_key = [each.detach().requires_grad_() for each in (latents, index_keys)]
            index = IndexTensors(by_row[1], by_key[1], by_row[2])
            with torch.enable_grad():
                seen = core.seen(ctx.places[rows], keys, ctx.documents)
                o, probabilities, seen = core.of_run(by_row[0], by_key[0], index, seen, chosen)
                loss = core.loss_of(index, probabilities, seen, chosen)
            found = torch.autograd.grad(
                *((o, loss), (*by_row, *by_key)), (grad_outputs[0][:, rows], torch.full_like(loss, factor))
            )
            for whole, part in zip(of_rows, found[:3], strict=True):
                whole[:, rows] = part
            for place in (0, 1):
                of_keys[place] += found[3 + place]
            total += core.model.sparse.index_loss * loss.detach()
        core.routing.add(Statistics({}, {"index_loss": total}))
        of_latents, of_index = (each.to(q.dtype) for each in of_keys)
        return of_rows[0], of_latents, of_rows[1], of_index, of_rows[2], None, None, None
