"""OLMo 2: norms after each half of a layer, and of all queries and keys together."""

from __future__ import annotations

from phalanx.config.families.preset import Preset, llama_kind


def _olmo2(release: str, layers: int, width: int, heads: int, *, kv_heads: int, d_ff: int) -> Preset:
    shape = llama_kind(
        layers,
        width,
        heads,
        kv_heads=kv_heads,
        d_ff=d_ff,
        vocab=100352,
        seq_len=4096,
        rope_theta=500000.0,
        norm_place="after",
        qk_norm="width",
        norm_eps=1e-6,
    )
    return Preset(
        shape,
        "OLMo Team 2024 (arXiv 2501.00656), Table 1; olmo2_* of github.com/allenai/OLMo-core (fa6c501)",
        (f"allenai/OLMo-2-{release}", f"allenai/OLMo-2-{release}-Instruct"),
    )


OLMO: dict[str, Preset] = {
    "olmo2-1b": _olmo2("0425-1B", 16, 2048, 16, kv_heads=16, d_ff=8192),
    "olmo2-7b": _olmo2("1124-7B", 32, 4096, 32, kv_heads=32, d_ff=11008),
    "olmo2-13b": _olmo2("1124-13B", 40, 5120, 40, kv_heads=40, d_ff=13824),
    "olmo2-32b": _olmo2("0325-32B", 64, 5120, 40, kv_heads=8, d_ff=27648),
}
