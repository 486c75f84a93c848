"""The memory profiles of known training frameworks."""

from __future__ import annotations

from dataclasses import replace

from phalanx.blocks.operator import PHALANX, MemoryProfile
from phalanx.techniques.compiling import COMPILED_LOSS_TENSORS

__all__ = ["PHALANX"]

_MEGATRON_FP16 = MemoryProfile(
    step_gradient_bytes=4,
    gradients_stay=True,
    scores="always",
    regathers=True,
    loss_tensors=(1, 1),
    split_loss_tensors=(1, 1),
    saves_slopes=False,
    context_mib=1000,
    swiglu_kept=3,
)
MEGATRON_2021 = replace(_MEGATRON_FP16, gradient_bytes=4, step_gradient_bytes=0, fp16=_MEGATRON_FP16)
"""Megatron-LM of Narayanan et al. 2021 and Korthikanti et al. 2022: unfused attention with dropout, a loss in place.
bf16 accumulates gradients in fp32, fp16 makes an fp32 copy of them in the optimizer step
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
"""Megatron-DeepSpeed with fp16: the optimizer step joins the gradients of a rank's partition, in fp16 and then in fp32
(deepspeed/runtime/zero/stage_1_and_2.py). The context was measured by bigscience
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
"""BLOOM's framework, in bf16: its optimizer accumulates fp32 gradients beside those in bf16
(deepspeed/runtime/bf16_optimizer.py)."""

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
    saves_slopes=False,
    reduces_each=True,
    keeps_narrow=True,
    dummy_gradients=True,
)
"""Megatron Core with Transformer Engine: bf16, fp32 main gradients in flat buffers, fused kernels, the loss among them
(cross_entropy_loss_fusion)."""

NEMO = replace(MEGATRON_CORE, gradient_bytes=0, step_gradient_bytes=4)
"""NVIDIA's recipes for speed (NeMo, Megatron-Bridge, MLPerf): gradients are accumulated and reduced in bf16
(grad_reduce_in_fp32=False)."""

LLAMA3 = replace(MEGATRON_CORE, swiglu_kept=2)
"""Meta's framework of Llama 3, whose code is not public: assumed to have the SwiGLU of Meta's xformers, which saves
both inputs and computes the product again (ops/swiglu_op.py: _SwiGLUFusedFunc). With three tensors 405B would not have
fit on 8,192 GPUs without recomputation, as it did (Llama Team 2024, section 3.3.2)."""

DEEPSPEED_ZERO3 = replace(_MEGATRON_FP16, reduces_each=True, gathers_matrices=True)
"""DeepSpeed's ZeRO-3 of 2021: one module's parameters are gathered at a time."""

INTERNLM = MemoryProfile(
    step_gradient_bytes=4,
    scores="never",
    loss_tensors=(1, 1),
    split_loss_tensors=(1, 1),
    saves_slopes=False,
    bucket_numbers=512 * 2**20,
)
"""InternLM's framework of 2023: fp32 copies of logits, and of a rank's gradients in the optimizer step."""

FSDP1 = MemoryProfile(parameter_bytes=4, scores="never", loss_tensors=(0, 1), saves_slopes=False, reduces_each=True)
"""llm-foundry on torch's first FSDP: fp32 shards, bf16 computation and reduction; the loss of flash_attn, which writes
the gradient over the logits."""

TORCHTITAN = MemoryProfile(
    parameter_bytes=4,
    gradient_bytes=4,
    scores="never",
    selective="products",
    whole_under_pp=True,
    loss_tensors=(3, 0),
    split_loss_tensors=(5, 0),
    saves_slopes=False,
    reserve=1.08,
)
"""torchtitan in eager mode on FSDP2: fp32 shards, bf16 computation, gradients reduced in fp32. DTensor's loss_parallel
computes its gradient in three steps, each an fp32 tensor (torch/distributed/tensor/parallel/loss.py). Collectives have
streams of their own, whose memory others cannot use: `reserve` is calibrated on three of its 8B runs on H100."""

TORCHTITAN_COMPILED = replace(TORCHTITAN, swiglu_kept=2)
"""torchtitan with compiled blocks and eager loss, as in its reports of 2024."""

TORCHTITAN_COMPILED_LOSS = replace(TORCHTITAN_COMPILED, loss_tensors=COMPILED_LOSS_TENSORS)
"""torchtitan with compiled blocks and loss (2025)."""

KEMPNERFORGE = replace(TORCHTITAN_COMPILED, loss_tensors=(0, 3), split_loss_tensors=(0, 3), whole_logits=True)
"""KempnerForge: torch's loss of logits in bf16, outside of what is compiled: log-probabilities and their gradient."""

AUTOMODEL = replace(TORCHTITAN_COMPILED_LOSS, parameter_bytes=0, unbuffered_gradient_bytes=2, state_bytes=4)
"""NeMo AutoModel: parameters in the type of the checkpoint, bf16, and torch's Adam, whose moments have it too
(nemo_automodel/_transformers/auto_model.py: from_config; examples/llm_benchmark)."""

XLA = MemoryProfile(
    parameter_bytes=4,
    scores="never",
    swiglu_kept=2,
    loss_tensors=(1, 1),
    split_loss_tensors=(1, 1),
    saves_slopes=False,
    reduces_each=True,
    gathers_matrices=True,
    reserve=1.0,
    context_mib=300,
    communicator_mib=0,
)
"""MaxText and others that XLA compiles: memory is planned ahead, so none is reserved in vain."""
