"""Rotary position embedding (Su et al. 2021), with linear, Llama 3.1 and YaRN frequency scaling.

Pairs of elements half a head apart are rotated together, the convention of Hugging Face's Llama; Meta's own checkpoints
pair neighbours and need their query and key rows permuted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.config.model import ModelConfig


def rotary_frequencies(model: ModelConfig, device: torch.device, *, windowed: bool = False) -> Tensor:
    """Returns radians per position of each rotated pair, (rotary_size / 2,), in float64; `windowed`: in layers with a
    window."""
    size = model.rotary_size
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=device) / size
    if windowed and model.window_rope_theta:
        return model.window_rope_theta**-exponents
    frequencies = model.rope_theta**-exponents
    scaling = model.rope_scaling
    if scaling.factor == 1:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    if scaling.kind == "yarn":
        return torch.lerp(stretched, frequencies, _kept_by_yarn(model, device))
    # Llama 3.1: keep frequencies above high_freq_factor turns within the original context, stretch those
    # below low_freq_factor turns, and interpolate in between (meta-llama/llama-models, apply_scaling).
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(stretched, frequencies, kept.clamp(0, 1))


def _kept_by_yarn(model: ModelConfig, device: torch.device) -> Tensor:
    """Returns how much of each pair's own frequency YaRN keeps, from 1 to 0, (rotary_size / 2,): linear in the pair's
    number, between those that turn beta_fast and beta_slow times within the original context (Peng et al. 2023,
    section 3.2, as its released code)."""
    scaling, size = model.rope_scaling, model.rotary_size

    def pair_of(turns: float) -> float:
        return size * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    pairs = torch.arange(size // 2, dtype=torch.float64, device=device)
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)


def rotary_magnitude(model: ModelConfig, *, windowed: bool = False) -> float:
    """Returns the factor of rotated queries and keys; `windowed`: in layers with a window. YaRN's default is that of
    Peng et al. 2023, section 3.4."""
    scaling = model.rope_scaling
    if scaling.kind != "yarn" or scaling.factor == 1 or (windowed and model.window_rope_theta):
        return 1.0
    return scaling.magnitude or 0.1 * math.log(scaling.factor) + 1


def rotary_table(model: ModelConfig, positions: Tensor, dtype: torch.dtype, *, windowed: bool = False) -> Tensor:
    """Returns cosines and sines of `positions` (seq,): (2, seq, 1, rotary_size / 2), in at least float32; of positions
    (batch, seq): (2, batch, seq, 1, rotary_size / 2). `windowed`: those of layers with a window.

    It is computed in each forward pass: the cost is negligible, and a table in a buffer would be lost when leaving the
    meta device and rounded by a cast to bfloat16."""
    angles = positions.double().unsqueeze(-1) * rotary_frequencies(model, positions.device, windowed=windowed)
    table = torch.stack((angles.cos(), angles.sin())).unsqueeze(-2)
    magnitude = rotary_magnitude(model, windowed=windowed)
    if magnitude != 1:
        table *= magnitude
    return table.to(torch.promote_types(dtype, torch.float32))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates queries or keys `x` (batch, seq, heads, head_size) to their positions: the first rotary_size elements of
    each head."""
    cos, sin = table
    pairs = cos.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*turned, rest) if rest.shape[-1] else turned, dim=-1).to(x.dtype)
