"""A mixture of experts: router, all-to-all between expert ranks, routed and shared experts.

Tokens are dispatched to their experts and combined again, in the forward and in the backward pass (Lepikhin et al.
2021). Routed experts get equal numbers of tokens, or as many as their capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from phalanx.blocks.feed_forward import down_result, gate_result, hidden_saved, mlp
from phalanx.blocks.lora import saved_input
from phalanx.blocks.operator import MemoryBound, Message, Operator, SavedTensor, Weight
from phalanx.blocks.place import INDEX, WIDE, Place
from phalanx.blocks.residual import enter, leave, needs_sum

ROUTE_KERNELS, PERMUTE_KERNELS = 12, 8
Spread = Literal["tokens", "whole"]


def experts(place: Place) -> Iterator[Operator]:
    """Yields the operators of a mixture of experts."""
    model, moe, width = place.model, place.model.moe, place.width
    spread: Spread = "tokens" if place.profile.routes_shards else "whole"
    stream, rows = model.d_model * width, routed_rows(place) / place.tokens
    arrived = rows * (place.profile.imbalance if place.ep > 1 else 1)
    yield _router(place, spread)
    # Each row's choice and each choice's row; with a capacity whether there is one.
    places = INDEX * (rows + moe.top_k) + moe.top_k * (moe.capacity > 0)
    token, row = place.hidden, routed_rows(place) * model.d_model
    work = MemoryBound("dispatch", 2 * row, row + token, cheap=True)
    yield _moving(place, work, rows, SavedTensor("places", places, spread))
    up, activation, down = mlp(
        place, "experts", model.expert_ff_size, max(1, routed_rows(place) * place.ep // moe.n_experts), tiled=True
    )
    inputs = saved_input(place, "feed_forward", "moe.experts.up", "moe.experts.gate")
    size = arrived * model.d_model * inputs
    read = SavedTensor("experts.up", size, spread, cheap=size if place.ep == 1 else 0)
    yield replace(
        _in_mixture(up, moe.n_experts), saved=(read,), results=gate_result(place, moe.top_k * model.expert_ff_size)
    )
    here = max(1, moe.n_experts // place.ep)
    each = (one._replace(forward=here * one.forward, backward=here * one.backward) for one in activation.memory_bound)
    yield replace(activation, memory_bound=tuple(each))
    hidden = hidden_saved(place, "experts", arrived * model.expert_ff_size)
    yield replace(_in_mixture(down, moe.n_experts), saved=(hidden,), results=down_result(place))
    combined = () if place.profile.weights_inside else (SavedTensor("combine", rows * stream, spread),)
    work = MemoryBound("combine", row + token, 3 * row)
    yield _moving(place, work, rows, *combined).sending(*leave(place, again=needs_sum(model)))
    if moe.n_shared:
        for part in mlp(place, "shared", moe.n_shared * model.expert_ff_size, place.tokens, tiled=True):
            yield _in_mixture(part)


def routed_rows(place: Place) -> int:
    """Returns the rows that a rank's tokens send to experts: `top_k` per token, or with a capacity every slot."""
    model, moe = place.model, place.model.moe
    if not moe.capacity:
        return place.tokens * moe.top_k
    # The capacity of every conversation of a sequence is rounded up.
    most = moe.most_tokens(model.seq_len) + place.conversations - 1
    return moe.n_experts * place.sequences * min(most, model.seq_len // place.cp)


def _router(place: Place, spread: Spread) -> Operator:
    model, moe = place.model, place.model.moe
    weights = [Weight("moe.router.weight", (moe.n_experts, model.d_model), gradient="partial")]
    if moe.bias_balanced:
        weights.append(Weight("moe.router.bias", (moe.n_experts,), gradient="whole"))
    if moe.router_bias:
        weights.append(Weight("moe.router.logit_bias", (moe.n_experts,), gradient="partial"))
    routed = 8 * place.tokens * moe.n_experts
    # Shared experts read the same input.
    reads = not model.lora.rank or (
        moe.n_shared and saved_input(place, "feed_forward", "moe.shared.up", "moe.shared.gate")
    )
    read = model.d_model * place.width if reads else 0
    gates = moe.top_k * (INDEX + (WIDE if moe.renormalise else 0)) + (2 * WIDE if moe.renormalise else 0)
    gates += moe.top_k * place.width  # as they multiply the experts' outputs
    return Operator(
        "router",
        tuple(weights),
        place.tokens,
        sixteen=True,
        memory_bound=(MemoryBound("route", routed, routed, ROUTE_KERNELS),),
        saved=(
            SavedTensor("router", read, spread, cheap=place.repeats_input(read, regathered=False)),
            SavedTensor("scores", moe.n_experts * WIDE * (2 if moe.z_loss else 1), spread),
            SavedTensor("gates", gates, spread),
        ),
        messages=(*enter(place), *_routing_messages(place)),
    )


def _routing_messages(place: Place) -> Iterator[Message]:
    """Yields the messages between routers: sums over a sequence, and the number of rows for each rank."""
    moe = place.model.moe
    if moe.aux_loss:
        counts = place.sequences * place.conversations * moe.n_experts
        yield Message("cp", "all_reduce", counts, "index", forward=1, full=1)
    if moe.capacity:
        chosen = place.cp * place.tokens * moe.top_k
        yield Message("cp", "all_gather", chosen, "index", forward=1, full=1)
    else:
        n = place.slices
        yield Message("ep", "all_gather", place.ep * moe.n_experts, "index", forward=n, full=n)


def _moving(place: Place, work: MemoryBound, rows: float, *saved: SavedTensor) -> Operator:
    """Returns the dispatch to experts or the combine with gates, a gather each way, and the all-to-all, on whose other
    side rows are permuted again."""
    moved = routed_rows(place) * place.model.d_model
    message = Message("ep", "all_to_all", moved, forward=1, full=1, backward=1, copies=rows)
    again = 2 * moved * (place.ep > 1)
    work = work._replace(
        forward=work.forward + again,
        backward=work.backward + again,
        kernels=PERMUTE_KERNELS // 2 + 1 + (place.ep > 1),
    )
    return Operator(work.name, memory_bound=(work,), saved=saved, messages=(message,))


def _in_mixture(operator: Operator, n_experts: int = 0) -> Operator:
    """Names an MLP's weights as a mixture's, and stacks `n_experts` of each (0: no stack)."""
    stack = (n_experts,) if n_experts else ()
    weights = (w._replace(name=f"moe.{w.name}", shape=(*stack, *w.shape)) for w in operator.weights)
    return replace(operator, weights=tuple(weights))
