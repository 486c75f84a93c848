"""A preset: a shape, its published source, and its differences from the released model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.config.model import ModelConfig


@dataclass(frozen=True)
class Preset:
    """A known model."""

    model: ModelConfig
    """The shape. Positions are those of the released configuration; seq_len is the length of samples in the main phase
    of pre-training if it is published, else the released context."""
    source: str
    """Paper or report with its table or section, and the file that states the numbers."""
    hub: tuple[str, ...] = ()
    """Repositories on the Hugging Face hub with this shape: the base model first."""
    context: int = 0
    """The longest context in tokens of the released configuration; 0 means seq_len."""
    note: str = ""
    """Features of the model that the shape omits, and facts that no source confirms."""


def gpt_kind(layers: int, width: int, heads: int, *, vocab: int, seq_len: int, **more: Any) -> ModelConfig:
    """Returns a GPT-2 kind: LayerNorm, learned positions, GELU, biases, a tied head; `more` are other fields."""
    kind: dict[str, Any] = {"activation": "gelu_tanh"}
    return ModelConfig(
        n_layers=layers, d_model=width, n_heads=heads, vocab_size=vocab, seq_len=seq_len, **(kind | more)
    )


def llama_kind(
    layers: int,
    width: int,
    heads: int,
    *,
    kv_heads: int,
    d_ff: int,
    vocab: int,
    seq_len: int,
    rope_theta: float,
    **more: Any,
) -> ModelConfig:
    """Returns a Llama kind: RMSNorm, rotary positions, SwiGLU, no biases, an untied head; `more` are other fields."""
    kind: dict[str, Any] = {
        "norm": "rmsnorm",
        "positions": "rope",
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    }
    return ModelConfig(
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        n_kv_heads=kv_heads,
        d_ff=d_ff,
        vocab_size=vocab,
        seq_len=seq_len,
        rope_theta=rope_theta,
        **(kind | more),
    )
