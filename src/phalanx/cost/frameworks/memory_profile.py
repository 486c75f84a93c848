"""What a training program keeps in memory, where programs differ: for the same model under the same layout.

Every field is something that can be read in a program's code; none is fitted to a table of results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from phalanx.hashed import Hashed, hashed_once

MIB = 2**20


@hashed_once
@dataclass(frozen=True)
class MemoryProfile(Hashed):
    """What a program keeps. The defaults are our own runtime's, on a GPU."""

    parameter_bytes: int = 0
    """Bytes of a stored parameter's number; 0 is that of the computation. torchtitan stores fp32 shards: 4."""
    gradient_bytes: int = 0
    """Bytes of a gradient's number as it is added up over micro-batches; 0 is that of the computation."""
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

_MEGATRON_FP16 = MemoryProfile(
    gradients_stay=True,
    scores="always",
    regathers=True,
    loss_tensors=(1, 1),
    split_loss_tensors=(1, 1),
    context_mib=1000,
    swiglu_kept=3,
)
MEGATRON_2021 = replace(_MEGATRON_FP16, gradient_bytes=4, step_gradient_bytes=0, fp16=_MEGATRON_FP16)
"""Megatron-LM of Narayanan et al. 2021 and Korthikanti et al. 2022: attention step by step with dropout, a loss that
works in place. bf16 adds up fp32 gradients, fp16 makes an fp32 copy of them in the optimizer's step
(megatron/optimizer/optimizer.py: Float16OptimizerWithFloat16Params)."""

MEGATRON_DEEPSPEED_FP16 = replace(
    _MEGATRON_FP16,
    step_gradient_bytes=6,
    step_is_flat=True,
    keeps_boundaries=True,
    bucket_numbers=5e8,
    reserve=1.15,
    context_mib=1573,
)
"""Megatron-DeepSpeed with fp16: in the optimizer's step the gradients of a rank's partition are joined, in fp16 and
then in fp32 (deepspeed/runtime/zero/stage_1_and_2.py). The context is what bigscience measured
(train/tr11-176B-ml/chronicles-prequel.md: 1,573 MiB); `reserve`, of torch 1.11's allocator, is calibrated on eight of
its rows (2, 3, 20, 40, 55, 90, 137 and 147 of the sweep)."""

MEGATRON_DEEPSPEED = replace(
    MEGATRON_DEEPSPEED_FP16,
    gradient_bytes=4,
    passing_gradient_bytes=2,
    step_gradient_bytes=0,
    step_is_flat=False,
    fp16=MEGATRON_DEEPSPEED_FP16,
)
"""BLOOM's program, in bf16: its optimizer adds up fp32 gradients beside those in bf16 (deepspeed/runtime/
bf16_optimizer.py)."""

MEGATRON_CORE = MemoryProfile(
    gradient_bytes=4,
    gradients_stay=True,
    scores="never",
    swiglu_kept=3,
    regathers=True,
    routes_shards=True,
    weights_inside=True,
    values_apart=True,
    loss_tensors=(0, 1),
    split_loss_tensors=(0, 1),
    reduces_each=True,
    keeps_narrow=True,
    dummy_gradients=True,
)
"""Megatron Core with Transformer Engine: bf16, fp32 main gradients in flat buffers, fused kernels, the loss among them
(cross_entropy_loss_fusion)."""

NEMO = replace(MEGATRON_CORE, gradient_bytes=0)
"""NVIDIA's recipes for speed (NeMo, Megatron-Bridge, MLPerf): gradients are added up and reduced in bf16
(grad_reduce_in_fp32=False)."""

DEEPSPEED_ZERO3 = replace(_MEGATRON_FP16, reduces_each=True, gathers_matrices=True)
"""DeepSpeed's ZeRO-3 of 2021: one module's parameters are whole at a time."""

FSDP1 = MemoryProfile(parameter_bytes=4, scores="never", loss_tensors=(0, 1), reduces_each=True)
"""llm-foundry on torch's first FSDP: fp32 shards, bf16 computation and reduction; the loss of flash_attn, which writes
the gradient over the logits."""

TORCHTITAN = MemoryProfile(
    parameter_bytes=4,
    gradient_bytes=4,
    scores="never",
    selective="products",
    whole_under_pp=True,
    split_loss_tensors=(5, 0),
    reserve=1.08,
)
"""torchtitan in eager mode on FSDP2: fp32 shards, bf16 computation, gradients reduced in fp32. DTensor's loss_parallel
makes its gradient in three steps, each a tensor in fp32 (torch/distributed/tensor/parallel/loss.py). Collectives have
streams of their own, whose memory others cannot use: `reserve` is calibrated on three of its 8B runs on H100."""

TORCHTITAN_COMPILED = replace(TORCHTITAN, swiglu_kept=2)
"""The same with compiled blocks, the loss not, as in its reports of 2024."""

TORCHTITAN_COMPILED_LOSS = replace(TORCHTITAN_COMPILED, loss_tensors=(0, 2))
"""With the loss compiled as well (2025): kept are its logits, beside which their gradient is made."""

XLA = MemoryProfile(
    parameter_bytes=4,
    scores="never",
    swiglu_kept=2,
    loss_tensors=(1, 1),
    split_loss_tensors=(1, 1),
    reduces_each=True,
    gathers_matrices=True,
    reserve=1.0,
    context_mib=300,
    communicator_mib=0,
)
"""MaxText and others that XLA compiles: memory is planned ahead, so that nothing is reserved in vain."""
