"""Small models with the parts around attention that families add: norms after the halves, parallel blocks, gates of
other kinds, soft caps, scaled embeddings, biases of routers and experts, modules for further tokens."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.model import MLA, ModelConfig, MoE

LLAMA = ModelConfig(
    n_layers=2,
    d_model=24,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=40,
    seq_len=8,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
    tied=False,
)
OLMO_2 = replace(LLAMA, norm_place="after")
GEMMA_2 = replace(
    LLAMA,
    norm_place="both",
    activation="geglu",
    logit_softcap=3.0,
    scaled_embedding=True,
    tied=True,
)
NEOX = replace(LLAMA, norm="layernorm", activation="gelu", bias=True, parallel_block=True, n_kv_heads=4, rope_theta=1e4)
GPT_OSS = replace(
    LLAMA,
    bias=True,
    activation="swiglu_clamped",
    moe=MoE(n_experts=4, top_k=2, d_ff=16, router_bias=True, aux_loss=0.01),
)
NEOX_WITH_EXPERTS = replace(
    GPT_OSS,
    parallel_block=True,
    dropout=0.2,
    moe=MoE(n_experts=4, top_k=2, d_ff=16, router_bias=True, bias_balanced=True, n_shared=1, n_dense_layers=1),
)
GEMMA_WITH_EXPERTS = replace(GEMMA_2, dropout=0.2, bias=True, moe=MoE(n_experts=4, top_k=2, d_ff=16, capacity=1.5))
DEEPSEEK_WITH_MODULES = replace(
    LLAMA,
    n_layers=5,
    n_kv_heads=4,
    mtp=2,
    dropout=0.2,
    mla=MLA(q_rank=12, kv_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=6),
    moe=MoE(n_experts=4, top_k=2, d_ff=16, n_shared=1, n_dense_layers=1, router="sigmoid", bias_balanced=True),
)
STRUCTURES = {
    "olmo2": OLMO_2,
    "gemma2": GEMMA_2,
    "neox": NEOX,
    "gpt-oss": GPT_OSS,
    "neox with experts": NEOX_WITH_EXPERTS,
    "gemma2 with experts": GEMMA_WITH_EXPERTS,
    "further tokens": replace(LLAMA, n_layers=3, mtp=1, tied=True),
    "further tokens with experts": DEEPSEEK_WITH_MODULES,
}
