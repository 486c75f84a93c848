"""Attention: multi-head, grouped or multi-query (Ainslie et al. 2023), and multi-head latent (DeepSeek-V2, section
2.1).

Tensor ranks hold whole heads, and copies of key/value heads if there are fewer of them than ranks. Context-parallel
ranks hold a part of every sequence: keys and values travel around a ring in the forward pass, and again in the backward
pass with their gradients in fp32 (Liu et al. 2023), or with a window only the last ones to the few positions that see
them; Ulysses exchanges tokens for heads of queries, keys, values and the output (Jacobs et al. 2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Literal, NamedTuple

from phalanx.blocks.operator import PLAIN, WIDE, AttentionCore, MemoryBound, Message, Operator, Place, SavedTensor
from phalanx.blocks.residual import enter, leave, linear_weights, norm_kernels, norm_saved, norm_weights, saved_input

FIRST_COLUMNS, SPARE_COLUMNS = 256, 64
"""Columns of a KV cache at first, within its capacity, then twice as many, and so on; and those before all sequences,
which rewinding may leave, that are tolerated before all move left."""


def cache_columns(tokens: int, capacity: int) -> int:
    """Returns the columns of a KV cache that has grown to so many tokens."""
    found = FIRST_COLUMNS
    while found < tokens:
        found *= 2
    return min(found, capacity + SPARE_COLUMNS)


LEAST_RUN = 128
"""Fewest queries that are computed in one call, where there are as many."""
CAPPED_RUNS = 8
"""Runs of queries in which capped or masked scores of whole sequences are computed: an eighth of a sequence sees on
average half of the keys, and a sixteenth more."""
MOST_CAPPED_SCORES = 2**24
"""Most capped scores per sequence, of all heads on a rank, that are in memory at once; longer runs are divided."""
MOST_MASKED = 2**25
"""Most elements per sequence of the mask of a run without a window; longer runs are divided."""
MOST_SCORES = 2**26
"""Most scores of a micro-batch that are in memory at once where they are computed step by step."""
DRAWN = 2
"""Random bytes per element of a dropout mask, which are there for one sequence at a time (model/seeding.py)."""
CAPPED_TENSORS = 3
"""Tensors of capped scores at once in the backward pass: probabilities, their gradient, and the slope of the cap."""


def window_run(window: int, least: int = LEAST_RUN) -> int:
    """Returns the queries of a run with a window: a quarter of it, so that a run reads at most five keys for four that
    a query sees."""
    return max(least, window // 4)


def whole_run(queries: int, keys: int, least: int = LEAST_RUN) -> int:
    """Returns the queries of a run without a window, of `queries` in all, which see up to `keys` keys."""
    return max(1, min(max(least, -(-queries // CAPPED_RUNS)), MOST_MASKED // keys))


def largest_run(seq_len: int, ring: int, window: int, slices: int = 1) -> tuple[int, int]:
    """Returns the queries and the keys of the largest run on a rank, of sequences that a ring cuts (1: no ring) and
    that pass in slices."""
    if window:
        chunk = seq_len if ring == 1 else seq_len // (2 * ring)
        rows = chunk if chunk <= window else min(chunk, window_run(window))
        return rows, min(chunk, rows + window - 1)
    keys, queries = seq_len // ring, seq_len // ring // slices
    return min(queries, whole_run(queries, keys)) if ring == 1 else queries, keys


def capped_scores(heads: int, seq_len: int, ring: int, window: int) -> tuple[int, int]:
    """Returns the queries of the largest run, and the capped scores per sequence that it has in memory at once, on a
    rank with `heads` heads of sequences that a ring cuts (1: no ring)."""
    rows, keys = largest_run(seq_len, ring, window)
    rows = max(1, min(rows, MOST_CAPPED_SCORES // (heads * keys)))
    return rows, heads * rows * keys


def zigzag_runs(tokens: int, ring: int, position: int) -> list[range]:
    """Returns the tokens of a ring position, of sequences of `tokens` tokens."""
    if ring == 1:
        return [range(tokens)]
    chunk, mirror = tokens // (2 * ring), 2 * ring - 1 - position
    return [range(position * chunk, (position + 1) * chunk), range(mirror * chunk, (mirror + 1) * chunk)]


def sliced_runs(tokens: int, ring: int, position: int, slices: int) -> list[range]:
    """Returns the same of sequences of `slices` slices of `tokens` tokens each, every one of which is cut in
    zig-zag."""
    runs = zigzag_runs(tokens, ring, position)
    return [range(start + run.start, start + run.stop) for start in range(0, slices * tokens, tokens) for run in runs]


def reached(keys: range, queries: Sequence[range], window: int) -> range:
    """Returns the keys of a run that queries of other runs see under a causal mask and a window (0: all keys): the last
    ones, as many as the nearest later run reaches."""
    later = [run.start for run in queries if run.start > keys.start]
    if not later:
        return range(keys.stop, keys.stop)
    first = max(keys.start, min(later) - window + 1) if window else keys.start
    return range(min(first, keys.stop), keys.stop)


def reached_runs(tokens: int, ring: int, slices: int, window: int, position: int, source: int) -> list[range]:
    """Returns, for the runs of keys of position `source` in `slices` slices of `tokens` tokens, those that the queries
    of `position` in the last slice see; runs may be empty."""
    queries = sliced_runs(tokens, ring, position, slices)[-2:]
    return [reached(run, queries, window) for run in sliced_runs(tokens, ring, source, slices)]


@lru_cache(4096)
def ring_hops(tokens: int, ring: int, slices: int, window: int) -> tuple[int, ...]:
    """Returns the distances over which some position sends keys to one after it, in the last of `slices` slices."""
    return tuple(
        hops
        for hops in range(1, ring)
        if any(
            any(reached_runs(tokens, ring, slices, window, (source + hops) % ring, source)) for source in range(ring)
        )
    )


class RingKeys(NamedTuple):
    """Keys per sequence that one position sends to the others, and gets from them, in its messages' order: to and from
    the next positions and those before, by distance. Slices of a sequence send separately."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


