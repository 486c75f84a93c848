"""Every parameter of a model, by name and shape: a view of the operators' weights.

The torch module in `phalanx.model` has exactly these parameters (a test compares them), so counting, sharding, memory
and FLOPs are computed without building it. A linear layer's weight is (outputs, inputs).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Literal

from phalanx.blocks.kinds import BlockKind, block, block_kinds
from phalanx.blocks.operator import Place, Weight, is_expert
from phalanx.blocks.residual import by_layer, embedding_weights, head_rows, head_weights, layer_projection_weights
from phalanx.blocks.sparse import unneeded_flops
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError

Shapes = dict[str, tuple[int, ...]]


def vocabulary(model: ModelConfig, vocab_size: int | None = None) -> int:
    """Returns the number of tokens in the vocabulary: `vocab_size` (the tokenizer's) if given, else the model's own.

    Raises JobError if neither is known."""
    size = vocab_size or model.vocab_size
    if not size:
        raise JobError(
            "model.vocab_size is 0, which means the tokenizer's vocabulary, and no tokenizer is at hand here: "
            "set model.vocab_size to a number of tokens"
        )
    return size


@lru_cache(maxsize=1024)
def block_weights(model: ModelConfig, kind: BlockKind) -> tuple[Weight, ...]:
    """Returns the weights of a block of one kind, in the order of its modules."""
    operators = block(Place(model), kind)
    every = tuple(weight for operator in operators for weight in operator.weights if not weight.shared)
    return by_layer(every) if model.lora.rank else every


def weights(model: ModelConfig, vocab_size: int | None = None) -> Iterator[Weight]:
    """Yields every parameter of the model under its full name, in the order of the module tree. A tied head has no
    entry of its own."""
    vocab = vocabulary(model, vocab_size)
    yield from embedding_weights(model, vocab)
    for layer, kind in enumerate(block_kinds(model)):
        for weight in block_weights(model, kind):
            yield weight._replace(name=f"blocks.{layer}.{weight.name}")
    yield from head_weights(model, vocab)


@lru_cache(maxsize=256)
def _by_name(model: ModelConfig) -> Mapping[str, Mapping[str, Weight]]:
    """Returns every weight by its name within its block, by layer, and of no layer by its name within the model."""
    kinds, ends = block_kinds(model), (*embedding_weights(model, 1), *head_weights(model, 1))
    named = {kind: {weight.name: weight for weight in block_weights(model, kind)} for kind in dict.fromkeys(kinds)}
    return {"": {weight.name: weight for weight in ends}} | {str(n): named[kind] for n, kind in enumerate(kinds)}


@lru_cache(maxsize=1024)
def is_narrow(model: ModelConfig, name: str) -> bool:
    """Returns whether the parameter `name` is a matrix that train.precision=fp8 multiplies in 8 bits, if its sizes
    allow it: those of linear layers in blocks, without routers."""
    part, *rest = name.split(".", 2)
    return part == "blocks" and rest[1] in _narrow(model)


@lru_cache(maxsize=256)
def _narrow(model: ModelConfig) -> frozenset[str]:
    operators = (operator for kind in dict.fromkeys(block_kinds(model)) for operator in block(Place(model), kind))
    every = (weight for operator in operators if not operator.sixteen for weight in operator.weights)
    return frozenset(weight.name for weight in every if weight.is_matrix)


def weight_of(model: ModelConfig, name: str) -> Weight:
    """Returns how ranks divide the parameter `name`, such as "blocks.3.attn.wq.weight". Raises KeyError for a name that
    the model does not have."""
    parts = name.split(".", 2)
    layer, inner = parts[1:] if parts[0] == "blocks" else ("", name)
    return _by_name(model)[layer][inner]


def parameter_shapes(model: ModelConfig, vocab_size: int | None = None) -> Shapes:
    """Returns name and shape of every parameter, in the order of the module tree."""
    return {weight.name: weight.shape for weight in weights(model, vocab_size)}


def block_shapes(model: ModelConfig, layer: int) -> Shapes:
    """Returns name (without the leading `blocks.LAYER.`) and shape of every parameter of one block."""
    return {weight.name: weight.shape for weight in block_weights(model, block_kinds(model)[layer])}


@lru_cache(maxsize=256)
def count(model: ModelConfig, vocab_size: int | None = None) -> int:
    """Returns the parameters of the model: a tied head once, learned positions included."""
    return sum(prod(weight.shape) for weight in weights(model, vocab_size))


def trained_shapes(model: ModelConfig, vocab_size: int | None = None) -> Shapes:
    """Returns name and shape of every parameter that training changes: with adapters, theirs alone."""
    return {weight.name: weight.shape for weight in weights(model, vocab_size) if not weight.frozen}


def count_trained(model: ModelConfig, vocab_size: int | None = None) -> int:
    """Returns the parameters that training changes."""
    return sum(map(prod, trained_shapes(model, vocab_size).values()))


def trained_text(model: ModelConfig, vocab_size: int | None = None) -> str:
    """Returns how many parameters adapters have, in words: "1,024 of 98,304 parameters (1.04%)"."""
    every, trained = count(model, vocab_size), count_trained(model, vocab_size)
    return f"{trained:,} of {every:,} parameters ({trained / every:.2%})"


@lru_cache(maxsize=256)
def count_active(model: ModelConfig) -> int:
    """Returns the parameters that one token uses: as `count`, but only the top_k routed experts that the token
    visits."""
    return sum(active_size(weight.name, weight.shape, model) for weight in weights(model))


def active_size(name: str, shape: tuple[int, ...], model: ModelConfig) -> int:
    """Returns the elements of one parameter that one token uses."""
    return prod((model.moe.top_k, *shape[1:])) if is_expert(name) else prod(shape)


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
    ends = (1 + model.mtp) * head_flops_per_token(model, vocab_size) + projection_flops_per_token(model)
    return blocks + model.seq_len * ends


def train_flops_per_token(model: ModelConfig) -> int:
    """Returns the FLOPs per token of forward and backward pass: three times the forward pass, less the weight gradients
    of frozen matrices."""
    spared = _frozen_flops_per_token(model, None) + _unneeded_flops(model, "full") // model.seq_len
    return (1 + BACKWARD_PER_FORWARD) * forward_flops_per_token(model) - spared


def train_flops_per_step(
    model: ModelConfig, sequences: int, vocab_size: int | None = None, attention: Attention = "full"
) -> int:
    """Returns the FLOPs of one optimizer step over a global batch of `sequences`, on all devices together."""
    forward = forward_flops_per_sequence(model, vocab_size, attention)
    spared = model.seq_len * _frozen_flops_per_token(model, vocab_size) + _unneeded_flops(model, attention)
    return sequences * ((1 + BACKWARD_PER_FORWARD) * forward - spared)


def _unneeded_flops(model: ModelConfig, attention: Attention) -> int:
    """Returns the FLOPs over a sequence of gradients that indexers do not need; 0 without them."""
    layers = sum(kind.attention == "sparse" for kind in block_kinds(model))
    return layers and layers * unneeded_flops(model, halves=attention == "causal")


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


def repeated_flops_per_sequence(model: ModelConfig, layer: int, sp: bool) -> int:
    """Returns the forward FLOPs over a sequence of the products that recompute=mlp repeats in one block."""
    operators = block(Place(model, sp=sp), block_kinds(model)[layer])
    return model.seq_len * sum(_flops_of(model, each.weights) for each in operators if each.repeated)


def _flops_of(model: ModelConfig, weights: Iterable[Weight]) -> int:
    """Returns the FLOPs per token of one product with each of the matrices among these weights."""
    return 2 * sum(active_size(weight.name, weight.shape, model) for weight in weights if weight.is_matrix)


def _frozen_flops_per_token(model: ModelConfig, vocab_size: int | None) -> int:
    """Returns the FLOPs per token of one product with each frozen matrix."""
    if not model.freezes:
        return 0
    kinds = Counter(block_kinds(model)).items()
    blocks = sum(n * _flops_of(model, (w for w in block_weights(model, kind) if w.frozen)) for kind, n in kinds)
    return blocks + head_flops_per_token(model, vocab_size) + projection_flops_per_token(model)


def attention_flops_per_token(model: ModelConfig, layer: int) -> int:
    """Returns the forward FLOPs per token of one layer's attention: the mean over a sequence, rounded down."""
    return attention_flops_per_sequence(model, layer) // model.seq_len


def attention_flops_per_sequence(model: ModelConfig, layer: int, attention: Attention = "full") -> int:
    """Returns the forward FLOPs of one layer's scores (queries by keys) and of their product with the values, over a
    sequence; of a layer with a state, those of its recurrence."""
    kind = block_kinds(model)[layer]
    flops = _core_flops(model, kind)
    return (flops if attention == "full" else flops // 2) + _scan_flops(model, kind)


@lru_cache(1024)
def _core_flops(model: ModelConfig, kind: BlockKind) -> int:
    """Returns those that a causal mask halves."""
    operators = block(Place(model), kind)
    scores = sum(int(each.fused.forward) for each in operators if each.fused and each.fused.causal)
    return scores + sum(each.core.flops for each in operators if each.core and not each.core.chosen)


@lru_cache(1024)
def _scan_flops(model: ModelConfig, kind: BlockKind) -> int:
    """Returns those of recurrences and of chosen keys, without a mask."""
    operators = block(Place(model), kind)
    chosen = sum(each.core.flops for each in operators if each.core and each.core.chosen)
    return chosen + sum(int(each.fused.forward) for each in operators if each.fused and not each.fused.causal)


def head_flops_per_token(model: ModelConfig, vocab_size: int | None = None) -> int:
    """Returns the forward FLOPs per token of the head, tied or not."""
    return 2 * model.d_model * head_rows(model, vocabulary(model, vocab_size))


def projection_flops_per_token(model: ModelConfig) -> int:
    """Returns the forward FLOPs per token of the projection of the embedding for all layers (model.layer_embedding)."""
    return _flops_of(model, layer_projection_weights(model))
