"""Models for tests, examples and experiments; their vocabulary is the tokenizer's."""

from __future__ import annotations

from phalanx.config.families.preset import Preset, llama_kind
from phalanx.config.model import MLA, ModelConfig, MoE

_HERE = "this project; small enough for a test to train it"

SMALL: dict[str, Preset] = {
    "baby": Preset(
        ModelConfig(n_layers=6, d_model=384, n_heads=6, seq_len=256, bias=False, dropout=0.2),
        "config/train_shakespeare_char.py of github.com/karpathy/nanoGPT",
    ),
    "tiny": Preset(ModelConfig(n_layers=2, d_model=64, n_heads=4, seq_len=64), _HERE),
    "tiny-moe": Preset(
        llama_kind(
            2,
            64,
            4,
            kv_heads=2,
            d_ff=128,
            vocab=0,
            seq_len=64,
            rope_theta=10000.0,
            moe=MoE(n_experts=8, top_k=2, aux_loss=0.01),
        ),
        f"{_HERE}, of Mixtral's kind",
    ),
    "tiny-deepseek": Preset(
        llama_kind(
            3,
            64,
            4,
            kv_heads=4,
            d_ff=192,
            vocab=0,
            seq_len=64,
            rope_theta=10000.0,
            moe=MoE(
                n_experts=8,
                top_k=2,
                d_ff=64,
                n_shared=1,
                n_dense_layers=1,
                router="sigmoid",
                aux_loss=0.0001,
                bias_balanced=True,
            ),
            mla=MLA(q_rank=32, kv_rank=16, rope_head_dim=8, nope_head_dim=16, v_head_dim=16, norm_eps=1e-6),
        ),
        f"{_HERE}, of DeepSeek-V3's kind",
    ),
}
