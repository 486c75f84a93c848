"""The problems of a model's experts and of its latent attention, each with its equation and the nearest legal
values."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.nearest import nearest_divisors, nearest_of


def model_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each wrong field, and the message."""
    if model.moe.n_experts:
        yield from _experts(model.moe, model.n_layers)
    if model.mla.kv_rank:
        yield from _latent_attention(model.mla, model.positions)


def _experts(moe: MoE, n_layers: int) -> Iterator[tuple[str, str]]:
    n = moe.n_experts
    for name in ("n_experts", "d_ff", "n_shared", "n_dense_layers", "aux_loss", "z_loss", "capacity"):
        if getattr(moe, name) < 0:
            yield f"model.moe.{name}", f"must not be negative, is {getattr(moe, name)}"
    if n < 0:
        return  # what follows would only say the same in other words
    if not 1 <= moe.top_k <= n:
        yield (
            "model.moe.top_k",
            f"must lie between 1 and n_experts {n}, is {moe.top_k}; nearest: {min(max(moe.top_k, 1), n)}",
        )
    elif moe.top_k == 1 and moe.renormalise:
        yield (
            "model.moe.renormalise",
            "with top_k 1 the gate is always 1 and the router gets no gradient from the loss; nearest legal: "
            "renormalise=false",
        )
    if moe.route_scale <= 0:
        yield "model.moe.route_scale", f"must be above 0, is {moe.route_scale}"
    if moe.bias_balanced and moe.bias_rate <= 0:
        yield "model.moe.bias_rate", f"must be above 0 with bias_balanced, is {moe.bias_rate}"
    if moe.n_dense_layers > n_layers:
        yield "model.moe.n_dense_layers", f"is {moe.n_dense_layers}, more than the model's n_layers {n_layers}"
    yield from _groups(moe)


def _groups(moe: MoE) -> Iterator[tuple[str, str]]:
    n, groups = moe.n_experts, moe.n_groups
    if groups < 1 or n % groups:
        yield (
            "model.moe.n_groups",
            f"must divide n_experts {n}, is {groups}; nearest: {nearest_divisors(n, groups)}",
        )
        return
    if not 1 <= moe.top_groups <= groups:
        yield (
            "model.moe.top_groups",
            f"must lie between 1 and n_groups {groups}, is {moe.top_groups}; nearest: "
            f"{min(max(moe.top_groups, 1), groups)}",
        )
        return
    within = n // groups * moe.top_groups
    if within < moe.top_k <= n:
        legal = [kept for kept in range(1, groups + 1) if n // groups * kept >= moe.top_k]
        yield (
            "model.moe.top_groups",
            f"top_groups {moe.top_groups} × (n_experts {n} / n_groups {groups}) = {within} experts to choose from, "
            f"fewer than top_k {moe.top_k}; nearest top_groups: {nearest_of(legal, moe.top_groups)}",
        )


def _latent_attention(mla: MLA, positions: str) -> Iterator[tuple[str, str]]:
    for name in ("q_rank", "kv_rank"):
        if getattr(mla, name) < 0:
            yield f"model.mla.{name}", f"must not be negative, is {getattr(mla, name)}"
    for name in ("rope_head_dim", "nope_head_dim", "v_head_dim"):
        if getattr(mla, name) < 1:
            yield f"model.mla.{name}", f"must be at least 1, is {getattr(mla, name)}"
    if mla.rope_head_dim > 0 and mla.rope_head_dim % 2:
        even = nearest_of(range(2, mla.rope_head_dim + 2, 2), mla.rope_head_dim, 2)
        yield (
            "model.mla.rope_head_dim",
            f"rotary positions turn pairs: must be even, is {mla.rope_head_dim}; nearest: {even}",
        )
    if positions != "rope":
        yield "model.positions", f"latent attention needs rotary positions: rope, is {positions}"
