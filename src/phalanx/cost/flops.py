"""Hardware FLOPs of a step: model FLOPs and what a layout recomputes.

Model FLOPs over time give MFU, hardware FLOPs HFU (Korthikanti et al. 2022, section 6.3).
"""

from __future__ import annotations

from functools import lru_cache

from phalanx.blocks.flops import attention_flops_per_sequence, block_flops_per_sequence, train_flops_per_step
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.recompute import modes, written


def hardware_flops_per_step(model: ModelConfig, layout: Layout, sequences: int) -> int:
    """Returns the FLOPs of one optimizer step with what the layout computes twice: of each block the forward pass
    (full), or its attention (selective); with products no product. Raises JobError where `layout.recompute_cut` does
    not fit the model."""
    repeated = _repeated_flops_per_sequence(model, written(layout))
    return train_flops_per_step(model, sequences) + sequences * repeated


@lru_cache(4096)
def _repeated_flops_per_sequence(model: ModelConfig, recomputes: str) -> int:
    flops = 0
    for layer, mode in enumerate(modes(recomputes, model.n_layers)):
        if mode == "full":
            flops += block_flops_per_sequence(model, layer)
        elif mode == "selective":
            flops += attention_flops_per_sequence(model, layer)
    return flops
