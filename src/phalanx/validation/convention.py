"""The FLOPs that published TFLOP/s and MFU count: each source has its own convention, the same for both figures.

full              model FLOPs, attention as if there were no mask: PaLM (Chowdhery et al. 2022, appendix B), MaxText
                  before its change 1988, Korthikanti et al. 2022, Megatron-LM until 2025, dgxc-benchmarking
causal            model FLOPs, half of the attention: Megatron-LM and NeMo since 2025, Llama 3, dgxc-benchmarking since
                  July 2025
parameters        6 N + 12 layers × width × tokens of a sequence, with N all parameters, the embedding too:
                  llm-foundry (whose heads are tied), torchtitan in 2024
hardware          with full recomputation, so that blocks run their forward pass twice: Narayanan et al. 2021, equation
                  3, 96 B s l h² (1 + s/6h + V/16lh) for the GPT kind; bigscience after its correction
hardware_matrices its part of the blocks' matrices, 96 B s l h²: bigscience before its correction
hardware_eight    8 N, N as printed: bigscience's one-liners
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from phalanx.blocks.flops import (
    attention_flops_per_token,
    block_flops_per_token,
    head_flops_per_token,
    matrix_flops_per_token,
    train_flops_per_step,
)
from phalanx.blocks.parameters import count_active
from phalanx.config.cluster import Accelerator
from phalanx.config.model import ModelConfig
from phalanx.cost.spec import Products

Counts = Literal["full", "causal", "parameters", "hardware", "hardware_matrices", "hardware_eight"]


@dataclass(frozen=True)
class Convention:
    """A source's count of FLOPs, and the peak of its MFU."""

    counts: Counts = "full"
    """FLOPs that its TFLOP/s and its MFU count; no known source prints both from different counts."""
    narrow_peak: bool = False
    """Whether MFU of 8-bit and 4-bit runs is against the peak of these formats instead of that of bfloat16."""
    peaks: tuple[tuple[str, float], ...] = ()
    """Peaks that replace the data sheets': 16 bits in TFLOP/s by device name; the narrower formats have twice that."""


SOURCES: tuple[tuple[str, Convention], ...] = (
    ("under-reporting", Convention("hardware_matrices")),
    ("chronicles", Convention("hardware")),
    ("tr3m", Convention("hardware_eight")),
    ("tr8-104b", Convention("hardware_eight")),
    ("bigscience", Convention("hardware")),
    ("narayanan", Convention("hardware")),
    ("2104.04473", Convention("hardware")),
    ("llm-foundry", Convention("parameters", narrow_peak=True)),
    ("torchtitan", Convention("parameters")),
    (r"dgxc.*\(2025-(0[7-9]|1)|dgxc.*\(202[6-9]", Convention("causal", narrow_peak=True)),
    ("dgxc", Convention("full", narrow_peak=True, peaks=(("gb200", 2450),))),
    ("megatron-bridge", Convention("causal")),
    ("modelzoo", Convention("causal")),
    ("2407.21783", Convention("causal")),
    ("nemo", Convention("causal")),
)
"""Conventions by a pattern of the source or of its notes; the first match counts."""


def convention_of(description: str) -> Convention:
    """Returns the convention of a source from its name and notes in lower case; unknown ones count full attention."""
    return next((convention for pattern, convention in SOURCES if re.search(pattern, description)), Convention())


def flops_per_step(counts: Counts, model: ModelConfig, sequences: int, parameters: float = 0.0) -> float:
    """Returns the FLOPs of a step of `sequences` sequences on all devices; 0 `parameters` means to count them."""
    tokens = sequences * model.seq_len
    layers = range(model.n_layers)
    if counts in ("full", "causal"):
        return train_flops_per_step(model, sequences, attention=counts)
    if counts == "parameters":
        attention = 3 * sum(attention_flops_per_token(model, layer) for layer in layers)
        return tokens * (6 * count_active(model) + attention)
    if counts == "hardware":
        return tokens * (4 * sum(block_flops_per_token(model, i) for i in layers) + 3 * head_flops_per_token(model))
    if counts == "hardware_matrices":
        return tokens * 4 * sum(matrix_flops_per_token(model, i) for i in layers)
    return tokens * 8 * (parameters or count_active(model))


def peak_tflops(convention: Convention, device: Accelerator, products: Products) -> float:
    """Returns the peak of the source's MFU, in TFLOP/s."""
    sixteen = dict(convention.peaks).get(device.name) or device.bf16_tflops or device.fp16_tflops
    if products in ("fp8", "fp4") and convention.narrow_peak:
        return 2 * sixteen
    return sixteen
