"""The operators between the matrices: norms, residual sums, and the messages on and off the residual stream.

Tensor parallelism: an all-reduce of the residual stream after each half of a block in the forward pass, and before it
in the backward pass (Shoeybi et al. 2019, section 3); with sequence parallelism each is an all-gather and a
reduce-scatter (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from phalanx.blocks.operator import PARTIAL, PLAIN, Gradient, MemoryBound, Message, Operator, SavedTensor, Weight
from phalanx.blocks.place import Place
from phalanx.config.model import ModelConfig


def norm(place: Place, name: str, *, first: bool = False) -> Operator:
    """Returns a norm before or after a half of a block, the `first` of the block or another. It reads and writes the
    stream; backward it reads the gradient and the input and writes a gradient.

    In a parallel block every tensor rank normalises all tokens, for its own heads and columns: both norms read one
    input, and each rank computes a part of their weights' gradients."""
    model, together = place.model, place.model.parallel_block
    numbers = place.hidden / (1 if together else place.token_share)
    stream = model.d_model * place.width
    saved = SavedTensor(name, stream, "whole" if together else "tokens")
    return Operator(
        name,
        norm_weights(model, name, model.d_model, PARTIAL if together else PLAIN),
        memory_bound=(MemoryBound(name, 2 * numbers, 3 * numbers, norm_kernels(model)),),
        saved=(saved,) if first or not together else (),
        results=(SavedTensor("block input", stream, "tokens"),) if first else (),
    )


def residual(place: Place, name: str) -> Operator:
    """Returns the sum at the end of a half of a block: it reads two tensors and writes one. Dropout reads and writes a
    mask of one byte per element."""
    numbers = place.hidden / place.token_share
    drops = 0.5 if place.model.dropout else 0
    return Operator(
        f"{name} residual",
        memory_bound=(MemoryBound(f"{name} residual", (3 + drops) * numbers, (2 + drops) * numbers, 2),),
        saved=(SavedTensor(f"{name} dropout", place.model.d_model if place.model.dropout else 0, "tokens"),),
    )


def halves_sum(place: Place) -> Operator:
    """Returns the sum of a parallel block's halves over all tokens: forward of their outputs, backward of the gradients
    of their inputs."""
    return Operator("halves", memory_bound=(MemoryBound("halves", 3 * place.hidden, 3 * place.hidden),))


def enter(place: Place, *, regather: bool = False) -> Iterator[Message]:
    """Yields the messages off the residual stream: every tensor rank gets the whole input of the matrices.

    `regather`: the gathered input is not saved, but gathered again during the computation of weight gradients, or by a
    repeated forward pass. A parallel block gathers what its norms read, which is saved."""
    if place.sp:
        yield Message("tp", "all_gather", place.hidden, forward=1, full=1)
    yield Message("tp", "reduce_scatter" if place.sp else "all_reduce", place.hidden, backward=1)
    if regather and place.sp and place.regathers and not place.model.parallel_block:
        yield Message("tp", "all_gather", place.hidden, backward=1, spared=True, beside="weight_gradients")


def enter_feed_forward(place: Place, *, regather: bool = False) -> Iterator[Message]:
    """Yields the messages between the residual stream and the second half of a block: none in a parallel block, which
    has entered with its first half."""
    if not place.model.parallel_block:
        yield from enter(place, regather=regather)


def leave(place: Place, *, again: bool = True) -> Iterator[Message]:
    """Yields the messages onto the residual stream, which sum the tensor ranks' partial results. `again`: a repeated
    forward pass needs it."""
    yield Message("tp", "reduce_scatter" if place.sp else "all_reduce", place.hidden, forward=1, full=again)
    if place.sp:
        yield Message("tp", "all_gather", place.hidden, backward=1)


def leave_attention(place: Place) -> Iterator[Message]:
    """Yields the messages from the first half of a block onto the residual stream: none in a parallel block, which
    leaves with its second half."""
    if not place.model.parallel_block:
        yield from leave(place)


def needs_sum(model: ModelConfig) -> bool:
    """Returns whether something after the sum over tensor ranks saves a tensor, so that a repeated forward pass of a
    block reaches it: the mask of a dropout, or the input of a norm."""
    return model.dropout > 0 or model.norms_outputs


def gathered(place: Place) -> Literal["whole", "gathered"]:
    """Returns how tensor ranks share the saved input of the matrices that read the residual stream."""
    return "whole" if place.model.parallel_block else "gathered"


def sum_gradient(model: ModelConfig) -> Gradient:
    """Returns how tensor ranks compute the gradient of a bias that is added to the residual stream. In a parallel block
    one of them adds it, before their outputs are summed."""
    return "partial" if model.parallel_block else "tokens"


def linear_weights(
    name: str, outputs: int, inputs: int, bias: bool, weight: Weight = PLAIN, *, cuts_bias: bool = True
) -> tuple[Weight, ...]:
    """Returns a linear layer's weight and bias, divided as `weight` says. A bias has only rows: `cuts_bias` is false
    for a layer that is cut by columns, whose bias is added once, after the sum."""
    whole = weight._replace(name=f"{name}.weight", shape=(outputs, inputs))
    if not bias:
        return (whole,)
    shape = whole._replace(name=f"{name}.bias", shape=(outputs,))
    return whole, shape if cuts_bias else shape._replace(cut="whole", tiled=False)


def norm_kernels(model: ModelConfig) -> int:
    """Returns the forward kernels of a norm without fusion."""
    return 1 if model.norm == "layernorm" else 4


def norm_weights(model: ModelConfig, name: str, width: int, weight: Weight = PLAIN) -> tuple[Weight, ...]:
    """Returns a norm's weight and, for a LayerNorm with biases, its bias."""
    scale = weight._replace(name=f"{name}.weight", shape=(width,))
    return (scale, scale._replace(name=f"{name}.bias")) if model.bias and model.norm == "layernorm" else (scale,)
