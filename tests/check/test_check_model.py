from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check.job import out_of_range
from phalanx.check.model import model_problems
from phalanx.config.model import MLA, ModelConfig, MoE, RopeScaling
from phalanx.config.presets import PRESETS
from phalanx.techniques.technique import Problem

_ROPE = ModelConfig(positions="rope")
_EXPERTS = MoE(n_experts=8, top_k=2)
_LATENT = MLA(kv_rank=16)


def problems(model: ModelConfig) -> list[Problem]:
    """Returns the fields out of their ranges or, where there are none, what is wrong between fields."""
    return list(out_of_range(model, "model.")) or list(model_problems(model))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_legal(name: str):
    assert problems(PRESETS[name]) == []


@pytest.mark.parametrize(
    ("moe", "path", "message"),
    [
        ({"top_k": 9}, "top_k", "must lie between 1 and n_experts 8, is 9; nearest top_k: 8"),
        ({"top_k": 0}, "top_k", "must be at least 1, is 0"),
        (
            {"top_k": 1},
            "renormalise",
            "with top_k 1 the gate is always 1 and the router gets no gradient from the loss; nearest legal: "
            "renormalise=false",
        ),
        ({"n_groups": 3}, "n_groups", "n_experts 8 / n_groups 3 is not an integer; nearest n_groups: 1, 2, 4"),
        ({"n_groups": 0}, "n_groups", "must be at least 1, is 0"),
        (
            {"n_groups": 4, "top_groups": 5},
            "top_groups",
            "must lie between 1 and n_groups 4, is 5; nearest top_groups: 4",
        ),
        ({"n_groups": 4, "top_groups": 0}, "top_groups", "must be at least 1, is 0"),
        (
            {"n_groups": 4, "top_groups": 1, "top_k": 3},
            "top_groups",
            "top_groups 1 × (n_experts 8 / n_groups 4) = 2 experts to choose from, fewer than top_k 3; nearest "
            "top_groups: 2, 3, 4",
        ),
        ({"capacity": -0.5}, "capacity", "must not be negative, is -0.5"),
        ({"aux_loss": -1.0}, "aux_loss", "must not be negative, is -1.0"),
        ({"z_loss": -1.0}, "z_loss", "must not be negative, is -1.0"),
        ({"n_shared": -1}, "n_shared", "must not be negative, is -1"),
        ({"d_ff": -1}, "d_ff", "must not be negative, is -1"),
        ({"n_dense_layers": -1}, "n_dense_layers", "must not be negative, is -1"),
        ({"n_dense_layers": 5}, "n_dense_layers", "is 5, more than the model's n_layers 4"),
        ({"route_scale": 0.0}, "route_scale", "must be above 0, is 0.0"),
        (
            {"bias_balanced": True, "bias_rate": 0.0},
            "bias_rate",
            "must be above 0 with bias_balanced, is 0.0",
        ),
        ({"n_experts": -1}, "n_experts", "must not be negative, is -1"),
    ],
)
def test_experts_that_make_no_sense(moe: dict[str, float], path: str, message: str):
    model = replace(_ROPE, moe=replace(_EXPERTS, **moe))
    assert problems(model) == [(f"model.moe.{path}", message)]


@pytest.mark.parametrize(
    ("mla", "path", "message"),
    [
        ({"q_rank": -1}, "q_rank", "must not be negative, is -1"),
        ({"kv_rank": -1}, "kv_rank", "must not be negative, is -1"),
        ({"rope_head_dim": 0}, "rope_head_dim", "must be at least 1, is 0"),
        (
            {"rope_head_dim": 7},
            "rope_head_dim",
            "rotary positions turn pairs: must be even, is 7; nearest rope_head_dim: 6, 8",
        ),
        (
            {"rope_head_dim": 1},
            "rope_head_dim",
            "rotary positions turn pairs: must be even, is 1; nearest rope_head_dim: 2",
        ),
        ({"nope_head_dim": 0}, "nope_head_dim", "must be at least 1, is 0"),
        ({"v_head_dim": 0}, "v_head_dim", "must be at least 1, is 0"),
    ],
)
def test_latent_attention_that_makes_no_sense(mla: dict[str, int], path: str, message: str):
    assert problems(replace(_ROPE, mla=replace(_LATENT, **mla))) == [(f"model.mla.{path}", message)]


