"""Smaller models of the same kind, which phalanx verify compares in place of large ones: the fields of each kind of
layer."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.model import MLA, ModelConfig, MoE

SMALL_EXPERTS = 8
SMALL_Q_RANK, SMALL_KV_RANK, SMALL_PART = 16, 8, 4
"""Latent attention: the ranks of its compressions, and the size of each part of a head."""


def alike(number: int, at_least: int, max_ranks: int) -> int:
    """Returns the smallest number from `at_least` on with the same divisors among 2 to `max_ranks` as `number`."""
    ranks = range(2, max_ranks + 1)
    return next(n for n in range(at_least, number + 1) if all((n % r == 0) == (number % r == 0) for r in ranks))


def fewer_experts(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    """Returns `small` with fewer and narrower experts than `model`, in at least one layer. The same fraction of their
    groups is chosen from, and the groups hold more experts than a token visits, so that the choice is not trivial."""
    width = alike(model.expert_ff_size, min(model.expert_ff_size, small.d_model // 4), max_ranks)
    dense = min(model.moe.n_dense_layers, small.n_layers - 1)
    return replace(small, moe=_fewer(replace(model.moe, n_dense_layers=dense, d_ff=width), max_ranks))


def _fewer(moe: MoE, max_ranks: int) -> MoE:
    n = alike(moe.n_experts, min(moe.n_experts, SMALL_EXPERTS), max_ranks)
    if n == moe.n_experts:
        return moe
    groups = next(groups for groups in range(min(moe.n_groups, n // 2), 0, -1) if n % groups == 0)
    top_groups = -(-moe.top_groups * groups // moe.n_groups)
    top_k = min(moe.top_k, max(2, n // groups * top_groups // 2))
    return replace(moe, n_experts=n, n_groups=groups, top_groups=top_groups, top_k=top_k)


def smaller_latents(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    """Returns `small` with lower ranks of latent attention's compressions, and smaller heads, than `model`."""
    mla = model.mla
    latents = MLA(
        q_rank=min(mla.q_rank, SMALL_Q_RANK),
        kv_rank=min(mla.kv_rank, SMALL_KV_RANK),
        rope_head_dim=min(mla.rope_head_dim, SMALL_PART),
        nope_head_dim=min(mla.nope_head_dim, SMALL_PART),
        v_head_dim=min(mla.v_head_dim, SMALL_PART),
    )
    return replace(small, mla=latents)
