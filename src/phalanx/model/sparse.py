"""Latent attention to the keys that an indexer chooses (DeepSeek-AI 2025, arXiv 2512.02556, section 2).

The indexer scores every earlier key of a query: I = Σ_h w_h ReLU(q_h · k), with a few narrow heads that share one key.
The query attends to the `top_k` keys with the highest scores; of equal scores the earlier key comes first, so that the
choice depends on no layout. All heads read one vector per token, the latent with its rotary part: wkv_b's half for keys
multiplies the queries, its half for values the output.

The choice has no gradient. The indexer learns from inputs without one: its loss is KL(p || softmax(I)), summed over
queries but padding, where p is the mean of the heads' probabilities. In the sparse stage both are over the chosen keys,
and everything is trained; in the dense stage over all, and the indexer alone is trained. The backward pass computes and
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
from phalanx.model.documents import Conversations, Documents
from phalanx.model.layers import Linear, rotate, uncompiled
from phalanx.model.moe import Routing, Statistics
from phalanx.model.seeding import Noise


class IndexTensors(NamedTuple):
    """The indexer's output."""

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
        self.core, self.wo = ChosenAttention(model, layer), out  # pyrefly: ignore[bad-override-mutable-attribute]

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None = None,
        conversations: Conversations | None = None,
    ) -> Tensor:
        """Computes attention, (batch, seq, d_model) to the same shape. The indexer learns from all queries but the
        padding of `conversations`."""
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
        real = None if conversations is None else conversations.real
        o = self.core(q, latents, index, cache, documents, real)
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

    def forward(  # pyrefly: ignore[bad-override-param-name]
        self,
        q: Tensor,
        latents: Tensor,
        index: IndexTensors,
        cache: KeysAndValues | None,
        documents: Documents | None,
        real: Tensor | None,
    ) -> Tensor:
        """Runs `attend` for all keys of the layer, those of the cache among them."""
        gathered, index_keys = self.keys_of(latents, index.keys, cache)
        return self.run(self.attend, q, gathered, index.queries, index_keys, index.weights, documents, real)

    @uncompiled
    def keys_of(self, latents: Tensor, keys: Tensor, cache: KeysAndValues | None) -> tuple[Tensor, Tensor]:
        """Returns latents and index keys of all tokens so far, (batch, keys, ...) both."""
        latents, keys = self.gather(latents), self.gather(keys)
        if cache is None:
            return latents, keys
        every, every_key = cache.extend(self.layer, latents.unsqueeze(1), keys.unsqueeze(1))
        return every.squeeze(1), every_key.squeeze(1)

    @uncompiled
    def attend(  # pyrefly: ignore[bad-override]
        self,
        q: Tensor,
        latents: Tensor,
        index_queries: Tensor,
        index_keys: Tensor,
        weights: Tensor,
        documents: Documents | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """Maps `q` (batch, seq, heads, size) to (batch, seq, heads, kv_rank), over `latents` (batch, keys, size); the
        indexer learns from the queries that are `real` (batch, seq), by default all."""
        places = self.places(q.shape[1], q.device) + latents.shape[1]
        return _Chosen.apply(q, latents, index_queries, index_keys, weights, self, places, documents, real)

    def seen(self, places: Tensor, keys: int, documents: Documents | None) -> Tensor:
        """Returns which of `keys` keys the queries at `places` see, (batch or 1, queries, keys)."""
        mask = visible(places, torch.arange(keys, device=places.device), 0, documents)
        return mask.view(-1, *mask.shape[-2:])

    def choose(self, index: IndexTensors, seen: Tensor) -> Tensor:
        """Returns the keys that queries attend to, (batch, queries, top_k) of int32: those with the highest scores,
        and for a query with fewer some that it does not see."""
        scores = index_scores(index._replace(keys=index.keys.unsqueeze(1)))[0].masked_fill_(~seen, float("-inf"))
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.model.sparse.top_k].int()

    def probabilities(self, q: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """Returns those of `q` (batch, queries, heads, size), scaled, over `keys` (batch, 1 or queries, keys, size),
        of which queries see `seen` (batch or 1, queries, keys): (batch, queries, heads, keys), in at least fp32."""
        scores = _meet(q, keys.mT).to(torch.promote_types(q.dtype, torch.float32))
        return scores.masked_fill_(~seen.unsqueeze(2), float("-inf")).softmax(-1)

    def learn(
        self, index: IndexTensors, target: Tensor, seen: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the indexer's loss of a run of queries, with its coefficient, whose probabilities are to be `target`
        (batch, queries, keys), and the gradients of its queries, keys and weights, in their shapes. Queries that are
        not `real` (batch, queries) do not count."""
        scores, of_heads = index_scores(index)
        logs = scores.masked_fill_(~seen, float("-inf")).log_softmax(-1)
        coefficient = self.model.sparse.index_loss
        # Where nothing is seen both are zero, and so is their product.
        each = torch.xlogy(target, target) - target * logs.masked_fill(~seen, 0.0)
        of_scores = logs.exp_().sub_(target).mul_(coefficient * self.routing.factor)
        if real is not None:
            each, of_scores = (x.mul_(real.unsqueeze(-1)) for x in (each, of_scores))
        loss = coefficient * each.sum()
        of_weights = (of_heads @ of_scores.unsqueeze(-1)).squeeze(-1)
        of_each = (index.weights.to(of_scores.dtype).unsqueeze(-1) * of_scores.unsqueeze(2)).mul_(of_heads > 0)
        of_each = of_each.to(index.queries.dtype)
        of_keys = _fold(of_each, index.keys).mT @ _fold(index.queries, index.keys)
        return loss, _meet(of_each, index.keys), of_keys, of_weights.to(of_each.dtype)

    def runs(self, q: Tensor, keys: int) -> Iterator[slice]:
        """Yields runs of queries, as many as fit in memory at once."""
        batch, seq, heads, _ = q.shape
        rows = sparse_rows(batch, seq, heads, keys, self.model)
        return (slice(start, start + rows) for start in range(0, seq, rows))


def index_scores(index: IndexTensors) -> tuple[Tensor, Tensor]:
    """Returns the scores of keys (batch, 1 or seq, keys, index_head_dim): (batch, seq, keys), and those of each head,
    (batch, seq, index_heads, keys), both in at least fp32."""
    wide = torch.promote_types(index.queries.dtype, torch.float32)
    each = _meet(index.queries, index.keys.mT).to(wide).relu_()
    return (index.weights.to(wide).unsqueeze(2) @ each).squeeze(2), each


def _meet(x: Tensor, y: Tensor) -> Tensor:
    """Returns x y of `x` (batch, seq, heads, inner) and `y` (batch, 1 or seq, inner, width): (batch, seq, heads,
    width)."""
    return (_fold(x, y) @ y).view(*x.shape[:3], y.shape[-1])


def _fold(x: Tensor, like: Tensor) -> Tensor:
    """Returns the heads of `x` (batch, seq, heads, width) that meet the same of `like` (batch, 1 or seq, ...), in one
    dimension."""
    return x.reshape(len(x), like.shape[1], -1, x.shape[-1])


def _rows(chosen: Tensor, keys: int) -> Tensor:
    """Returns where the keys `chosen` (batch, seq, top_k) stand among those of all sequences."""
    return chosen.long() + torch.arange(len(chosen), device=chosen.device)[:, None, None] * keys


def _taken(x: Tensor, chosen: Tensor | None) -> Tensor:
    """Returns the rows `chosen` (batch, seq, top_k) of `x` (batch, keys, width), or all: (batch, seq or 1, top_k or
    keys, width)."""
    return x.unsqueeze(1) if chosen is None else F.embedding(_rows(chosen, x.shape[1]), x.reshape(-1, x.shape[-1]))


def _add_taken(total: Tensor, gradient: Tensor, chosen: Tensor | None) -> None:
    """Adds the gradient of what `_taken` returned to `total` (batch, keys, width), on a GPU too in the same order in
    every run, as an index_add is not."""
    if chosen is not None:
        rows, keys = _rows(chosen, total.shape[1]), total.shape[0] * total.shape[1]
        gradient = torch.ops.aten.embedding_dense_backward(gradient, rows, keys, -1, False)
    total += gradient.view_as(total)


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
        real: Tensor | None,
    ) -> Tensor:
        rank, keys, choices = core.model.mla.kv_rank, latents.shape[1], list[Tensor]()
        o = q.new_empty(*q.shape[:3], rank)
        chooses = keys_of_query(core.model, keys) < keys
        for rows in core.runs(q, keys):
            seen, chosen = core.seen(places[rows], keys, documents), None
            if chooses:
                chosen = core.choose(IndexTensors(index_queries[:, rows], index_keys, weights[:, rows]), seen)
                choices.append(chosen)
            each = _taken(latents, chosen)
            probabilities = core.probabilities(q[:, rows] * core.scale, each, _of_chosen(seen, chosen))
            o[:, rows] = _meet(probabilities.to(q.dtype), each[..., :rank])
        ctx.core, ctx.places, ctx.documents, ctx.real = core, places, documents, real
        choice = torch.cat(choices, 1) if choices else None
        ctx.save_for_backward(q, latents, index_queries, index_keys, weights, choice)
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, latents, index_queries, index_keys, weights, choice = ctx.saved_tensors
        core: ChosenAttention = ctx.core
        keys, rank, wide = latents.shape[1], core.model.mla.kv_rank, torch.promote_types(q.dtype, torch.float32)
        of_q, of_index_q, of_weights = (torch.empty_like(each) for each in (q, index_queries, weights))
        of_latents, of_index = (torch.zeros_like(each, dtype=wide) for each in (latents, index_keys))
        total = torch.zeros((), dtype=torch.float64, device=q.device)
        for rows in core.runs(q, keys):
            chosen = None if choice is None else choice[:, rows]
            seen = _of_chosen(core.seen(ctx.places[rows], keys, ctx.documents), chosen)
            each, query, gradient = _taken(latents, chosen), q[:, rows] * core.scale, grad_outputs[0][:, rows]
            probabilities = core.probabilities(query, each, seen)
            target = probabilities.sum(2)
            core.sum_heads(target)
            index = IndexTensors(index_queries[:, rows], _taken(index_keys, chosen), weights[:, rows])
            real = None if ctx.real is None else ctx.real[:, rows]
            loss, *of_run = core.learn(index, target.div_(core.n_heads), seen, real)
            of_index_q[:, rows], of_index_keys, of_weights[:, rows] = of_run
            total += loss
            _add_taken(of_index, of_index_keys, chosen)
            del index, of_run, of_index_keys
            of_scores = _meet(gradient, each[..., :rank].mT).to(wide)
            of_scores.sub_((of_scores * probabilities).sum(-1, keepdim=True)).mul_(probabilities)
            of_scores = of_scores.to(q.dtype)
            of_q[:, rows] = _meet(of_scores, each) * core.scale
            of_each = (_fold(of_scores, each).mT @ _fold(query, each)).flatten(0, 1)
            used, given = _fold(probabilities.to(q.dtype), each), _fold(gradient, each)
            of_each[..., :rank].baddbmm_(used.mT.flatten(0, 1), given.flatten(0, 1))
            del each, probabilities, of_scores, used, given
            _add_taken(of_latents, of_each, chosen)
        queries = torch.full_like(total, q.shape[0] * q.shape[1]) if ctx.real is None else ctx.real.sum().to(total)
        core.routing.add(Statistics({}, {"index_loss": total, "index_queries": queries}))
        return of_q, of_latents.to(q.dtype), of_index_q, of_index.to(q.dtype), of_weights, None, None, None, None


def _of_chosen(seen: Tensor, chosen: Tensor | None) -> Tensor:
    """Returns which of the keys `chosen` (batch, queries, top_k) are `seen` (batch or 1, queries, keys)."""
    return seen if chosen is None else seen.expand(len(chosen), -1, -1).gather(-1, chosen.long())
