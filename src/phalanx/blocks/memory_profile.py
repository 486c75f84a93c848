"""What a training framework keeps in memory, where frameworks differ for the same model under the same layout.

Every field can be read in a framework's code; none is fitted to a table of results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.hashed import Hashed, hashed_once


@hashed_once
@dataclass(frozen=True)
class MemoryProfile(Hashed):
    """What a program keeps. The defaults are our own runtime's, on a GPU."""

    parameter_bytes: int = 0
    """Bytes of a stored parameter's number; 0 is that of the computation. torchtitan stores fp32 shards: 4."""
    gradient_bytes: int = 0
    """Bytes of a gradient's number as it is added up over micro-batches; 0 is that of the computation."""
    unbuffered_gradient_bytes: int = 0
    """Bytes of a gradient's number outside of flat buffers, in FSDP's shards and without data ranks, where it has the
    parameter's type whichever it is reduced in; 0 is `gradient_bytes`."""
    passing_gradient_bytes: int = 0
    """Bytes a parameter of the stage, whole, for gradients of one micro-batch before they are added to those of
    `gradient_bytes` (DeepSpeed's BF16_Optimizer: 2)."""
    step_gradient_bytes: int = 4
    """Bytes a parameter that a rank updates, of the copy of the gradient in the optimizer's precision that exists while
    it works; counts where the gradient itself is narrower."""
    step_is_flat: bool = False
    """That copy is one tensor, for which the allocator finds no room among what activations have left behind: it takes
    more from the device, as long as there is more."""
    bucket_numbers: float = 0
    """Gradients that are copied to one buffer to be reduced (DeepSpeed: 5e8)."""
    gradients_stay: bool = False
    """Memory of gradients is there for the whole step (flat buffers), and not just from the first backward pass on."""
    scores: Literal["dropout", "always", "never"] = "dropout"
    """When attention keeps its probabilities: `dropout` keeps them where the model has dropout, which torch's fused
    kernel does not draw alike on all layouts; `always` is unfused attention; `never` flash attention."""
    swiglu_kept: int = 4
    """Tensors as wide as the MLP that SwiGLU keeps: both inputs, the SiLU's output and the product. A fused kernel
    computes the SiLU again (3), a compiler may compute the product again, too (2)."""
    regathers: bool = False
    """Sequence parallelism always gathers inputs again in the backward pass (Megatron), whatever the layout says."""
    routes_shards: bool = False
    """With sequence parallelism, routers and the compressions of latent attention work on a rank's own tokens
    (Megatron), and not on all of the tensor ranks'."""
    weights_inside: bool = False
    """The gates multiply inside the experts, before their last matrix, so that their output is not kept (Megatron
    0.12 and later)."""
    values_apart: bool = False
    """Latent attention copies its values; as a part of the matrix's output they keep the keys' part alive as well."""
    selective: Literal["core", "products", "layers"] = "core"
    """What recompute=selective means: `core` repeats attention's core (Korthikanti et al. 2022, section 5); `products`
    keeps the block's input, attention's output and every other matrix product (torchtitan's `op`); `layers` repeats
    every other block."""
    loss_tensors: tuple[int, int] = (3, 0)
    """Tensors as large as the logits at the worst moment of the loss: in fp32, and in the width of the computation. In
    torch's eager mode log-probabilities and two gradients; fused, with the gradient in place, the logits alone."""
    split_loss_tensors: tuple[int, int] = (2, 1)
    """The same where tensor ranks share the vocabulary. Ours: probabilities, their gradient, and that of the logits."""
    reduces_each: bool = False
    """ZeRO-2 and 3 send the gradients of every micro-batch, whatever the layout says."""
    whole_under_pp: bool = False
    """Under a pipeline ZeRO-3 keeps parameters whole from the first micro-batch to the last."""
    keeps_boundaries: bool = False
    """A pipeline's buffers hold what a stage received and what it sent, of every micro-batch in flight, beside the copy
    that blocks keep (deepspeed/runtime/pipe/engine.py: pipe_buffers)."""
    gathers_matrices: bool = False
    """ZeRO-3 has one matrix whole at a time, and the next or the gradient of one, not blocks."""
    keeps_narrow: bool = False
    """With products in fp8 the inputs of matrices are kept as they were multiplied, a byte a number."""
    dummy_gradients: bool = False
    """An empty gradient for each shape of a block's matrices stands in for those that kernels have already added
    (Transformer Engine from 2.3 on)."""
    reserve: float = 1.05
    """What torch's allocator takes from the device over what tensors take at the peak, as long as there is room.
    SimuMax's runs on B200 record both: 1.03 to 1.08, median 1.05."""
    context_mib: int = 600
    """MiB of the device's context, kernels and libraries, which no allocator sees: 500 to 600 where CUDA loads kernels
    when they are needed (from 11.7 on), 1,573 where it loaded all of them (bigscience, A100)."""
    communicator_mib: int = 150
    """MiB of a communicator's buffers: NCCL's channels × peers × protocols, of its own memory."""
    imbalance: float = 1.0
    """Rows of the fullest rank's experts over the mean of all; 1 is balanced routing."""
    fp16: MemoryProfile | None = None
    """What takes the place of all these where products are in fp16."""


PHALANX = MemoryProfile()
"""Our own runtime."""
