"""Linear layers with other kernels (oneDNN instead of MKL on a CPU, products in 8 bits), and with deferred weight
gradients.

torch multiplies fp32 matrices on x86 with MKL, which takes its AVX-512 path on Intel's processors only. On an AMD EPYC
with AVX-512 oneDNN makes a whole training step 1.5 times faster (benchmarks/results/throughput.md).

Products in 8 bits have dynamic scales, per row or per tensor (Micikevicius et al. 2022, "FP8 Formats for Deep
Learning"), as torchao's float8 training computes them (torchao/float8/config.py).

Each product of a linear layer contracts the last dimension of both factors: x of (tokens, inputs) with the weight, the
gradient of (tokens, outputs) with the weight's transpose, and both transposes over the tokens. rowwise: each row of a
factor has a scale of its own, and every factor is e4m3. tensorwise: a factor has one scale, and gradients are e5m2.
Scales are powers of two, so that scaling itself rounds nothing. A rank that holds a part of the contracted dimension
scales by the largest element of its part: only elements smaller than 2^-14 of it are rounded otherwise than whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.job import FP8_ALIGNMENT, Fp8Scaling
from phalanx.errors import JobError
from phalanx.model.layers import Linear, Multiply, uncompiled
from phalanx.model.moe import GroupedLinear, GroupedProduct, Router
from phalanx.model.transformer import Head, Transformer

Plain = TypeVar("Plain", bound=nn.Module)
OneLinear = TypeVar("OneLinear", bound=Linear)


class Tile(nn.Module):
    """A part of a large matrix: a unit that ZeRO-3 gathers (parallel/tiling.py)."""


def replace_modules(model: nn.Module, kind: type[Plain], make: Callable[[Plain], nn.Module]) -> int:
    """Replaces every submodule of `model` of class `kind` by the result of `make`. Returns how many there were."""
    chosen = [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
    for name, module in chosen:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, make(module))
    return len(chosen)


def linear_of(kind: type[OneLinear], plain: Linear) -> OneLinear:
    """Returns a linear layer of class `kind` with the same parameters as `plain`, under the same names."""
    layer = kind(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
    layer.weight, layer.bias = plain.weight, plain.bias
    layer.lora_a, layer.lora_b, layer.lora_scale = plain.lora_a, plain.lora_b, plain.lora_scale
    return layer


SMALLEST = 2.0**-100
"""Rows whose largest element is smaller are scaled as if it were this: of a row of zeros no scale would be finite."""
_EXPONENT = 0x7F800000
"""The bits of the exponent of an fp32 number."""


Scales = Literal[Fp8Scaling, "elementwise"]


def rounded(factor: Tensor, format: torch.dtype, scales: Scales) -> tuple[Tensor, Tensor]:
    """Returns a factor (rows, columns) in an 8-bit format, row after row in memory, and what it is to be multiplied by,
    in fp32: (rows, 1), () with one scale for all, or of its own shape."""
    if scales == "elementwise":
        largest = factor.abs().float()
    else:
        rows = scales == "rowwise"
        largest = torch.linalg.vector_norm(factor, torch.inf, dim=-1 if rows else None, keepdim=rows).float()
    # A row with an infinite element or one that is not a number stays so: its scale is zero or infinite.
    scale = torch.finfo(format).max / largest.clamp(min=SMALLEST)
    scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    scaled = factor * scale.to(factor.dtype)
    return scaled.to(format, memory_format=torch.contiguous_format), 1 / scale


@dataclass(frozen=True)
class Fp8Product:
    """x weightᵀ + bias as F.linear computes it, of factors that are rounded to 8 bits. Autograd does not know it."""

    scaling: Fp8Scaling
    emulated: bool = False
    """Whether factors are converted back, and multiplied in their own type."""
    elementwise: bool = False
    """Emulated: whether each number is rounded by a scale of its own, and so alike in a part of a factor and in the
    whole."""
    formats: tuple[torch.dtype, torch.dtype] = (torch.float8_e4m3fn, torch.float8_e5m2)
    """The format with more mantissa, and that with more exponent."""
    of_gradient: bool = False
    """Whether the first factor is a gradient."""
    rounded: Callable[[Tensor, torch.dtype, Scales], tuple[Tensor, Tensor]] = rounded
    """`rounded`, perhaps compiled."""

    @classmethod
    def on(cls, device: torch.device, scaling: Fp8Scaling, dtype: torch.dtype) -> Fp8Product:
        """Returns the product for a device, of factors of type `dtype`: emulated on a CPU, and where they are not in
        bf16; elementwise in float64, to compare layouts. Raises JobError for a GPU without products in 8 bits."""
        if device.type == "cpu" or dtype != torch.bfloat16:
            return cls(scaling, emulated=True, elementwise=dtype == torch.float64)
        name = torch.cuda.get_device_name(device)
        if torch.version.hip:
            kind = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
            if kind == "gfx942":  # MI300 has the formats without a negative zero
                return cls(scaling, formats=(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))
            has = kind >= "gfx95"
        else:
            has = torch.cuda.get_device_capability(device) >= (8, 9)
        if not has:
            raise JobError(f"train.precision: {name} has no products in fp8; nearest legal: bf16")
        return cls(scaling)

    @property
    def backward(self) -> Fp8Product:
        """The product of a gradient with a factor of the forward pass."""
        return replace(self, of_gradient=True)

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of a weight (outputs, inputs) from that of the output (tokens, outputs) and the input
        (tokens, inputs)."""
        if not self.accepts(gradient.shape[1], x.shape[1]):
            return gradient.t() @ x
        if missing := 0 if self.emulated else -len(x) % FP8_ALIGNMENT:  # rows of zeros change neither sums nor scales
            gradient, x = (F.pad(each, (0, 0, 0, missing)) for each in (gradient, x))
        return self.backward(gradient.t(), x.t())

    def accepts(self, outputs: int, inputs: int) -> bool:
        """Returns whether a weight (outputs, inputs) is multiplied in 8 bits; others are in their own type."""
        return self.emulated or not (outputs % FP8_ALIGNMENT or inputs % FP8_ALIGNMENT)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x weightᵀ + bias: (..., inputs) by (outputs, inputs) to (..., outputs)."""
        if not self.accepts(*weight.shape):
            return F.linear(x, weight, bias)
        rowwise, scales = self.scaling == "rowwise", "elementwise" if self.elementwise else self.scaling
        first, of_first = self.rounded(x.flatten(0, -2), self.formats[self.of_gradient and not rowwise], scales)
        second, of_second = self.rounded(weight, self.formats[0], scales)
        if self.emulated:
            y = F.linear(first.to(x.dtype) * of_first.to(x.dtype), second.to(x.dtype) * of_second.to(x.dtype))
        else:
            # The kernels for rows are fast only with sums in fewer bits; the others use them forward.
            fast = rowwise or not self.of_gradient
            multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
            y = multiply(first, second.t(), of_first, of_second.t(), out_dtype=x.dtype, use_fast_accum=fast)
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias


Product = tuple[Multiply | GroupedProduct, Tensor, Tensor, Tensor]
"""The factors of a weight's gradient: (multiply, gradient of the output, input, weight)."""


