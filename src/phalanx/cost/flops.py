"""Hardware FLOPs of a step: model FLOPs and what a layout computes again.

Model FLOPs over time give MFU, hardware FLOPs HFU (Korthikanti et al. 2022, section 6.3).
"""

from __future__ import annotations

from functools import lru_cache

from phalanx.blocks.flops import (
    Attention,
    attention_flops_per_sequence,
    block_flops_per_sequence,
    train_flops_per_step,
)
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.recompute import modes, written


@lru_cache(4096)
def hardware_flops_per_step(
    model: ModelConfig,
    layout: Layout,
    sequences: int,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    attention: Attention = "full",
) -> int:
    """FLOPs of one optimizer step with what the layout computes twice: of each block the forward pass (full), or its
    attention (selective). Raises JobError where `layout.recompute_cut` does not fit the model."""
    again = _repeated_flops_per_sequence(model, written(layout), seq_len, attention)
    return train_flops_per_step(model, sequences, vocab_size, seq_len, attention) + sequences * again


@lru_cache(4096)
def _repeated_flops_per_sequence(model: ModelConfig, recomputes: str, seq_len: int | None, attention: Attention) -> int:
    found = 0
    for layer, mode in enumerate(modes(recomputes, model.n_layers)):
        if mode == "full":
            found += block_flops_per_sequence(model, layer, seq_len, attention)
        elif mode == "selective":
            found += attention_flops_per_sequence(model, seq_len, attention)
    return found
