"""The problems among the fields of a model's experts and of its latent attention: each with its equation and the
nearest legal values.

Each function yields the dotted path of a wrong field, and the message."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.model import ModelConfig, MoE
from phalanx.nearest import Misfit, divisors, multiples


def expert_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the problems of a mixture of experts."""
    moe, n_layers = model.moe, model.n_layers
    n = moe.n_experts
    if moe.top_k > n:
        choices = {"model.moe.top_k": [n], "model.moe.n_experts": range(moe.top_k, moe.top_k + 8)}
        yield "model.moe.top_k", Misfit(f"must lie between 1 and n_experts {n}, is {moe.top_k}", moe.top_k, choices)
    elif moe.top_k == 1 and moe.renormalise:
        yield (
            "model.moe.renormalise",
            "with top_k 1 the gate is always 1 and the router gets no gradient from the loss; nearest legal: "
            "renormalise=false",
        )
    if moe.bias_balanced and not moe.bias_rate:
        yield "model.moe.bias_rate", f"must be above 0 with bias_balanced, is {moe.bias_rate}"
    if moe.n_dense_layers > n_layers:
        yield "model.moe.n_dense_layers", f"is {moe.n_dense_layers}, more than the model's n_layers {n_layers}"
    yield from _groups(moe)


def _groups(moe: MoE) -> Iterator[tuple[str, str]]:
    n, groups = moe.n_experts, moe.n_groups
    if n % groups:
        yield (
            "model.moe.n_groups",
            Misfit(
                f"n_experts {n} / n_groups {groups} is not an integer",
                groups,
                {"model.moe.n_groups": divisors(n), "model.moe.n_experts": multiples(groups, n)},
            ),
        )
        return
    if moe.top_groups > groups:
        yield (
            "model.moe.top_groups",
            Misfit(
                f"must lie between 1 and n_groups {groups}, is {moe.top_groups}",
                moe.top_groups,
                {"model.moe.top_groups": [groups]},
            ),
        )
        return
    within = n // groups * moe.top_groups
    if within < moe.top_k <= n:
        legal = [count for count in range(1, groups + 1) if n // groups * count >= moe.top_k]
        yield (
            "model.moe.top_groups",
            Misfit(
                f"top_groups {moe.top_groups} × (n_experts {n} / n_groups {groups}) = {within} experts to choose from, "
                f"fewer than top_k {moe.top_k}",
                moe.top_groups,
                {"model.moe.top_groups": legal, "model.moe.top_k": range(1, within + 1)},
            ),
        )


def latent_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the problems of latent attention."""
    mla, positions = model.mla, model.positions
    if mla.rope_head_dim % 2:
        even = range(max(2, mla.rope_head_dim - 1), mla.rope_head_dim + 2, 2)
        yield (
            "model.mla.rope_head_dim",
            Misfit(
                f"rotary positions turn pairs: must be even, is {mla.rope_head_dim}",
                mla.rope_head_dim,
                {"model.mla.rope_head_dim": even},
            ),
        )
    if positions != "rope":
        yield "model.positions", f"latent attention needs rotary positions: rope, is {positions}"