def onednn_is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether this machine's fp32 products should go through oneDNN: AVX-512, but not Intel's."""
    if device.type != "cpu" or dtype != torch.float32 or not _available():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" not in cpuinfo.read_text(encoding="utf-8")


def use_onednn(model: Transformer) -> int:
    """Makes every linear layer of `model` and its head multiply through oneDNN. Returns the number of layers."""
    layers = [module for module in model.modules() if isinstance(module, (Linear, Head))]
    for layer in layers:
        layer.multiply = linear
    return len(layers)


def use_fp8(model: Transformer, product: Fp8Product) -> tuple[list[str], list[str]]:
    """Makes the linear layers of blocks multiply by `product`, but for routers. Returns the names of those that it
    accepts, and of the others."""
    taken, left = list[str](), list[str]()
    for name, layer in model.blocks.named_modules(prefix="blocks"):
        if isinstance(layer, Linear) and not isinstance(layer, Router):
            layer.multiply = OwnProduct(product)
            (taken if product.accepts(*layer.weight.shape) else left).append(name)
    return taken, left


@dataclass(frozen=True)
class OwnProduct:
    """A linear layer's product by kernels that autograd does not know."""

    product: Multiply

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x weightᵀ + bias: (..., inputs) by (outputs, inputs) to (..., outputs)."""
        return _Linear.apply(x, weight, bias, self.product)  # pyright: ignore[reportReturnType]


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


linear = OwnProduct(_multiply)
"""oneDNN's product, in fp32 on a CPU."""


