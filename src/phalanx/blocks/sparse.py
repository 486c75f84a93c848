"""Latent attention to the keys that an indexer chooses (DeepSeek-AI 2025, arXiv 2512.02556, section 2.1), and heads
whose output a gate multiplies (Qwen3-Next; Qiu et al. 2025, arXiv 2505.06708)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from math import prod

from phalanx.blocks.attention import MOST_SCORES, TILED_ROWS, attention, latent_attention
from phalanx.blocks.operator import (
    PLAIN,
    WIDE,
    AttentionCore,
    FusedProducts,
    MemoryBound,
    Message,
    Operator,
    Place,
    SavedTensor,
)
from phalanx.blocks.residual import INDEX, linear_weights
from phalanx.config.model import ModelConfig

WHOLE = PLAIN._replace(gradient="whole")
"""A weight of the indexer, which every tensor rank computes whole."""
INDEX_NORM_EPS = 1e-6
"""Added to the variance of the indexer's keys (transformers' DeepseekV32Indexer)."""

INDEX_SCORES = 2.25
"""Tensors of the scores of the indexer's heads: these, their gradient, and where they are above 0."""
CHOICE = 4
"""Bytes of a chosen key's number."""
SCORES, COPIES = 4, 2
"""Tensors of a run at once in the backward pass: of its scores and their gradients, and of the keys of each query, with
theirs."""


