"""Feed-forward layers: a dense MLP, with or without a gate (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import comb
from typing import Any, Literal

from phalanx.blocks.operator import INDEX, PLAIN, WIDE, MemoryBound, Message, Operator, Place, SavedTensor, Weight
from phalanx.blocks.residual import enter, leave, linear_weights, needs_sum, saved_input
from phalanx.config.model import ModelConfig

ROWS, COLUMNS = PLAIN._replace(cut="rows"), PLAIN._replace(cut="columns")
CLAMPED_KERNELS = 7


def dense(place: Place) -> Iterator[Operator]:
    """Yields the operators of a dense MLP."""
    read = saved_input(place, "feed_forward", "mlp.up", "mlp.gate")
    up, activation, down = mlp(place, "mlp", place.model.ff_size, place.tokens, tiled=True)
    yield Operator(
        up.name,
        up.weights,
        up.rows,
        repeated=up.repeated,
        saved=(
            SavedTensor(
                *("up", size := place.model.d_model * read, "gathered"),
                cheap=place.repeats_input(size),
                repeated=up.repeated and place.model.norms_inputs,
            ),
        ),
        results=gate_result(place, place.model.ff_size),
        messages=tuple(enter(place, regather=bool(read))),
    )
    yield activation
    # The sum of a frozen matrix's outputs, or of tiles', saves nothing of its own.
    again = not (place.model.freezes or "mlp" in place.tiled) or needs_sum(place.model)
    yield replace(down, results=down_result(place)).sending(*leave(place, again=again))


def gate_result(place: Place, width: int) -> tuple[SavedTensor]:
    """Returns the result of the matrix with the gate, `width` numbers per token."""
    return (SavedTensor("gate", width * place.width, "width"),)


def down_result(place: Place) -> tuple[SavedTensor]:
    """Returns the result of the last matrix, after its reduce-scatter."""
    return (SavedTensor("down", place.model.d_model * place.width, "tokens"),)


def mlp(place: Place, name: str, width: int, rows: int, *, tiled: bool = False) -> tuple[Operator, Operator, Operator]:
    """Returns the matrices of an MLP of hidden size `width` over `rows` tokens, and the activation between them. The
    second matrix saves the inputs of the activation and its own."""
    model = place.model
    hidden = max(1, width // place.tp)
    gated = model.gated
    inner = rows * hidden
    return (
        Operator(f"{name}.up", up_weights(model, name, width, tiled=tiled), rows, repeated=repeats_mlp(place)),
        Operator(
            f"{name}.activation",
            memory_bound=(
                MemoryBound(
                    f"{name}.activation",
                    (3 if gated else 2) * inner,
                    (5 if gated else 3) * inner,
                    CLAMPED_KERNELS if model.activation == "swiglu_clamped" else 2,
                    cheap=True,
                ),
            ),
        ),
        Operator(
            f"{name}.down",
            down_weights(model, name, width, tiled=tiled),
            rows,
            saved=(hidden_saved(place, name, width),),
        ),
    )


@lru_cache(1024)
def up_weights(model: ModelConfig, name: str, width: int, *, tiled: bool = False) -> tuple[Weight, ...]:
    """Returns the weights that read the residual stream: one matrix, or two with a gate."""
    kind = ROWS._replace(tiled=tiled)
    weights = linear_weights(f"{name}.up", width, model.d_model, model.bias, kind)
    if model.gated:
        weights += linear_weights(f"{name}.gate", width, model.d_model, model.bias, kind)
    return weights


@lru_cache(1024)
def down_weights(model: ModelConfig, name: str, width: int, *, tiled: bool = False) -> tuple[Weight, ...]:
    """Returns the weights that write to the residual stream."""
    kind = COLUMNS._replace(tiled=tiled)
    weight, *bias = linear_weights(f"{name}.down", model.d_model, width, model.bias, kind, cuts_bias=False)
    # In a mixture of experts gates multiply the bias, so each rank computes a part of its gradient.
    return weight, *(one._replace(gradient="tokens" if name == "mlp" else "partial") for one in bias)


def hidden_saved(place: Place, name: str, width: float) -> SavedTensor:
    """Returns what the MLP `name` saves between its matrices, of `width` numbers per token. Only what its first
    matrices write is not computed again."""
    size = hidden_bytes(place, name)
    cheap = width * (size - (1 + place.model.gated) * place.width)
    return SavedTensor(name, width * size, "width", cheap=cheap, repeated=repeats_mlp(place))


def repeats_mlp(place: Place) -> bool:
    """Returns whether recompute=mlp repeats an MLP's first matrices: not where what they read is the residual stream
    itself, of which a tensor rank saves the gathered tokens."""
    return place.model.norms_inputs or not place.sp


def hidden_bytes(place: Place, name: str) -> int:
    """Returns the bytes per element of the hidden size that the MLP `name` saves: the inputs of the activation, of the
    last matrix and, of a gate that is not computed again, its result."""
    tensors = place.profile.swiglu_kept if place.model.gated else 2
    if place.model.activation == "swiglu_clamped":
        tensors = min(tensors, 3)
    down = f"{name}.down" if name == "mlp" else f"moe.{name}.down"
    return (tensors - 1) * place.width + saved_input(place, "feed_forward", down)


ROUTE_KERNELS, PERMUTE_KERNELS = 12, 8
Spread = Literal["tokens", "whole"]


def experts(place: Place) -> Iterator[Operator]:
    """Yields the operators of a mixture of experts."""
    model, moe, width = place.model, place.model.moe, place.width
    spread: Spread = "tokens" if place.profile.routes_shards or place.folds else "whole"
    rows = routed_rows(place) / place.tokens
    arrived = rows * (place.profile.imbalance if place.ep > 1 else 1)
    yield _router(place, spread)
    # Each row's choice and each choice's row; with a capacity whether there is one.
    places = INDEX * (rows + moe.top_k) + moe.top_k * (moe.capacity > 0)
    inside = _in_latents(place)
    inside = inside._replace(tp=1) if place.folds else inside
    size = inside.model.d_model
    if moe.latent:
        yield _latent(place, "latent_down", moe.latent, model.d_model, spread)
    token, row = inside.hidden / place.routed_share, routed_rows(place) * size / place.routed_share
    work = MemoryBound("dispatch", 2 * row, row + token, cheap=True)
    yield _moving(place, work, rows, SavedTensor("places", places, spread))
    up, activation, down = mlp(
        inside,
        "experts",
        model.expert_ff_size,
        max(1, routed_rows(place) * place.ep_shard // moe.n_experts),
        tiled=True,
    )
    if place.redundant:
        yield _copies(place, (up, down))
    inputs = saved_input(place, "feed_forward", "moe.experts.up", "moe.experts.gate")
    size *= arrived * inputs
    read = SavedTensor("experts.up", size, spread, cheap=size if place.ep == 1 else 0)
    results = gate_result(place, moe.top_k * model.expert_ff_size)
    yield _in_mixture(up, moe.n_experts, folds=place.folds, saved=(read,), results=results)
    here = max(1, moe.n_experts // place.ep)
    each = (one._replace(forward=here * one.forward, backward=here * one.backward) for one in activation.memory_bound)
    yield replace(activation, memory_bound=tuple(each))
    hidden = hidden_saved(place, "experts", arrived * model.expert_ff_size)
    yield _in_mixture(down, moe.n_experts, folds=place.folds, saved=(hidden,), results=down_result(place))
    combined = (
        ()
        if place.profile.weights_inside or moe.scale_inputs
        else (SavedTensor("combine", rows * inside.model.d_model * width, spread),)
    )
    work = MemoryBound("combine", row + token, 3 * row)
    # With norms of their own routed and shared outputs are summed side by side.
    sums = (
        message._replace(elements=message.elements * (1 + moe.own_norms))
        for message in (() if place.folds else leave(place, again=needs_sum(model)))
    )
    yield _moving(place, work, rows, *combined).sending(*sums)
    if moe.latent:
        yield _latent(place, "latent_up", model.d_model, moe.latent, spread)
    if moe.n_shared:
        up, activation, down = mlp(place, "shared", moe.n_shared * model.expert_ff_size, place.tokens, tiled=True)
        if place.folds:
            reads = saved_input(place, "feed_forward", "moe.shared.up", "moe.shared.gate")
            # What is gathered again, the router has saved.
            size = 0 if place.regathers else model.d_model * reads
            saved = SavedTensor("shared.up", size, "gathered", repeated=up.repeated and model.norms_inputs)
            up = replace(up, saved=(saved,), messages=tuple(enter(place, regather=bool(reads))))
            down = down.sending(*leave(place))
        for part in (up, activation, down):
            yield _in_mixture(part)
        if moe.shared_gate:
            yield _shared_gate(place, spread)


def _in_latents(place: Place) -> Place:
    """Returns the place of the experts, whose residual stream is as wide as latents if they have any."""
    model = place.model
    return place._replace(model=replace(model, d_model=model.moe.latent)) if model.moe.latent else place


def _latent(place: Place, name: str, outputs: int, inputs: int, spread: Spread) -> Operator:
    """Returns the matrix into the experts' latents or out of them, which every tensor rank holds whole."""
    weight = Weight(f"moe.{name}.weight", (outputs, inputs), gradient="partial")
    rows = place.tokens // place.routed_share
    return Operator(name, (weight,), rows, saved=(SavedTensor(name, inputs * place.read, spread),))