def defer_weight_grads(modules: Iterable[nn.Module], deferred: DeferredWeightGrads) -> None:
    """Makes linear layers, those of experts, and heads leave their weight gradients to `deferred`."""
    for module in modules:
        if isinstance(module, GroupedLinear):
            module.take = deferred.take
        if isinstance(module, (Linear, Head)):
            module.multiply = DeferringProduct(module.multiply, deferred)


class DeferredWeightGrads:
    """Computes the weight gradients of a model's linear layers at once or later, and adds them to weight.grad.

    They need only a layer's input and the gradient of its output, and only the optimizer waits for them: so a backward
    pass can be split in halves (Qi et al. 2023, section 2). The product itself adds to the gradients of earlier
    micro-batches."""

    def __init__(self) -> None:
        self.arrived: Callable[[Tensor], None] = lambda weight: None
        """Called after a gradient has been added to weight.grad."""
        self.products: list[Product] | None = None
        """The list to which products are deferred; None to compute them at once."""

    def take(self, weight: Tensor, multiply: Multiply | GroupedProduct, gradient: Tensor, x: Tensor) -> None:
        """Accepts a weight's gradient as its factors: that of the layer's output, (..., outputs), and its input `x`
        (..., inputs). It is computed at once, or deferred to `products`."""
        product = multiply, gradient, x, weight
        if self.products is None:
            self.add([product])
        else:
            self.products.append(product)

    @torch.no_grad()
    def add(self, products: Iterable[Product]) -> None:
        """Computes products and adds them to their weights' gradients."""
        for multiply, gradient, x, weight in products:
            if weight.grad is None:
                weight.grad = gradient_of_weight(multiply, gradient, x).view_as(weight)
            elif multiply is F.linear:
                weight.grad.addmm_(gradient.flatten(0, -2).t(), x.flatten(0, -2))
            else:
                weight.grad += gradient_of_weight(multiply, gradient, x).view_as(weight)
            self.arrived(weight)


@dataclass(frozen=True)
class DeferringProduct:
    """A linear layer's product that leaves the weight's gradient to `deferred` instead of autograd."""

    multiply: Multiply
    deferred: DeferredWeightGrads

    @uncompiled
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x weightᵀ + bias: (..., inputs) by (outputs, inputs) to (..., outputs)."""
        if not weight.requires_grad:
            return self.multiply(x, weight, bias)
        # Detached: otherwise autograd would expect a gradient here.
        return _Linear.apply(x, weight.detach(), bias, self.multiply, partial(self.deferred.take, weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        multiply: Multiply,
        take: Callable[[Multiply, Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        # Frozen weights have no gradient, for which alone the input is needed.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] or take is not None else None, weight)
        ctx.multiply, ctx.take = multiply, take
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (gradient,) = grad_outputs
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        if ctx.take is not None:
            ctx.take(ctx.multiply, gradient, x)
        return (
            gradient_of_input(ctx.multiply, gradient, weight) if need_x else None,
            gradient_of_weight(ctx.multiply, gradient, x) if need_weight else None,
            gradient.flatten(0, -2).sum(0) if need_bias else None,
            None,
            None,
        )


def gradient_of_input(multiply: Multiply, gradient: Tensor, weight: Tensor) -> Tensor:
    """Returns the gradient of a linear layer's input (..., inputs) from that of its output, (..., outputs)."""
    product = _kernel(multiply)
    return (product.backward if isinstance(product, Fp8Product) else product)(gradient, weight.t())


def gradient_of_weight(multiply: Multiply | GroupedProduct, gradient: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of a linear layer's weight (outputs, inputs) from that of its output, (..., outputs), and
    its input `x` (..., inputs); for experts (experts, outputs, inputs)."""
    if isinstance(multiply, GroupedProduct):
        return multiply.weight_gradient(gradient, x)
    gradient, x, product = gradient.flatten(0, -2), x.flatten(0, -2), _kernel(multiply)
    if isinstance(product, Fp8Product):
        return product.weight_gradient(gradient, x)
    return product(gradient.t(), x.t())


def _kernel(multiply: Multiply) -> Multiply:
    return multiply.product if isinstance(multiply, OwnProduct) else multiply


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
