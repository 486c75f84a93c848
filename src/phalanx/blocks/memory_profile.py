"""The memory profile of a training framework: where frameworks differ for the same model in the same layout.

Every field can be read in a framework's code; none is fitted to a table of results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.hashed import Hashed, hashed_once


@hashed_once
@dataclass(frozen=True)
class MemoryProfile(Hashed):
    """The buffers, copies and reserves of a framework. The defaults are Phalanx's on a GPU."""

    parameter_bytes: int = 0
    """Bytes per element of a stored parameter; 0: those of the computation. torchtitan stores fp32 shards: 4."""
    gradient_bytes: int = 0
    """Bytes per element of a gradient that accumulates over micro-batches; 0: those of the computation."""
    unbuffered_gradient_bytes: int = 0
    """Bytes per element of a gradient outside of flat buffers, in FSDP's shards and without data ranks, where it has
    the parameter's type whatever type it is reduced in; 0: `gradient_bytes`."""
    passing_gradient_bytes: int = 0
    """Bytes per parameter of the whole stage for the gradients of one micro-batch before they are added to those of
    `gradient_bytes` (DeepSpeed's BF16_Optimizer: 2)."""
    step_gradient_bytes: int = 0
    """Bytes per parameter that a rank updates for the copy of the gradient in the optimizer's precision, which exists
    during the optimizer step, besides that of the optimizer (OptimizerCosts.widened); counts only if the gradient
    itself is narrower."""
    step_is_flat: bool = False
    """Whether that copy is one tensor, which does not fit into the blocks that activations have freed: the allocator
    takes more from the device, as long as there is more."""
    bucket_numbers: float = 0
    """Gradients that are copied to one buffer to be reduced (DeepSpeed: 5e8)."""
    gradients_stay: bool = False
    """Whether gradients are allocated for the whole step (flat buffers), not just from the first backward pass on."""
    scores: Literal["dropout", "always", "never"] = "dropout"
    """When attention saves its probabilities: `dropout`, if the model has dropout, which torch's fused kernel does not
    draw equally in all layouts; `always`, for unfused attention; `never`, for flash attention."""
    masks: Literal["none", "runs"] = "none"
    """The masks that attention within documents makes: `none`, if its kernel gets documents as runs of tokens; `runs`,
    one of some queries at a time. None is kept for a backward pass."""
    rms_copies: bool = False
    """Whether an RMS norm saves its normalised input for its weight's gradient and, in half precision, its input in
    fp32 in place of the input itself: torch's on CPUs, which has no kernel for it."""
    swiglu_kept: int = 4
    """Tensors of the MLP's hidden size that SwiGLU saves: both inputs, the SiLU's output and the product. A fused
    kernel recomputes the SiLU (3), a compiler may recompute the product, too (2)."""
    regathers: bool = False
    """Whether sequence parallelism always gathers inputs again in the backward pass (Megatron), in every layout."""
    routes_shards: bool = False
    """Whether, with sequence parallelism, routers and the compressions of latent attention work on a rank's own tokens
    (Megatron), not on those of all tensor ranks."""
    weights_inside: bool = False
    """Whether gates multiply inside the experts, before their last matrix, so that their output is not saved (Megatron
    0.12 and later)."""
    values_apart: bool = False
    """Whether latent attention copies its values; views of the matrix's output keep the keys' part alive as well."""
    selective: Literal["core", "products", "layers"] = "core"
    """The meaning of recompute=selective: `core` repeats attention's core (Korthikanti et al. 2022, section 5);
    `products` keeps the block's input, attention's output and every other matrix product (torchtitan's `op`); `layers`
    repeats every other block."""
    loss_tensors: tuple[int, int] = (1, 1)
    """Tensors as large as the logits at the peak of the loss: in fp32, and in the width of the computation. Phalanx:
    probabilities beside the logits, which they replace as their gradient; in torch's eager mode log-probabilities and
    two gradients (3, 0); compiled, the logits and their gradient; fused, with the gradient in place, the logits alone.
    """
    split_loss_tensors: tuple[int, int] = (1, 1)
    """These if tensor ranks share the vocabulary."""
    saves_slopes: bool = True
    """Whether the loss saves the gradient of the logits, in their place and width, until the backward pass; otherwise
    it saves log-probabilities in fp32, or where it is fused, the logits."""
    reduces_each: bool = False
    """Whether ZeRO-2 and 3 reduce the gradients of every micro-batch, whatever the layout says."""
    whole_under_pp: bool = False
    """Whether ZeRO-3 in a pipeline keeps parameters gathered from the first micro-batch to the last."""
    keeps_boundaries: bool = False
    """Whether a pipeline's buffers hold the received and sent tensors of a stage for every micro-batch in flight,
    beside the copy that blocks save (deepspeed/runtime/pipe/engine.py: pipe_buffers)."""
    gathers_matrices: bool = False
    """Whether ZeRO-3 gathers one matrix at a time, with the next or the gradient of one, instead of blocks."""
    keeps_narrow: bool = False
    """Whether products in fp8 save the inputs of matrices in fp8, one byte per element."""
    dummy_gradients: bool = False
    """Whether an empty gradient for each shape of a block's matrices stands in for those that kernels have already
    added (Transformer Engine from 2.3 on)."""
    reserve: float = 1.05
    """Memory that torch's allocator reserves over the tensors' at the peak, as a factor, as long as there is room.
    SimuMax's runs on B200 record both: 1.03 to 1.08, median 1.05."""
    context_mib: int = 600
    """MiB of the device's context, kernels and libraries, outside the allocator: 500 to 600 if CUDA loads kernels
    lazily (from 11.7 on), 1,573 if it loads all of them (bigscience, A100)."""
    communicator_mib: int = 150
    """MiB of a communicator's buffers, which NCCL allocates itself: channels × peers × protocols."""
    imbalance: float = 1.0
    """Tokens of the fullest rank's experts over the mean of all; 1 is balanced routing."""
    fp16: MemoryProfile | None = None
    """The profile that replaces this one if products are in fp16."""


PHALANX = MemoryProfile()
"""The profile of Phalanx itself."""