def _shared_gate(place: Place, spread: Spread) -> Operator:
    """Returns the gate of the shared experts: a score per token, and the product of its sigmoid with their output."""
    weight = Weight("moe.shared_gate.weight", (1, place.model.d_model), gradient="partial")
    numbers = place.hidden / place.token_share
    return Operator(
        "shared gate",
        (weight,),
        place.tokens // place.routed_share,
        sixteen=True,
        memory_bound=(MemoryBound("shared gate", 2 * numbers, 4 * numbers, 3),),
        saved=(SavedTensor("shared gate", place.model.d_model * place.width, spread),),
    )


def routed_rows(place: Place) -> int:
    """Returns the rows that a rank's tokens send to experts: `top_k` per token, or with a capacity every slot."""
    model, moe = place.model, place.model.moe
    if not moe.capacity:
        return place.tokens * moe.top_k
    # The capacity of every conversation of a sequence is rounded up.
    most = moe.most_tokens(model.seq_len) + place.conversations - 1
    seq = model.seq_len // place.cp
    if not place.folds:
        return moe.n_experts * place.sequences * min(most, seq)
    met = ((half, sequences_met(half, seq, place.tp)) for half in place.halves)
    return moe.n_experts * place.tp * sum(min(runs * most, half * seq // place.tp) for half, runs in met)


def tokens_reaching(tokens: int, experts: int, top_k: int, ranks: int) -> int:
    """Returns how many of `tokens`, whose experts are any `top_k` of all, have some on one of `ranks` ranks."""
    return round(tokens * (1 - comb(experts - experts // ranks, top_k) / comb(experts, top_k)))


def sequences_met(sequences: int, tokens: int, ranks: int) -> int:
    """Returns the most of `sequences` of `tokens` each that one of equal runs of their tokens meets, a run per rank."""
    run = sequences * tokens // ranks
    return max((end - 1) // tokens - (end - run) // tokens + 1 for end in range(run, ranks * run + 1, run))


def _router(place: Place, spread: Spread) -> Operator:
    model, moe = place.model, place.model.moe
    ones = Weight("", (model.d_model,), gradient="partial", initial="ones")
    weights = [ones._replace(name=f"moe.{part}_scale") for part in ("expert", "shared") if moe.own_norms]
    weights.append(Weight("moe.router.weight", (moe.n_experts, model.d_model), gradient="partial"))
    if moe.bias_balanced:
        weights.append(Weight("moe.router.bias", (moe.n_experts,), gradient="whole"))
    if moe.router_bias:
        weights.append(Weight("moe.router.logit_bias", (moe.n_experts,), gradient="partial"))
    if moe.own_norms:
        weights.append(ones._replace(name="moe.router.input_scale"))
        weights.append(ones._replace(name="moe.router.gate_scale", shape=(moe.n_experts,)))
    tokens = place.tokens // place.routed_share
    routed = 8 * tokens * moe.n_experts
    # Shared experts read the same input.
    reads = (
        not model.freezes
        or moe.scale_inputs
        or (moe.n_shared and saved_input(place, "feed_forward", "moe.shared.up", "moe.shared.gate"))
    )
    read = model.d_model * place.width if reads else 0
    # Tensor ranks that fold gather nothing here. In place of experts' rows, the input that one scale wrote stays.
    cheap = read * model.norms_inputs if place.folds else place.repeats_input(read, regathered=False)
    cheap -= read * moe.own_norms
    gates = moe.top_k * (INDEX + (WIDE if moe.renormalise else 0)) + (2 * WIDE if moe.renormalise else 0)
    gates += moe.top_k * place.width  # as they multiply the experts' outputs
    gates += 2 * moe.top_k * WIDE * moe.own_norms
    # What each of three scales wrote, in place of what the first reads.
    scaled = 2 * place.hidden / place.routed_share
    return Operator(
        "router",
        tuple(weights),
        tokens,
        sixteen=True,
        memory_bound=(
            MemoryBound("route", routed, routed, ROUTE_KERNELS),
            *([MemoryBound("scale", 3 * scaled, 6 * scaled, 3)] if moe.own_norms else []),
        ),
        saved=(
            *([SavedTensor("scaled", 2 * model.d_model * place.width, spread)] if moe.own_norms else []),
            SavedTensor("router", read, spread, cheap=cheap),
            SavedTensor("scores", moe.n_experts * WIDE * (2 if moe.z_loss else 1), spread),
            SavedTensor("gates", gates, spread),
        ),
        messages=(*(() if place.folds else enter(place)), *_routing_messages(place)),
    )


def _routing_messages(place: Place) -> Iterator[Message]:
    """Yields the messages between routers: sums over a sequence, and the number of rows for each rank."""
    moe = place.model.moe
    if moe.aux_loss:
        counts = place.sequences * place.conversations * moe.n_experts
        axes: tuple[Literal["tp", "cp"], ...] = ("tp", "cp") if place.folds else ("cp",)
        yield from (Message(axis, "all_reduce", counts, "index", forward=1, full=1) for axis in axes)
    if moe.capacity:
        chosen = place.tokens * moe.top_k
        if place.folds:
            yield Message("tp", "all_gather", chosen, "index", forward=1, full=1)
        yield Message("cp", "all_gather", place.cp * chosen, "index", forward=1, full=1)
    if place.once or not moe.capacity:
        n, numbers = place.slices * len(place.halves), moe.n_experts + place.ep * place.once
        if place.once and place.redundant:  # of each expert first, then of each slot
            yield Message("ep", "all_gather", place.ep * moe.n_experts, "index", forward=n, full=n)
            numbers += place.ep * place.redundant
        yield Message("ep", "all_gather", place.ep * numbers, "index", forward=n, full=n)


def _moving(place: Place, work: MemoryBound, rows: float, *saved: SavedTensor) -> Operator:
    """Returns the dispatch to experts or the combine with gates, a gather each way, and the all-to-all, on whose other
    side rows are permuted again."""
    moved = routed_rows(place) * _in_latents(place).model.d_model / place.routed_share
    message = Message("ep", "all_to_all", moved, forward=1, full=1, backward=1, copies=rows)
    again = 2 * moved * (place.ep > 1)
    work = work._replace(
        forward=work.forward + again,
        backward=work.backward + again,
        kernels=PERMUTE_KERNELS // 2 + 1 + (place.ep > 1),
    )
    return Operator(work.name, memory_bound=(work,), saved=saved, messages=(message,))


def _copies(place: Place, experts: Iterable[Operator]) -> Operator:
    """Returns the copies of other ranks' experts, whose weights arrive in the forward pass of a layer and stay until
    their gradients go back. Which ranks send more of them than others depends on the loads: here all send equally many.
    """
    weights = [weight for each in experts for weight in each.weights]
    numbers = place.redundant * sum(weight.size_on(1 if place.folds else place.tp) for weight in weights)
    # Nobody sends copies to itself.
    message = Message("ep", "all_to_all", numbers * place.ep / (place.ep - 1), forward=place.slices, full=place.slices)
    size = numbers * place.slices * place.width / place.tokens
    back = message._replace(forward=0, full=0, backward=place.slices)
    return Operator("experts.copies", saved=(SavedTensor("experts.copies", size, "whole"),), messages=(message, back))


def _in_mixture(operator: Operator, n_experts: int = 0, *, folds: bool = False, **changes: Any) -> Operator:
    """Names an MLP's weights as a mixture's, stacks `n_experts` of each (0: no stack), and makes other changes."""
    if not operator.weights:
        return operator
    return replace(operator, weights=_stacked(operator.weights, n_experts, folds), **changes)


@lru_cache(1024)
def _stacked(weights: tuple[Weight, ...], n_experts: int, folds: bool) -> tuple[Weight, ...]:
    stack = (n_experts,) if n_experts else ()
    return tuple(w._replace(name=f"moe.{w.name}", shape=(*stack, *w.shape)).folded(folds) for w in weights)
