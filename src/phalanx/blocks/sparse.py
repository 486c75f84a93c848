"""Latent attention to the keys that an indexer chooses (DeepSeek-AI 2025, arXiv 2512.02556, section 2.1), and heads
whose output a gate multiplies (Qwen3-Next; Qiu et al. 2025, arXiv 2505.06708)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.blocks.attention import MOST_SCORES, TILED_ROWS, attention, latent_attention, visible_pairs
from phalanx.blocks.operator import PLAIN, WIDE, AttentionCore, FusedProducts, MemoryBound, Operator, Place, SavedTensor
from phalanx.blocks.residual import linear_weights
from phalanx.config.model import ModelConfig

WHOLE = PLAIN._replace(gradient="whole")
"""A weight of the indexer, which every tensor rank computes whole."""
INDEX_NORM_EPS = 1e-6
"""Added to the variance of the indexer's keys (transformers' DeepseekV32Indexer)."""


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
    of wkv_b, and the output by the values' half, as many FLOPs as keys and values made from latents. The latents of a
    sequence stay in the device's cache. The indexer scores every key before a query, and its gradients are those of the
    chosen ones."""
    model, mla, width = place.model, place.model.mla, place.width
    for operator in latent_attention(place):
        if operator.name == "wkv_b":
            latent = mla.kv_rank + mla.rope_head_dim
            yield replace(
                operator,
                saved=(
                    SavedTensor("queries", model.n_heads * latent * width, "width"),
                    SavedTensor("latents", latent * width, "whole", across=True),
                ),
            )
            yield from _indexer(place)
        elif operator.core:
            yield replace(operator, core=_chosen(place, operator.core), saved=_latent_output(place))
        else:
            yield operator


def _chosen(place: Place, core: AttentionCore) -> AttentionCore:
    """Returns the scores and values of the chosen keys: a query has as many as before it, `top_k` at most, like one
    with a window of that size."""
    mla, seq_len = place.model.mla, place.model.seq_len
    top_k = min(place.model.sparse.top_k, seq_len)
    pairs = 2 * visible_pairs(range(seq_len), top_k) - seq_len if top_k < seq_len else core.queries * seq_len
    return core._replace(pairs=pairs, kv_heads=1, head=mla.kv_rank + mla.rope_head_dim, value_head=mla.kv_rank)


def _latent_output(place: Place) -> tuple[SavedTensor, ...]:
    """Returns the output of every head in the latents' size, which its half of wkv_b reads."""
    model = place.model
    return (SavedTensor("latent output", model.n_heads * model.mla.kv_rank * place.width, "width"),)


def _indexer(place: Place) -> Iterator[Operator]:
    model, sparse, tokens, width = place.model, place.model.sparse, place.tokens, place.width
    heads, size = sparse.index_heads, sparse.index_head_dim
    outputs = heads * size
    yield Operator(
        "index_q",
        linear_weights("attn.index.wq", outputs, model.mla.q_rank or model.d_model, False, WHOLE),
        tokens,
        saved=(SavedTensor("index queries", outputs * width, "whole"),),
    )
    yield Operator(
        "index_k",
        (
            *linear_weights("attn.index.wk", size, model.d_model, False, WHOLE),
            *linear_weights("attn.index.weights", heads, model.d_model, False, WHOLE),
            *(WHOLE._replace(name=f"attn.index.norm.{part}", shape=(size,)) for part in ("weight", "bias")),
        ),
        tokens,
        memory_bound=(MemoryBound("index norm", 2 * tokens * size, 3 * tokens * size),),
        saved=(SavedTensor("index keys", (2 * size + heads) * width, "whole"),),
    )
    keys, chosen = model.seq_len / 2, min(sparse.top_k, model.seq_len / 2)  # on average
    # A score in fp32 is written, and read to choose; the chosen ones' gradients go back.
    yield Operator(
        "indexer",
        fused=FusedProducts(2 * tokens * model.seq_len * outputs, 4 * tokens * chosen * outputs, causal=True),
        memory_bound=(MemoryBound("indexer", 2 * WIDE / 2 * tokens * keys, WIDE * tokens * chosen, 3, 2),),
    )


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