def sparse_rows(sequences: int, queries: int, heads: int, keys: int, model: ModelConfig) -> int:
    """Returns the queries of a run, of which all scores, and copies of the keys that they attend to, are in memory at
    once."""
    sparse, seen = model.sparse, keys_of_query(model, keys)
    each = max(heads * seen, sparse.index_heads * keys, seen * (model.mla.kv_rank + model.mla.rope_head_dim))
    return max(1, min(queries, MOST_SCORES // (sequences * each)))


def keys_of_query(model: ModelConfig, keys: int) -> int:
    """Returns the keys that a query is multiplied with, of `keys`: those that are chosen, or all."""
    return keys if model.warms_up else min(model.sparse.top_k, keys)


def sparse_attention(place: Place) -> Iterator[Operator]:
    """Yields the operators of latent attention to `sparse.top_k` keys per query.

    As in the paper, all heads share one key, the latent with its rotary part: queries are multiplied by the keys' half
    of wkv_b, and the output by the values' half, as many FLOPs as keys and values made from latents. The indexer scores
    every key before a query, and its gradients are those of the chosen ones. Context ranks gather latents and index
    keys; tensor ranks sum the heads' probabilities, from which the indexer learns."""
    model, mla, width = place.model, place.model.mla, place.width
    latent, keys = mla.kv_rank + mla.rope_head_dim, place.cp + _of_slices(place)
    operators = latent_attention(place)
    for operator in map(_beside_indexer, repeat(place), operators) if model.warms_up else operators:
        if operator.name == "wkv_b":
            yield replace(
                operator,
                # The halves are no layers of their own that tiles could cut.
                weights=tuple(weight._replace(tiled=False) for weight in operator.weights),
                saved=(
                    SavedTensor("wq_b", model.n_heads * model.head_size * width * (not model.freezes), "width"),
                    SavedTensor("queries", model.n_heads * latent * width, "width"),
                    SavedTensor("latents", latent * width * keys, "whole", across=True),
                ),
            )
            yield from _indexer(place, keys)
        elif operator.core:
            yield replace(
                operator,
                core=_chosen(place, operator.core),
                memory_bound=tuple(each for each in operator.memory_bound if each.name != "ring merge"),
                saved=_latent_output(place)[model.warms_up :],
                messages=tuple(_messages(place)),
                workspace=_workspace(place),
            )
        else:
            yield operator


def _beside_indexer(place: Place, operator: Operator) -> Operator:
    """Returns an operator of latent attention while the indexer alone is trained: the inputs that it shares with the
    indexer's matrices are saved for those, and the output of attention is not."""
    shared = {"wq_a": place.model.d_model, "wq": place.model.d_model, "wq_b": place.model.mla.q_rank}
    if operator.name not in shared:
        return replace(operator, saved=()) if operator.name == "wo" else operator
    size = shared[operator.name] * place.read
    again = place.repeats_input(size, regathered=False) if operator.name != "wq_b" else size
    (first, *rest) = operator.saved
    first = first._replace(size=first.size + size, cheap=first.cheap + again)
    return replace(operator, saved=(first, *rest))


def _of_slices(place: Place) -> float:
    """Returns how many times as many keys as a slice has are saved in one tensor with those of earlier slices."""
    n = place.slices
    return place.cp * ((n + 1) / 2 - 1 / n) if n > 1 else 0


def _chosen(place: Place, core: AttentionCore) -> AttentionCore:
    """Returns the scores and values of the chosen keys."""
    mla, keys = place.model.mla, keys_of_query(place.model, place.model.seq_len)
    return core._replace(
        pairs=core.queries * keys,
        chosen=keys < place.model.seq_len,
        kv_heads=1,
        head=mla.kv_rank + mla.rope_head_dim,
        value_head=mla.kv_rank,
        steps=1,
    )


def _latent_output(place: Place) -> tuple[SavedTensor, ...]:
    """Returns the output of every head in the latents' size, which its half of wkv_b reads, and the choice, of whole
    numbers of 32 bits."""
    model = place.model
    choice = _each_slice(place) * (keys_of_query(model, model.seq_len) < model.seq_len)
    return (
        SavedTensor("latent output", model.n_heads * model.mla.kv_rank * place.width, "width"),
        SavedTensor("choice", CHOICE * choice, "whole", inside=True),
    )


def _each_slice(place: Place) -> float:
    """Returns the keys that a query is multiplied with, on average over slices, each of which sees those before it."""
    seq_len, n = place.model.seq_len, place.slices
    return sum(keys_of_query(place.model, seq_len * number // n) for number in range(1, n + 1)) / n


def _messages(place: Place) -> Iterator[Message]:
    """Yields the messages of context ranks, which gather what keys are made of, and of tensor ranks, which sum the
    heads' probabilities of the keys of each query."""
    model = place.model
    latent = model.mla.kv_rank + model.mla.rope_head_dim
    for size in (latent, model.sparse.index_head_dim) if place.cp > 1 else ():
        whole = place.tokens * place.cp * size
        yield Message("cp", "all_gather", whole, forward=1, full=1)
        yield Message("cp", "reduce_scatter", whole, backward=1)
    if place.tp > 1:
        yield Message("tp", "all_reduce", place.tokens * _each_slice(place), "wide", backward=1)


def _workspace(place: Place) -> float:
    """Returns the bytes in the backward pass of a run of queries, and of the gradients of queries and keys."""
    model, sparse, width, wide = place.model, place.model.sparse, place.width, max(place.width, WIDE)
    heads, latent = model.n_heads // place.tp, model.mla.kv_rank + model.mla.rope_head_dim
    keys, queries = model.seq_len, model.seq_len // place.cp // place.slices
    chosen = keys_of_query(model, keys)
    rows = sparse_rows(place.sequences, queries, heads, keys, model)
    of_queries = queries * (heads * latent + sparse.index_heads * (sparse.index_head_dim + 1)) * width
    of_keys = keys * (latent + sparse.index_head_dim) * wide
    copies = COPIES * chosen * latent * width if chosen < keys else 0
    own = chosen * (latent + 2 * sparse.index_head_dim) * width if chosen < keys else 0
    attended = SCORES * heads * chosen * wide + copies
    learned = (heads + INDEX_SCORES * sparse.index_heads + SCORES) * chosen * wide + own
    run = rows * max(attended, learned)
    # Beside an output that is saved, its gradient and a run's scaled queries take no more than it has left.
    beside = heads * (queries * model.mla.kv_rank + rows * latent) * width * model.warms_up
    return place.sequences * (of_queries + of_keys + run + beside)


def _indexer(place: Place, gathered: float) -> Iterator[Operator]:
    """Yields the operators of the indexer, whose keys are saved `gathered` times."""
    model, sparse, tokens, width = place.model, place.model.sparse, place.tokens, place.width
    heads, size = sparse.index_heads, sparse.index_head_dim
    outputs = heads * size
    yield Operator(
        "index_q",
        linear_weights(f"{INDEX}wq", outputs, model.mla.q_rank or model.d_model, False, WHOLE),
        tokens,
        saved=(SavedTensor("index queries", outputs * width, "whole"),),
        detached=True,
    )
    yield Operator(
        "index_k",
        (
            *linear_weights(f"{INDEX}wk", size, model.d_model, False, WHOLE),
            *linear_weights(f"{INDEX}weights", heads, model.d_model, False, WHOLE),
            *(WHOLE._replace(name=f"{INDEX}norm.{part}", shape=(size,)) for part in ("weight", "bias")),
        ),
        tokens,
        memory_bound=(MemoryBound("index norm", 2 * tokens * size, 3 * tokens * size),),
        saved=(
            SavedTensor("index norm", (size + heads) * width, "whole"),
            SavedTensor("index keys", size * width * gathered, "whole", across=True),
        ),
        detached=True,
    )
    keys, chosen = model.seq_len / 2, min(keys_of_query(model, model.seq_len), model.seq_len / 2)  # on average
    # A score in fp32 is written, and read to choose; the chosen ones are computed again, and their gradients go back.
    yield Operator(
        "indexer",
        fused=FusedProducts(2 * tokens * model.seq_len * outputs, 6 * tokens * chosen * outputs, causal=True),
        memory_bound=(MemoryBound("indexer", 2 * WIDE / 2 * tokens * keys, WIDE * tokens * chosen, 3, 2),),
    )


def flops_beyond(model: ModelConfig) -> int:
    """Returns the FLOPs of a layer over a sequence that its program computes beyond what counts: scores again in the
    backward pass, and the sums over the indexer's heads; less its scores where all keys are chosen."""
    sparse, seq_len = model.sparse, model.seq_len
    heads, size, keys = sparse.index_heads, sparse.index_head_dim, keys_of_query(model, seq_len)
    again = model.n_heads * (model.mla.kv_rank + model.mla.rope_head_dim) + heads * (size + 2)
    scored = heads * seq_len if keys < seq_len else -heads * size * seq_len
    return 2 * seq_len * (keys * again + scored)


def unneeded_flops(model: ModelConfig, halves: bool) -> int:
    """Returns the FLOPs of gradients that a layer does not need, over a sequence: of the indexer's inputs, and of the
    scores of keys that are not chosen. `halves`: without what a causal mask hides."""
    seq_len, sparse = model.seq_len, model.sparse
    scores = seq_len * (seq_len // (1 + halves)) - seq_len * keys_of_query(model, seq_len)
    weights = (weight for each in _indexer(Place(model), 1) for weight in each.weights if weight.is_matrix)
    matrices = seq_len * sum(prod(weight.shape) for weight in weights)
    return 2 * matrices + 4 * max(0, scores) * sparse.index_heads * sparse.index_head_dim


def gated_attention(place: Place) -> Iterator[Operator]:
    """Yields the operators of multi-head attention whose output is multiplied by the sigmoid of a projection of the
    input, element by element."""
    model, width = place.model, place.width
    outputs = model.n_heads * model.head_size
    numbers = place.tokens * outputs // place.tp
    gate = linear_weights("attn.wg", outputs, model.d_model, model.bias or model.qkv_bias, TILED_ROWS)
    for operator in attention(place):
        if operator.name == "wo":
            yield Operator(
                "gate",
                memory_bound=(MemoryBound("gate", 3 * numbers, 5 * numbers, 2, cheap=True),),
                saved=(SavedTensor("gate", 2 * outputs * width, "width"),),
            )
        yield replace(operator, weights=(*operator.weights, *gate)) if operator.name == "qkv" else operator
