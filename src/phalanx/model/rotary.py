"""Rotary position embedding (Su et al. 2021), with linear and Llama 3.1 frequency scaling.

Pairs of elements half a head apart are rotated together, the convention of Hugging Face's Llama; Meta's own checkpoints
pair neighbours and need their query and key rows permuted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.config.model import ModelConfig


def rotary_frequencies(model: ModelConfig, device: torch.device) -> Tensor:
    """Returns radians per position of each rotated pair, (rotary_size / 2,), in float64."""
    size = model.rotary_size
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=device) / size
    frequencies = model.rope_theta**-exponents
    scaling = model.rope_scaling
    if scaling.factor == 1:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    # Llama 3.1: keep frequencies above high_freq_factor turns within the original context, stretch those
    # below low_freq_factor turns, and interpolate in between (meta-llama/llama-models, apply_scaling).
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(stretched, frequencies, kept.clamp(0, 1))


def rotary_table(model: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns cosines and sines of `positions` (seq,): (2, seq, 1, rotary_size / 2), in at least float32.

    It is computed in each forward pass: the cost is negligible, and a table in a buffer would be lost when leaving the
    meta device and rounded by a cast to bfloat16."""
    angles = torch.outer(positions.double(), rotary_frequencies(model, positions.device))
    table = torch.stack((angles.cos(), angles.sin())).unsqueeze(2)
    return table.to(torch.promote_types(dtype, torch.float32))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates queries or keys `x` (batch, seq, heads, rotary_size) to their positions."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
