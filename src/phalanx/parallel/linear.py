"""Linear layers on a CPU through oneDNN instead of MKL, where that is faster: the same products, other kernels.

torch multiplies fp32 matrices on x86 with MKL, which takes its AVX-512 path on Intel's processors only. On an AMD EPYC
with AVX-512 oneDNN makes a whole training step 1.5 times faster (benchmarks/results/throughput.md). oneDNN's kernel is
reached through an operator that torch's own compiler uses; where a version of torch lacks it, MKL stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.model.transformer import Head, Linear, Multiply, Transformer


def onednn_is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine's fp32 products should go through oneDNN: AVX-512, but not Intel's."""
    if device.type != "cpu" or dtype != torch.float32 or not _available():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" not in cpuinfo.read_text(encoding="utf-8")


def use_onednn(model: Transformer) -> int:
    """Have every linear layer of `model` and its head multiply through oneDNN. Returns how many layers that are."""
    layers = [module for module in model.modules() if isinstance(module, (Linear, Head))]
    for layer in layers:
        layer.multiply = linear
    return len(layers)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias, as F.linear: (..., inputs) by (outputs, inputs) to (..., outputs), in fp32 on a CPU."""
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (gradient,) = grad_outputs
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            gradient_of_input(_multiply, gradient, weight) if need_x else None,
            gradient_of_weight(_multiply, gradient, x) if need_weight else None,
            gradient.flatten(0, -2).sum(0) if need_bias else None,
        )


def gradient_of_input(multiply: Multiply, gradient: Tensor, weight: Tensor) -> Tensor:
    """Of a linear layer's input (..., inputs), from its output's `gradient` (..., outputs)."""
    return multiply(gradient, weight.t())


def gradient_of_weight(multiply: Multiply, gradient: Tensor, x: Tensor) -> Tensor:
    """Of a linear layer's weight (outputs, inputs), from its output's `gradient` (..., outputs) and its input `x`."""
    return multiply(gradient.flatten(0, -2).t(), x.flatten(0, -2).t())


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
