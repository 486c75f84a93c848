"""Every parameter of a model, by name and shape: a view of the operators' weights.

The torch module in `phalanx.model` has exactly these parameters (a test compares them), so counting, sharding, memory
and FLOPs are computed without building it. A linear layer's weight is (outputs, inputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from types import MappingProxyType

from phalanx.blocks.ends import embedding_weights, head_weights
from phalanx.blocks.kinds import BlockKind, block, block_kinds
from phalanx.blocks.lora import by_layer
from phalanx.blocks.operator import Weight, is_expert
from phalanx.blocks.place import Place
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
    every = tuple(weight for operator in block(Place(model), kind) for weight in operator.weights)
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
def _by_name(model: ModelConfig) -> Mapping[str, Weight]:
    """Returns every weight by its name within its block, or within the model."""
    every = [*embedding_weights(model, 1), *head_weights(model, 1)]
    for kind in dict.fromkeys(block_kinds(model)):
        every += block_weights(model, kind)
    return MappingProxyType({weight.name: weight for weight in every})


def weight_of(model: ModelConfig, name: str) -> Weight:
    """Returns how ranks divide the parameter `name`, such as "blocks.3.attn.wq.weight". Raises KeyError for a name that
    the model does not have."""
    parts = name.split(".", 2)
    return _by_name(model)[parts[2] if parts[0] == "blocks" else name]


def parameter_shapes(model: ModelConfig, vocab_size: int | None = None) -> Shapes:
    """Returns name and shape of every parameter, in the order of the module tree."""
    return {weight.name: weight.shape for weight in weights(model, vocab_size)}


def block_shapes(model: ModelConfig, layer: int) -> Shapes:
    """Returns name (without the leading `blocks.LAYER.`) and shape of every parameter of one block."""
    return {weight.name: weight.shape for weight in block_weights(model, block_kinds(model)[layer])}


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


def count_active(model: ModelConfig) -> int:
    """Returns the parameters that one token uses: as `count`, but only the top_k routed experts that the token
    visits."""
    return sum(active_size(weight.name, weight.shape, model) for weight in weights(model))


def active_size(name: str, shape: tuple[int, ...], model: ModelConfig) -> int:
    """Returns the elements of one parameter that one token uses."""
    return prod((model.moe.top_k, *shape[1:])) if is_expert(name) else prod(shape)
