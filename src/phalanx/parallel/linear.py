"""Linear layers with other kernels (oneDNN instead of MKL on a CPU, the scaled products of scaled.py), and with
deferred weight gradients.

torch multiplies fp32 matrices on x86 with MKL, which takes its AVX-512 path on Intel's processors only. On an AMD EPYC
with AVX-512 oneDNN makes a whole training step 1.5 times faster (benchmarks/results/throughput.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.attention import CoreAttention
from phalanx.model.cpu_kernels import small_products
from phalanx.model.layers import Linear, Multiply, uncompiled
from phalanx.model.moe import GroupedLinear, GroupedProduct, Router
from phalanx.model.transformer import Head, Transformer
from phalanx.parallel.scaled import ScaledGrouped, ScaledProduct

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
    """Makes every linear layer of `model`, its head and its attention multiply through oneDNN. Returns the number of
    layers."""
    layers = [module for module in model.modules() if isinstance(module, (Linear, Head))]
    for layer in layers:
        layer.multiply = linear
    for module in model.modules():
        # Several threads scale better in torch's fused kernel, which divides the heads among them.
        if isinstance(module, CoreAttention) and torch.get_num_threads() == 1 and (small := small_products()):
            module.scoring = replace(module.scoring, small=small)
    return len(layers)


def use_scaled(model: Transformer, product: ScaledProduct) -> tuple[list[str], list[str]]:
    """Makes the linear layers of blocks multiply by `product`, experts' too, but for routers. Returns the names of
    those that it accepts, and of the others."""
    taken, left = list[str](), list[str]()
    for name, layer in model.blocks.named_modules(prefix="blocks"):
        if isinstance(layer, GroupedLinear):
            layer.product = partial(ScaledGrouped, scaled=product)
            accepts = product.groups(*layer.weight.shape[-2:])
        elif isinstance(layer, Linear) and not isinstance(layer, Router):
            layer.multiply = OwnProduct(product)
            accepts = product.accepts(*layer.weight.shape)
        else:
            continue
        (taken if accepts else left).append(name)
    return taken, left


def scaled_product(layer: nn.Module) -> ScaledProduct | None:
    """Returns the product in 8 bits of a linear layer, also of experts; None if it has another."""
    if isinstance(layer, GroupedLinear):
        return layer.product.keywords["scaled"] if isinstance(layer.product, partial) else None
    multiply = getattr(layer, "multiply", None)
    if isinstance(multiply, DeferringProduct):
        multiply = multiply.multiply
    product = multiply.product if isinstance(multiply, OwnProduct) else None
    return product if isinstance(product, ScaledProduct) else None


@dataclass(frozen=True)
class OwnProduct:
    """A linear layer's product by kernels that autograd does not know."""

    product: Multiply

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x weightᵀ + bias: (..., inputs) by (outputs, inputs) to (..., outputs)."""
        return _Linear.apply(x, weight, bias, self.product)


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
        self.halved: list[nn.Module] = []
        """Blocks that compute the halves of a micro-batch in turn: a product of each is summed in their gradients."""
        self.begun: set[Tensor] = set()
        """Weights of which the gradient of one half has been added."""

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
                weight.grad = gradient_of_weight(multiply, gradient, x).reshape_as(weight)
            elif multiply is F.linear:
                weight.grad.addmm_(gradient.flatten(0, -2).t(), x.flatten(0, -2))
            elif _small_gradient(multiply, gradient, x, weight.grad) is None:
                weight.grad += gradient_of_weight(multiply, gradient, x).reshape_as(weight)
            if weight in self.of_halves and weight not in self.begun:
                self.begun.add(weight)
                continue
            self.begun.discard(weight)
            self.arrived(weight)

    @cached_property
    def of_halves(self) -> set[Tensor]:
        """The weights of `halved` blocks; what joins the input of one reads it whole."""
        named = (each for block in self.halved for each in block.named_parameters())
        return {weight for name, weight in named if not name.startswith("join.")}


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
    return (product.backward if isinstance(product, ScaledProduct) else product)(gradient, weight.t())


def gradient_of_weight(multiply: Multiply | GroupedProduct, gradient: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of a linear layer's weight (outputs, inputs) from that of its output, (..., outputs), and
    its input `x` (..., inputs); for experts (experts, outputs, inputs)."""
    if isinstance(multiply, GroupedProduct):
        return multiply.weight_gradient(gradient, x)
    if (small := _small_gradient(multiply, gradient, x)) is not None:
        return small
    gradient, x, product = gradient.flatten(0, -2), x.flatten(0, -2), _kernel(multiply)
    if isinstance(product, ScaledProduct):
        return product.weight_gradient(gradient, x)
    return product(gradient.t(), x.t())


def _small_gradient(
    multiply: Multiply | GroupedProduct, gradient: Tensor, x: Tensor, out: Tensor | None = None
) -> Tensor | None:
    """Computes `gradient_of_weight` without a transposed copy of the whole, or adds it to `out`; None if it cannot."""
    small = small_products() if _kernel(multiply) is _multiply else None
    return small.add_weight_gradient(gradient.flatten(0, -2), x.flatten(0, -2), out) if small else None


def _kernel(multiply: Multiply | GroupedProduct) -> Multiply | GroupedProduct:
    return multiply.product if isinstance(multiply, OwnProduct) else multiply


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
