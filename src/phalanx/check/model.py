"""The problems among the fields of a model's experts and of its latent attention: each with its equation and the
nearest legal values."""

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
        yield from _beside_latent_attention(model)
    if model.positions == "rope":
        yield from _rotary(model)
    if model.full_every and not model.window:
        yield (
            "model.full_every",
            f"every layer attends to all keys without a window, is {model.full_every}; nearest legal: full_every=0, or "
            "a window above 0",
        )
    if model.window_rope_theta and not model.window:
        yield (
            "model.window_rope_theta",
            f"is that of layers with a window, and there are none, is {model.window_rope_theta:g}; nearest legal: 0, "
            "or a window above 0",
        )
    if model.qk_norm == "width" and model.norm != "rmsnorm":
        yield (
            "model.qk_norm",
            f"norms over all heads are RMS norms, norm is {model.norm}; nearest legal: norm=rmsnorm, or qk_norm=head",
        )


def _experts(moe: MoE, n_layers: int) -> Iterator[tuple[str, str]]:
    n = moe.n_experts
    if moe.top_k > n:
        yield "model.moe.top_k", f"must lie between 1 and n_experts {n}, is {moe.top_k}; nearest: {n}"
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
            f"must divide n_experts {n}, is {groups}; nearest: {nearest_divisors(n, groups)}",
        )
        return
    if moe.top_groups > groups:
        yield (
            "model.moe.top_groups",
            f"must lie between 1 and n_groups {groups}, is {moe.top_groups}; nearest: {groups}",
        )
        return
    within = n // groups * moe.top_groups
    if within < moe.top_k <= n:
        legal = [count for count in range(1, groups + 1) if n // groups * count >= moe.top_k]
        yield (
            "model.moe.top_groups",
            f"top_groups {moe.top_groups} × (n_experts {n} / n_groups {groups}) = {within} experts to choose from, "
            f"fewer than top_k {moe.top_k}; nearest top_groups: {nearest_of(legal, moe.top_groups)}",
        )


def _rotary(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the problems of rotary positions, except those of latent attention's own size."""
    size, head, scaling = model.rotary_size, model.head_size, model.rope_scaling
    if not model.mla.kv_rank and (size % 2 or not size):
        if model.rotary_fraction == 1:
            yield (
                "model.head_dim",
                f"rotary positions turn pairs: head_size must be even, is {head}; nearest: "
                f"{nearest_of(range(max(2, head - 1), head + 2, 2), head, 2)}",
            )
        else:
            near = (number for number in (size // 2 * 2, size // 2 * 2 + 2) if 0 < number <= head)
            yield (
                "model.rotary_fraction",
                f"rotary positions turn pairs: head_size {head} × {model.rotary_fraction:g} = {size} must be even and "
                f"above 0; nearest: {', '.join(f'{number / head:g}' for number in near)}",
            )
    if scaling.kind == "yarn" and scaling.factor > 1 and scaling.beta_fast <= scaling.beta_slow:
        yield (
            "model.rope_scaling.beta_fast",
            f"must be above beta_slow {scaling.beta_slow:g}, is {scaling.beta_fast:g}; nearest legal: the usual "
            "beta_fast=32, beta_slow=1",
        )
    if scaling.kind == "yarn" and scaling.factor > 1 and model.rope_theta <= 1:
        yield (
            "model.rope_theta",
            f"yarn needs frequencies that fall from pair to pair: must be above 1, is {model.rope_theta:g}",
        )


def _beside_latent_attention(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the parts that latent attention does not have."""
    if model.qk_norm != "none":
        yield "model.qk_norm", f"latent attention has norms of its own, is {model.qk_norm}; nearest legal: none"
    if model.sinks:
        yield "model.sinks", "latent attention has no sinks; nearest legal: sinks=false"
    if model.rotary_fraction != 1:
        yield (
            "model.rotary_fraction",
            f"latent attention turns rope_head_dim elements of a head, is {model.rotary_fraction:g}; nearest legal: 1",
        )


def _latent_attention(mla: MLA, positions: str) -> Iterator[tuple[str, str]]:
    if mla.rope_head_dim % 2:
        even = nearest_of(range(max(2, mla.rope_head_dim - 1), mla.rope_head_dim + 2, 2), mla.rope_head_dim, 2)
        yield (
            "model.mla.rope_head_dim",
            f"rotary positions turn pairs: must be even, is {mla.rope_head_dim}; nearest: {even}",
        )
    if positions != "rope":
        yield "model.positions", f"latent attention needs rotary positions: rope, is {positions}"
