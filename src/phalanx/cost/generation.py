"""Bytes of completions to train on (GRPO, generate/rollouts.py), beside training: the reference model, keys and values
of the texts that grow at once, and whole copies of parameters that ranks share.

Completions are taken to be as long as they may be, and prompts to fill the rest of the sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from phalanx.blocks.attention import cache_columns
from phalanx.blocks.kinds import BlockKind, half_block
from phalanx.config.job import GrpoOptions
from phalanx.cost.communication import place
from phalanx.cost.held import parameter_counts
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import Batch, gathers_parameters


class GenerationBytes(NamedTuple):
    """Bytes of a rank beside its state."""

    reference: float
    """The reference model: there all the time. What follows is there while completions are generated."""
    cache: float
    gathered: float
    """Whole copies of parameters that ranks share."""
    logits: float


def lengths(spec: StepSpec, options: GrpoOptions) -> tuple[int, int]:
    """Returns the tokens of a prompt and the new tokens of a completion, at most."""
    new = min(options.max_new_tokens, spec.model.seq_len)
    return spec.model.seq_len + 1 - new, new


def texts_of(spec: StepSpec, options: GrpoOptions) -> tuple[int, int]:
    """Returns the prompts that one group of ranks completes, and the texts that grow at once."""
    prompts = ceil(spec.batch.global_batch / options.group / (spec.layout.data_ranks * spec.layout.cp))
    return prompts, min(prompts * options.group, options.max_batch)


def position_bytes(spec: StepSpec, kind: BlockKind) -> float:
    """Returns the bytes that a layer's cache has per token on each tensor rank."""
    model, tp = spec.model, spec.layout.tp
    if kind.attention == "sparse":  # of all heads, on every rank
        return (model.mla.kv_rank + model.mla.rope_head_dim + model.sparse.index_head_dim) * spec.width
    if kind.attention == "delta":
        delta = model.delta
        keys = 2 * max(delta.key_heads, tp) * delta.key_head_dim
        return (keys + delta.n_heads * (delta.head_dim + 2)) / tp * spec.width
    cores = (operator.core for operator in half_block(place(spec), kind, "attention"))
    return sum(core.kv_heads * (core.head + core.value_head) for core in cores if core) * spec.width


def generation_bytes(
    spec: StepSpec, kinds: Iterable[tuple[BlockKind, int]], ends: tuple[bool, bool]
) -> GenerationBytes:
    """Returns the bytes of a rank with `kinds` of blocks, and embedding and head by `ends`; nothing without
    completions."""
    if not (options := spec.rollout):
        return GenerationBytes(0, 0, 0, 0)
    kinds, layout, whole = tuple(kinds), spec.layout, generating(spec, 1, 1)
    held = parameter_counts(spec.model, layout, kinds, *ends)
    experts = parameter_counts(spec.model, whole.layout, kinds, *ends).experts
    shards = layout.shard_ranks
    reference = spec.width * (held.trained_dense / shards + held.trained_experts / max(1, shards // layout.ep_shard))
    gathered = (held.dense if gathers_parameters(layout) else 0) + (experts if experts > held.experts else 0)
    texts = texts_of(spec, options)[1]
    prompt, new = lengths(spec, options)
    each = [(position_bytes(whole, kind), many) for kind, many in kinds]
    # One layer at a time moves when texts end: its new keys and values, and a copy of either on the way.
    positions = sum(size * many for size, many in each) + 1.5 * max((size for size, _ in each), default=0)
    logits = texts * spec.model.vocab_size * spec.width * (ends[1] or layout.pp > 1)
    cache = texts * cache_columns(prompt + new - 1, spec.model.seq_len) * positions
    return GenerationBytes(reference if options.beta else 0, cache, gathered * spec.width, logits)


def generating(spec: StepSpec, texts: int, tokens: int) -> StepSpec:
    """Returns the spec of a pass that generates: `tokens` of each of `texts`, with whole parameters."""
    layout = replace(
        spec.layout,
        dp_replicate=spec.layout.data_ranks * spec.layout.cp,
        dp_shard=1,
        cp=1,
        cp_ulysses=1,
        ep=1,
        ep_node=1,
        hpz=1,
        zero=1,
        sp=False,
        tiles=1,
        sp_regather=False,
        recompute="none",
        recompute_cut="",
        loss_chunk=0,
        offload="none",
        quantise_weights="none",
        quantise_gradients="none",
        micro_batch=texts,
        accumulation=1,
    )
    model = replace(spec.model, seq_len=tokens)
    batch = Batch(texts * layout.data_ranks, texts, 1, layout.data_ranks)
    return replace(spec, model=model, layout=layout, batch=batch, compared="", rollout=None)
