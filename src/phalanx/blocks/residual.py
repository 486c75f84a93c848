"""The operators between the matrices: norms, residual sums, and the messages on and off the residual stream.

Tensor parallelism: an all-reduce of the residual stream after each half of a block in the forward pass, and before it
in the backward pass (Shoeybi et al. 2019, section 3); with sequence parallelism each is an all-gather and a
reduce-scatter (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.operator import PLAIN, MemoryBound, Message, Operator, SavedTensor, Weight
from phalanx.blocks.place import WIDE, Place
from phalanx.config.model import ModelConfig

RMS_TENSORS = 6
"""Tensors, in at least fp32, that the backward pass of torch's RMS norm has at once without a kernel of its own: the
input, the gradient of the normalised input, the input's by that, and three factors of the gradient by the mean
square."""


def norm(place: Place, name: str, *, first: bool = False) -> Operator:
    """Returns a norm before or after a half of a block, the `first` of the block or another. It reads and writes the
    stream; backward it reads the gradient and the input and writes a gradient. In a parallel block both norms read one
    input, of all tokens."""
    model, together = place.model, place.model.parallel_block
    numbers = place.hidden / (1 if together else place.token_share)
    saved = norm_saved(place, model.d_model, shared=together and not first)
    read = 0 if together and not first else model.d_model * place.width
    return Operator(
        name,
        norm_weights(model, name, model.d_model),
        memory_bound=(MemoryBound(name, 2 * numbers, 3 * numbers, norm_kernels(model), cheap=True),),
        saved=(SavedTensor(name, saved, "whole" if together else "tokens", cheap=saved - read),) if saved else (),
        results=(SavedTensor("block input", model.d_model * place.width, "tokens"),) if first else (),
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


def sum_of_halves(place: Place) -> tuple[Operator, Operator]:
    """Returns the sums at the end of a parallel block: of its halves, for all tokens (backward: of the gradients of
    their inputs), and onto the residual stream."""
    halves = MemoryBound("halves", 3 * place.hidden, 3 * place.hidden)
    return Operator("halves", memory_bound=(halves,)), residual(place, "block")


def enter(place: Place, *, regather: bool = False) -> Iterator[Message]:
    """Yields the messages off the residual stream: every tensor rank gets the whole input of the matrices.

    `regather`: the gathered input is not saved, but gathered again during the computation of weight gradients, or by a
    repeated forward pass."""
    if place.exchange == "leave":
        return
    if place.sp:
        yield Message("tp", "all_gather", place.hidden, forward=1, full=1)
    yield Message("tp", "reduce_scatter" if place.sp else "all_reduce", place.hidden, backward=1)
    if regather and place.sp and place.regathers:
        yield Message("tp", "all_gather", place.hidden, backward=1, spared=True, beside="weight_gradients")


def leave(place: Place, *, again: bool = True) -> Iterator[Message]:
    """Yields the messages onto the residual stream, which sum the tensor ranks' partial results. `again`: a repeated
    forward pass needs it, as the last matrix is summed with what it saves. The sum of a parallel block comes after
    it."""
    if place.exchange == "enter":
        return
    again = again if place.exchange == "both" else needs_sum(place.model)
    yield Message("tp", "reduce_scatter" if place.sp else "all_reduce", place.hidden, forward=1, full=again)
    if place.sp:
        yield Message("tp", "all_gather", place.hidden, backward=1)


def needs_sum(model: ModelConfig) -> bool:
    """Returns whether something after a block's sum over tensor ranks saves a tensor, so that a repeated forward pass
    reaches it: the mask of a dropout, or the input of a norm."""
    return model.dropout > 0 or model.norms_outputs


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


def norm_saved(place: Place, numbers: int, *, read: int = 0, shared: bool = False) -> int:
    """Returns the bytes per token that a norm over `numbers` elements saves: its input, with the rest of the tensor of
    `read` elements that it is a part of (0: of nothing more), unless that is `shared` with another norm, which counts
    it; and what `MemoryProfile.rms_copies` says."""
    model, width, wide = place.model, place.width, max(place.width, WIDE)
    own = 0 if shared else (read or numbers) * width
    if not place.profile.rms_copies or model.norm != "rmsnorm":
        return own
    normed = 0 if model.lora.rank else numbers * wide
    return (own if width == wide else numbers * wide) + normed


def norm_backward(place: Place, numbers: int) -> int:
    """Returns the bytes per token of a norm over `numbers` elements in the fullest moment of its backward pass, with
    what it has saved; 0 where one kernel computes it."""
    if not place.profile.rms_copies or place.model.norm != "rmsnorm":
        return 0
    return RMS_TENSORS * numbers * max(place.width, WIDE)


def norm_kernels(model: ModelConfig) -> int:
    """Returns the forward kernels of a norm without fusion."""
    return 1 if model.norm == "layernorm" else 4


def norm_weights(model: ModelConfig, name: str, width: int, weight: Weight = PLAIN) -> tuple[Weight, ...]:
    """Returns a norm's weight and, for a LayerNorm with biases, its bias."""
    scale = weight._replace(name=f"{name}.weight", shape=(width,))
    return (scale, scale._replace(name=f"{name}.bias")) if model.bias and model.norm == "layernorm" else (scale,)
