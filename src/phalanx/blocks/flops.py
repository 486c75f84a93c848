"""Floating-point operations of the matrix multiplications of a model, exactly.

A multiplication of (m × k) by (k × n) counts 2 m k n. Everything else (norms, softmax, activations, embedding look-up,
optimizer) counts nothing, as in the papers and in `torch.utils.flop_counter`, against which a test compares.

Attention scores and their product with the values are counted in one of two ways:
- `full`: every query with every key, seq_len × seq_len, as if there were no causal mask; in layers with a window the
  pairs less than a window apart. Model FLOPs utilisation as PaLM defines it (Chowdhery et al. 2022, appendix B: 6 N +
  12 L H Q T per token) and as torchtitan and Megatron-LM report it counts so; so does every `mfu` that Phalanx prints.
- `causal`: half of that, the work that a kernel cannot avoid.

Frozen matrices, those beside adapters (blocks/lora.py), have no weight gradients to compute.

Model FLOPs (`train_flops_*`) leave recomputation out; `phalanx.cost.flops` adds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from phalanx.blocks.kinds import BlockKind, block, block_kinds
from phalanx.blocks.operator import Weight
from phalanx.blocks.parameters import active_size, block_weights, vocabulary
from phalanx.blocks.place import Place
from phalanx.config.model import ModelConfig

Attention = Literal["full", "causal"]

BACKWARD_PER_FORWARD = 2
"""Multiplications in the backward pass for each one in the forward pass: one for the gradient of each factor."""


def forward_flops_per_token(model: ModelConfig, attention: Attention = "full") -> int:
    """Returns the forward FLOPs per token of a sequence: the mean over its tokens, rounded down."""
    return forward_flops_per_sequence(model, None, attention) // model.seq_len


@lru_cache(4096)
def forward_flops_per_sequence(model: ModelConfig, vocab_size: int | None, attention: Attention) -> int:
    """Returns the FLOPs of the forward pass over one sequence."""
    blocks = sum(block_flops_per_sequence(model, layer, attention) for layer in range(model.n_layers))
    return blocks + model.seq_len * head_flops_per_token(model, vocab_size)


def train_flops_per_token(model: ModelConfig) -> int:
    """Returns the FLOPs per token of forward and backward pass: three times the forward pass, less the weight gradients
    of frozen matrices."""
    return (1 + BACKWARD_PER_FORWARD) * forward_flops_per_token(model) - _frozen_flops_per_token(model, None)


def train_flops_per_step(
    model: ModelConfig, sequences: int, vocab_size: int | None = None, attention: Attention = "full"
) -> int:
    """Returns the FLOPs of one optimizer step over a global batch of `sequences`, on all devices together."""
    forward = forward_flops_per_sequence(model, vocab_size, attention)
    frozen = model.seq_len * _frozen_flops_per_token(model, vocab_size)
    return sequences * ((1 + BACKWARD_PER_FORWARD) * forward - frozen)


def block_flops_per_token(model: ModelConfig, layer: int) -> int:
    """Returns the forward FLOPs per token of one block: the mean over a sequence, rounded down."""
    return block_flops_per_sequence(model, layer) // model.seq_len


def block_flops_per_sequence(model: ModelConfig, layer: int, attention: Attention = "full") -> int:
    """Returns the forward FLOPs of one block over a sequence: its matrices (of the routed experts those that a token
    visits) and its attention."""
    return model.seq_len * matrix_flops_per_token(model, layer) + attention_flops_per_sequence(model, layer, attention)


@lru_cache(1024)
def matrix_flops_per_token(model: ModelConfig, layer: int) -> int:
    """Returns the forward FLOPs per token of the weight matrices of one block."""
    return _flops_of(model, block_weights(model, block_kinds(model)[layer]))


def _flops_of(model: ModelConfig, weights: Iterable[Weight]) -> int:
    """Returns the FLOPs per token of one product with each of the matrices among these weights."""
    return 2 * sum(active_size(weight.name, weight.shape, model) for weight in weights if weight.is_matrix)


def _frozen_flops_per_token(model: ModelConfig, vocab_size: int | None) -> int:
    """Returns the FLOPs per token of one product with each frozen matrix: none without adapters."""
    if not model.lora.rank:
        return 0
    kinds = Counter(block_kinds(model)).items()
    blocks = sum(n * _flops_of(model, (w for w in block_weights(model, kind) if w.frozen)) for kind, n in kinds)
    return blocks + head_flops_per_token(model, vocab_size)


def attention_flops_per_token(model: ModelConfig, layer: int) -> int:
    """Returns the forward FLOPs per token of one layer's attention: the mean over a sequence, rounded down."""
    return attention_flops_per_sequence(model, layer) // model.seq_len


def attention_flops_per_sequence(model: ModelConfig, layer: int, attention: Attention = "full") -> int:
    """Returns the forward FLOPs of one layer's scores (queries by keys) and of their product with the values, over a
    sequence."""
    flops = _core_flops(model, block_kinds(model)[layer])
    return flops if attention == "full" else flops // 2


@lru_cache(1024)
def _core_flops(model: ModelConfig, kind: BlockKind) -> int:
    return sum(operator.core.flops for operator in block(Place(model), kind) if operator.core)


def head_flops_per_token(model: ModelConfig, vocab_size: int | None = None) -> int:
    """Returns the forward FLOPs per token of the head, tied or not."""
    return 2 * model.d_model * vocabulary(model, vocab_size)