def test_windows_that_make_no_sense():
    assert problems(replace(_ROPE, window=-1)) == [("model.window", "must not be negative, is -1")]
    assert problems(replace(_ROPE, window=_ROPE.seq_len + 1)) == []
    assert problems(replace(_ROPE, window=7, mla=_LATENT)) == []


def test_latent_attention_needs_rotary_positions():
    assert list(model_problems(ModelConfig(mla=_LATENT))) == [
        ("model.positions", "latent attention needs rotary positions: rope, is learned")
    ]


def test_what_is_switched_off_is_not_looked_at():
    assert list(model_problems(ModelConfig(moe=MoE(top_k=0, n_groups=0), mla=MLA(rope_head_dim=3)))) == []


@given(
    n_experts=st.integers(1, 32),
    top_k=st.integers(-1, 40),
    n_groups=st.integers(-1, 40),
    top_groups=st.integers(-1, 40),
)
def test_what_is_legal_can_be_routed(n_experts: int, top_k: int, n_groups: int, top_groups: int):
    moe = MoE(n_experts=n_experts, top_k=top_k, n_groups=n_groups, top_groups=top_groups, renormalise=False)
    routable = (
        1 <= top_k <= n_experts
        and n_groups >= 1
        and n_experts % n_groups == 0
        and 1 <= top_groups <= n_groups
        and top_groups * (n_experts // n_groups) >= top_k
    )
    assert (not problems(replace(_ROPE, moe=moe))) == routable


@pytest.mark.parametrize(
    ("fields", "path", "message"),
    [
        (
            {"full_every": 2},
            "full_every",
            "every layer attends to all keys without a window, is 2; nearest legal: full_every=0, or a window above 0",
        ),
        (
            {"window_rope_theta": 100.0},
            "window_rope_theta",
            "is that of layers with a window, and there are none, is 100; nearest legal: 0, or a window above 0",
        ),
        (
            {"qk_norm": "width"},
            "qk_norm",
            "norms over all heads are RMS norms, norm is layernorm; nearest legal: norm=rmsnorm, or qk_norm=head",
        ),
        (
            {"head_dim": 7},
            "head_dim",
            "rotary positions turn pairs: head_size must be even, is 7; nearest head_dim: 6, 8",
        ),
        (
            {"rotary_fraction": 0.3},
            "rotary_fraction",
            "rotary positions turn pairs: head_size 32 × 0.3 = 9 must be even and above 0; nearest: 0.25, 0.3125",
        ),
        (
            {"rope_scaling": RopeScaling(kind="yarn", factor=2.0, beta_fast=1.0, beta_slow=4.0)},
            "rope_scaling.beta_fast",
            "must be at least beta_slow 4, is 1; nearest legal: the usual beta_fast=32, beta_slow=1",
        ),
        (
            {"rope_scaling": RopeScaling(kind="yarn", factor=2.0), "rope_theta": 1.0},
            "rope_theta",
            "yarn needs frequencies that fall from pair to pair: must be above 1, is 1",
        ),
        (
            {"mla": _LATENT, "qk_norm": "head"},
            "qk_norm",
            "latent attention has norms of its own, is head; nearest legal: none",
        ),
        ({"mla": _LATENT, "sinks": True}, "sinks", "latent attention has no sinks; nearest legal: sinks=false"),
        (
            {"mla": _LATENT, "rotary_fraction": 0.5},
            "rotary_fraction",
            "latent attention turns rope_head_dim elements of a head, is 0.5; nearest legal: 1",
        ),
    ],
)
def test_parts_of_attention_that_do_not_fit(fields, path, message):
    assert problems(replace(_ROPE, **fields)) == [(f"model.{path}", message)]


def test_what_is_switched_off_is_no_problem():
    assert problems(replace(_ROPE, rope_scaling=RopeScaling(kind="yarn", beta_fast=1.0, beta_slow=4.0))) == []
    assert problems(ModelConfig(head_dim=7)) == []


@pytest.mark.parametrize("place", ["after", "both"])
def test_a_parallel_block_has_no_norms_after_its_halves(place: str):
    assert problems(replace(_ROPE, parallel_block=True, norm_place=place)) == [
        (
            "model.norm_place",
            "a parallel block adds the outputs of attention and MLP before one sum over tensor ranks, so neither can "
            f"be normalised by itself: must be before, is {place}; nearest legal: before, or parallel_block=false",
        )
    ]
    assert problems(replace(_ROPE, parallel_block=True)) == []