@lru_cache(4096)
def ring_keys(seq_len: int, ring: int, slices: int, window: int, position: int | None = None) -> RingKeys:
    """Returns the keys of the messages, none of them empty, of a layer with a window; for no `position` those of the
    one that sends most keys if sequences have one slice."""
    if position is None:
        ends = {0, min(1, ring - 1), ring // 2, ring - 1}
        return max(
            (ring_keys(seq_len, ring, slices, window, end) for end in sorted(ends)), key=lambda keys: sum(keys.sent)
        )
    tokens = seq_len // slices
    others = [(position + hops) % ring for hops in range(1, ring)]

    def counted(at: int, source: int, seen: int) -> int:
        return sum(map(len, reached_runs(tokens, ring, seen, window, at, source)))

    so_far = range(1, slices + 1)
    sent = (counted(other, position, seen) for seen in so_far for other in others)
    received = (counted(position, other, seen) for seen in so_far for other in reversed(others))
    return RingKeys(tuple(filter(None, sent)), tuple(filter(None, received)))


ROWS = PLAIN._replace(cut="rows")
TILED_ROWS, TILED_COLUMNS = (PLAIN._replace(cut=cut, tiled=True) for cut in ("rows", "columns"))
PARTIAL = PLAIN._replace(gradient="partial")
"""A compression weight: whole on every tensor rank, each of which computes its heads' part of the gradient."""
ROTARY_KERNELS, HEADS_KERNELS = 6, 4
MASK = 1
"""Bytes per element of a mask, beside the numbers that the kernel adds to the scores."""
SQUARES = 2
"""Numbers per token that a norm over all heads sums over the tensor ranks: of queries and of keys."""


def attention(place: Place) -> Iterator[Operator]:
    """Yields the operators of multi-head, grouped-query or multi-query attention."""
    model, width = place.model, place.width
    bias = model.bias or model.qkv_bias
    queries, keys = model.n_heads * model.head_size, model.kv_heads * model.head_size
    heads = TILED_ROWS._replace(unit=model.head_size)
    read = saved_input(place, "attention", "attn.wq", "attn.wk", "attn.wv")
    # Ranks that share the heads hold copies if there are fewer key heads.
    spread = max(model.kv_heads, place.tp * place.ulysses) * model.head_size
    # Norms of heads and rotary positions; with Ulysses the exchange saves its own results.
    normed = model.qk_norm != "none" and (model.qk_norm != "unit" or model.positions == "rope")
    again = normed and model.qk_norm != "width" and place.ulysses == 1
    if model.sinks:
        yield Operator("sinks", (ROWS._replace(name="attn.sinks", shape=(model.n_heads,)),))
    yield Operator(
        "qkv",
        (
            *linear_weights("attn.wq", queries, model.d_model, bias, TILED_ROWS),
            *linear_weights("attn.wk", keys, model.d_model, bias, heads),
            *(() if model.values_are_keys else linear_weights("attn.wv", keys, model.d_model, bias, heads)),
        ),
        place.tokens,
        saved=(
            SavedTensor(
                "wq, wk, wv", model.d_model * read, "gathered", cheap=place.repeats_input(model.d_model * read)
            ),
            SavedTensor("queries", queries * width, "width", cheap=queries * width * again),
            SavedTensor(
                *("keys, values", 2 * spread * width, "width"),
                cheap=spread * width * ((again + (model.v_norm and place.ulysses == 1)) if place.slices == 1 else 0),
                across=True,
            ),
            *_of_all_slices(place, 2 * spread * width, 2 * queries * width),
        ),
        results=(SavedTensor("wq, wv", (queries + model.kv_heads * model.v_head_size) * width, "width"),),
        messages=tuple(enter(place, regather=bool(read))),
    )
    if normed:
        yield _query_key_norm(place)
    if model.v_norm:
        yield _value_norm(place, shared=model.values_are_keys and normed)
    yield _core(place, max(1, model.kv_heads // place.tp), turns_again=normed and model.qk_norm != "width")
    yield _output(place)


def shared_attention(place: Place) -> Iterator[Operator]:
    """Yields the operators of a layer that attends to keys and values of an earlier one, which saves them."""
    of_keys = ("attn.wk.", "attn.wv.", "attn.k_norm.")
    for operator in attention(place):
        weights = tuple(weight for weight in operator.weights if not weight.name.startswith(of_keys))
        if operator.name == "qkv":
            saved = tuple(each for each in operator.saved if not each.across)
            results = (SavedTensor("wq", place.model.n_heads * place.model.head_size * place.width, "width"),)
            yield replace(operator, weights=weights, saved=saved, results=results)
        elif operator.name == "qk_norm":
            yield replace(_query_key_norm(place, keys=False), weights=weights)
        elif operator.core:
            model, heads = place.model, place.model.n_heads // place.tp
            part = heads / (heads + max(1, model.kv_heads // place.tp))
            turned = (
                each._replace(forward=each.forward * part, backward=each.backward * part)
                if each.name == "rotary"
                else each
                for each in operator.memory_bound
            )
            yield replace(operator, memory_bound=tuple(turned))
        elif operator.name != "v_norm":
            yield operator


def latent_attention(place: Place) -> Iterator[Operator]:
    """Yields the operators of multi-head latent attention as in DeepSeek-V3's released model. One rotary key serves all
    heads, so it comes straight from the input beside the compressed keys and values."""
    model, mla, width, profile = place.model, place.model.mla, place.width, place.profile
    bias = model.bias or model.qkv_bias
    spread = "tokens" if profile.routes_shards else "whole"
    heads, tokens = model.n_heads * model.head_size, place.tokens
    entering = tuple(enter(place))
    first = ("wq_a" if mla.q_rank else "wq", "wkv_a")
    read = saved_input(place, "attention", *(f"attn.{name}" for name in first))
    size = model.d_model * read
    inputs = (SavedTensor(", ".join(first), size, spread, cheap=place.repeats_input(size, regathered=False)),)
    if mla.q_rank:
        yield Operator(
            "wq_a",
            linear_weights("attn.wq_a", mla.q_rank, model.d_model, bias, PARTIAL),
            tokens,
            saved=inputs,
            messages=entering,
        )
        yield _compressed_norm(place, "q_norm", mla.q_rank)
        yield Operator(
            "wq_b",
            linear_weights("attn.wq_b", heads, mla.q_rank, bias, TILED_ROWS),
            tokens,
            saved=(
                _normed_saved(
                    *(place, "q_norm, wq_b", spread, mla.q_rank, mla.q_rank),
                    saved_input(place, "attention", "attn.wq_b"),
                ),
            ),
        )
    else:
        yield Operator(
            "wq",
            linear_weights("attn.wq", heads, model.d_model, bias, TILED_ROWS),
            tokens,
            saved=inputs,
            messages=entering,
        )
    rank, parts = mla.kv_rank, mla.nope_head_dim + mla.v_head_dim
    yield Operator(
        "wkv_a",
        linear_weights("attn.wkv_a", rank + mla.rope_head_dim, model.d_model, bias, PARTIAL),
        tokens,
        saved=(_normed_saved(place, "kv_norm", spread, rank, rank + mla.rope_head_dim),),
    )
    yield _compressed_norm(place, "kv_norm", rank)
    values = mla.v_head_dim + (0 if profile.values_apart else mla.nope_head_dim)
    compressed = rank * saved_input(place, "attention", "attn.wkv_b")
    again = place.slices == 1 and place.ulysses == 1
    yield Operator(
        "wkv_b",
        linear_weights("attn.wkv_b", model.n_heads * parts, rank, bias, TILED_ROWS),
        tokens,
        saved=(
            SavedTensor("wkv_b", compressed, spread, cheap=compressed),
            SavedTensor("queries", heads * width, "width"),
            SavedTensor("keys", heads * width, "width", cheap=heads * width * again, across=True),
            SavedTensor("values", model.n_heads * width * values, "width", across=True),
            *_of_all_slices(place, *2 * [(heads + model.n_heads * mla.v_head_dim) * width]),
        ),
        results=(SavedTensor("wq, wv", (heads + model.kv_heads * model.v_head_size) * width, "width"),),
    )
    joined = 4 * tokens * (model.n_heads // place.tp) * model.head_size
    # Keys join a part with positions, the same for all heads, and a part without.
    yield _core(
        *(place, model.n_heads // place.tp),
        MemoryBound("heads", joined, joined, HEADS_KERNELS, cheap=True),
        turns_again=True,
    )
    yield _output(place)


def _of_all_slices(place: Place, own: int, of_heads: int) -> Iterator[SavedTensor]:
    """Yields the keys and values that attention saves beside a slice's `own` bytes per token, which later slices read:
    from the second slice of a sequence on, those of all slices up to it in one tensor; and without the fused kernel
    those of each head, `of_heads`, where heads share keys."""
    n, apart = place.slices, of_heads > own
    joined = (n + 1) / 2 - 1 / n
    if saves_scores(place):
        copies = of_heads * (n + 1) / 2 if apart else own / n
        yield SavedTensor("keys, values of each head", copies - (own if n == 1 else 0), "width", inside=True)
    if n > 1 and not (apart and saves_scores(place)):
        yield SavedTensor("keys, values of all slices", own * joined, "width")


def visible_pairs(queries: range, window: int = 0) -> int:
    """Returns the number of (query, key) pairs of the queries at some positions under a causal mask: a query sees the
    last `window` keys up to its own (0: all)."""
    return _pairs_before(queries.stop, window) - _pairs_before(queries.start, window)


def _pairs_before(position: int, window: int) -> int:
    """Returns the number of such pairs of all queries before a position."""
    growing = min(position, window) if window else position
    return growing * (growing + 1) // 2 + (position - growing) * window


def saves_scores(place: Place) -> bool:
    """Returns whether attention saves its probabilities. Ring attention recomputes those of each of its blocks."""
    if place.ring > 1:
        return False
    scores = place.profile.scores
    return scores == "always" or (scores == "dropout" and place.model.dropout > 0)


def drops(place: Place) -> bool:
    """Returns whether attention draws a mask over its probabilities, step by step without a fused kernel."""
    return place.model.dropout > 0 and place.profile.scores == "dropout"


def caps_in_runs(place: Place) -> bool:
    """Returns whether attention has capped scores in memory run by run. Flash attention caps them inside its kernel;
    unfused attention saves them all."""
    return place.model.attention_softcap > 0 and place.profile.scores == "dropout" and not saves_scores(place)


def _workspace(place: Place, heads: int, kv_heads: int) -> float:
    """Returns the bytes in the backward pass of a run's capped or dropped scores, or of its mask, of the gradients of
    queries, keys, values and output, and of a run's parts of these; 0 where a fused kernel computes all runs at once.

    With dropout, random numbers for a sequence of all heads may take more. Where the scores are saved, their gradient
    comes beside them; on a ring the probabilities and their gradient, or what meets the values, beside the mask of all
    keys and its part for one place's."""
    model, width, wide = place.model, place.width, max(place.width, WIDE)
    heads, kv_heads = heads // place.ulysses, max(kv_heads, place.ulysses) // place.ulysses
    keys = model.seq_len // place.ring
    tokens, pairs = keys // place.slices, heads * keys // place.slices * keys
    drawn = DRAWN * model.n_heads * model.seq_len**2
    if saves_scores(place) and drops(place):
        scores = place.sequences * pairs * width
        return max(scores + place.sequences * 2 * tokens * heads * model.v_head_size * width, drawn - scores)
    masked = place.documents or place.slices > 1
    masks, arriving = 0, 0
    if place.ring > 1 and drops(place):
        rows = max(1, min(tokens, MOST_SCORES // (place.sequences * heads * keys)))
        masks, arriving = (
            pairs * (1 + place.ring) * MASK,
            2 * keys * kv_heads * (model.head_size + model.v_head_size) * width,
        )
        made = heads * rows * keys * (2 * wide + (width if width < wide else 0)) + masks
    elif caps_in_runs(place):
        rows, scores = capped_scores(heads, model.seq_len, place.ring, place.window)
        made = CAPPED_TENSORS * scores * wide
    elif masked and place.profile.masks == "runs" and place.ring == 1 and not saves_scores(place):
        rows, seen = largest_run(model.seq_len, place.ring, place.window, place.slices)
        made = rows * seen * (MASK + width)
    elif place.ring > 1:
        return place.sequences * _ring_gradients(place, tokens, keys, heads, kv_heads)
    else:
        return 0.0
    of_queries = heads * (model.head_size + model.v_head_size) * width
    of_keys = kv_heads * (model.head_size + model.v_head_size) * wide
    inside = made + arriving + (tokens + 2 * rows) * of_queries + 2 * keys * of_keys
    return max(place.sequences * inside, masks and place.sequences * masks + drawn)


def _ring_gradients(place: Place, tokens: int, keys: int, heads: int, kv_heads: int) -> float:
    """Returns the bytes of a sequence in the backward pass of ring attention by a fused kernel, whose contributions are
    summed in fp32: with the first block of keys, with a later one, or once the gradients are there."""
    size, width, wide = place.model.head_size + place.model.v_head_size, place.width, max(place.width, WIDE)
    of_queries, of_keys = tokens * heads * place.model.head_size, keys * kv_heads * size
    # The block's keys, those that arrive, and the kernel's results.
    first = wide * (of_queries + of_keys) + width * (3 * of_keys + of_queries)
    # This rank's own gradients wait, and beyond two ranks those of the block before travel on as the next keys arrive.
    more = place.ring > 2
    later = wide * (of_queries + (4 if more else 2) * of_keys) + width * ((2 + more) * of_keys + of_queries / 2)
    return max(first, later, wide * (of_queries + 3 * of_keys) + width * of_keys)


def _compressed_norm(place: Place, name: str, rank: int) -> Operator:
    numbers = place.tokens * rank
    weights = norm_weights(place.model, f"attn.{name}", rank, PARTIAL)
    return Operator(name, weights, memory_bound=(MemoryBound(name, 2 * numbers, 3 * numbers, 2, cheap=True),))


def _normed_saved(
    place: Place, name: str, spread: Literal["tokens", "whole"], numbers: int, read: int, by_matrix: int = 0
) -> SavedTensor:
    """Returns what a norm over `numbers` of the `read` numbers of a token saves, with the `by_matrix` bytes per number
    of the matrix that follows it. Of this only what the norm reads is not computed again."""
    size = norm_saved(place, numbers, read=read) + numbers * by_matrix
    return SavedTensor(name, size, spread, cheap=size - read * place.width)


def _query_key_norm(place: Place, *, keys: bool = True) -> Operator:
    """Returns the norms of queries and keys, which save what they read, or of queries alone. A norm over all heads sums
    a square per token over the tensor ranks, of queries and of keys, and its gradient as well."""
    model, wide = place.model, place.model.qk_norm == "width"
    queries, of_keys = model.n_heads * model.head_size, model.kv_heads * model.head_size
    spread = max(model.kv_heads, place.tp) * model.head_size * keys
    if wide:
        weights = (
            *norm_weights(model, "attn.q_norm", queries, ROWS),
            *norm_weights(model, "attn.k_norm", of_keys, ROWS._replace(unit=model.head_size)),
        )
    else:
        weights = (
            ()
            if model.qk_norm == "unit"
            else tuple(
                weight
                for name in ("attn.q_norm", "attn.k_norm")
                for weight in norm_weights(model, name, model.head_size, PARTIAL)
            )
        )
    numbers, kernels = place.tokens * (queries + spread) // place.tp, (1 + keys) * norm_kernels(model)
    # Tensor ranks that sum squares have a norm of their own, which saves what it reads (parallel/tensor.py).
    alone = (wide and place.tp > 1) or model.qk_norm == "unit"  # nor has one without weights their gradient
    saved = (queries + spread) * place.width if alone else norm_saved(place, queries + spread)
    sums = Message("tp", "all_reduce", SQUARES * place.tokens, "wide", forward=1, full=1, backward=1)
    return Operator(
        "qk_norm",
        weights,
        memory_bound=(
            MemoryBound("qk_norm", 2 * numbers, 3 * numbers, kernels, 1 + keys, cheap=not (wide and place.tp > 1)),
        ),
        saved=(SavedTensor("qk_norm", saved, "width", cheap=saved - (queries + spread) * place.width),),
        messages=(sums,) if wide else (),
    )


def _value_norm(place: Place, *, shared: bool) -> Operator:
    """Returns the norm of values, which has no weights. It saves what it reads, unless that is `shared` with the norm
    of keys, which counts it."""
    numbers = max(place.model.kv_heads, place.tp) * place.model.head_size
    moved, kernels = place.tokens * numbers // place.tp, norm_kernels(place.model)
    return Operator(
        "v_norm",
        memory_bound=(MemoryBound("v_norm", 2 * moved, 3 * moved, kernels, cheap=True),),
        saved=() if shared else (SavedTensor("v_norm", numbers * place.width, "width"),),
    )


def _core(place: Place, kv_heads: int, *memory_bound: MemoryBound, turns_again: bool) -> Operator:
    """Returns everything between the matrices: scores, softmax and the product with the values. `turns_again`: whether
    recompute=products rotates queries and keys again."""
    model, heads = place.model, place.model.n_heads // place.tp
    saved = []
    if place.ulysses > 1:
        # The output before and after it exchanges heads for tokens.
        output = model.n_heads * model.v_head_size * place.width
        saved.append(SavedTensor("exchange", output, "width", inside=True))
    if saves_scores(place):
        # With dropout also the mask and the masked probabilities; capped scores next to their probabilities.
        each = 2 * place.width + 1 if model.dropout else place.width
        each += place.width if model.attention_softcap else 0
        keys = model.seq_len * (place.slices + 1) / (2 * place.slices)
        saved.append(SavedTensor("softmax", model.n_heads * keys * each, "width", inside=True))
    work = list(memory_bound)
    if model.positions == "rope":
        turned = 2 * place.tokens * (heads + kv_heads) * model.rotary_size
        work.append(MemoryBound("rotary", turned, turned, ROTARY_KERNELS, cheap=turns_again))
    elif model.query_growth.rate:
        grown = 2 * place.tokens * heads * model.head_size
        work.append(MemoryBound("growth", grown, grown, cheap=turns_again))
    steps = _steps(place)
    if steps > 1:
        # Each step's output and log-sum-exp, in fp32, are merged with those so far.
        merged = (steps - 1) * place.tokens * heads * model.v_head_size
        merges = ceil(steps) - 1
        work.append(MemoryBound("ring merge", 6 * merged, 4 * merged, 4 * merges, 2 * merges))
    return Operator(
        "attention",
        core=AttentionCore(
            place.sequences,
            heads,
            kv_heads,
            queries=_queries(place),
            keys=model.seq_len,
            pairs=_pairs(place),
            head=model.head_size,
            value_head=model.v_head_size,
            steps=steps,
        ),
        memory_bound=tuple(work),
        saved=tuple(saved),
        results=(SavedTensor("attention", model.n_heads * model.v_head_size * place.width, "width"),),
        messages=tuple(_context_messages(place, kv_heads)),
        workspace=_workspace(place, heads, kv_heads),
    )


def _steps(place: Place) -> float:
    """Returns the blocks of keys that a rank computes with one after the other: its own, and those that it receives."""
    if place.within:
        return 1 + place.ring_counts.receives
    if place.ring == 1 or not place.window:
        return place.ring
    return 1 + len(ring_keys(place.model.seq_len, place.ring, 1, place.window, place.ring // 2).received)


def _queries(place: Place) -> int:
    """Returns the queries per head and sequence on this context rank, averaged over all heads with Ulysses."""
    return -(-place.model.seq_len // place.cp)


def _pairs(place: Place) -> int:
    """Returns the (query, key) pairs per head and sequence, without halving for the causal mask: without a window each
    query with all keys, with one each query with the `window` keys up to its own and as many after it, as far as they
    exist, and in chunks with those of its own, also where the last one is filled up. On a ring the count is that of the
    position with the most, the last, which has the middle of the sequence, chunks being windows."""
    seq_len, window = place.model.seq_len, place.window
    if place.within:
        return round(2 * place.within.pairs) - _queries(place)
    if not window:
        return _queries(place) * seq_len
    if place.model.window_kind == "chunks" and place.ring == 1:
        return -(-(-(-seq_len // window) * window**2) // place.ulysses)
    middle, chunk = seq_len // 2, seq_len // (2 * place.ring)
    run = range(seq_len) if place.ring == 1 else range(middle - chunk, middle + chunk)
    # The mirrored mask has as many pairs; both include those of queries with their own keys.
    return -(-(2 * visible_pairs(run, window) - len(run)) // place.ulysses)


def _context_messages(place: Place, kv_heads: int) -> Iterator[Message]:
    """Yields the messages of attention if ranks hold parts of every sequence."""
    model, heads = place.model, place.model.n_heads // place.tp
    core = place.profile.selective == "core"
    # Key/value heads go to several ranks if there are fewer of them.
    key_and_value = max(kv_heads, place.ulysses) * (model.head_size + model.v_head_size)
    # With slices every slice sends the keys and values of all slices so far.
    keys_and_values = place.tokens // place.slices * (place.slices * (place.slices + 1) // 2) * key_and_value
    often = place.work.exchanged if place.work else 1
    if place.ulysses > 1:
        inputs = place.tokens * heads * model.head_size + keys_and_values
        output = place.tokens * heads * model.v_head_size
        yield Message(
            "ulysses", "all_to_all", inputs, forward=often, full=often, selective=often * core, backward=often
        )
        # The last tensor that attention saves for its backward pass is the input of this exchange.
        yield Message("ulysses", "all_to_all", output, forward=often, full=often, backward=often)
    if place.ring > 1 and (place.window or place.within):
        # Each message has the keys that one position sees; their gradients go back to where they came from.
        each = place.sequences * key_and_value // place.ulysses
        sent, received = _straight(place)
        for keys, times in sent:
            yield Message(
                *("ring", "send", keys * each),
                forward=times,
                full=times,
                selective=times * core,
                backward=times,
                beside="attention",
            )
        for keys, times in received:
            yield Message("ring", "send", keys * each, "wide", backward=times, beside="attention")
    elif place.ring > 1:
        hops = place.ring - 1
        back = Message("ring", "send", keys_and_values, backward=hops, beside="attention")
        yield back._replace(forward=hops, full=hops, selective=hops * core)
        yield back._replace(number="wide")


def _straight(place: Place) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Returns the messages of keys that go straight to the positions of a ring that see them, of a layer with a window
    or within documents: the keys per sequence and the times of those that it sends, and of those that it receives."""
    if place.within:
        found = place.ring_counts
        every = (found.sent, found.sends), (found.received, found.receives)
        sent, received = ([(keys / times, times)] if times else [] for keys, times in every)
        return sent, received
    keys = ring_keys(place.model.seq_len, place.ring, place.slices, place.window, place.ring_rank)
    return [*Counter(keys.sent).items()], [*Counter(keys.received).items()]


def _output(place: Place) -> Operator:
    """Returns the output projection. The backward pass of attention reads its input, too."""
    model, width, read = place.model, place.width, saved_input(place, "attention", "attn.wo")
    inner = model.n_heads * model.v_head_size
    return Operator(
        "wo",
        linear_weights("attn.wo", model.d_model, inner, model.bias, TILED_COLUMNS, cuts_bias=False),
        place.tokens,
        saved=(SavedTensor("wo", inner * (width if read == width else width + read), "width"),),
        messages=tuple(leave(place)),
    )
