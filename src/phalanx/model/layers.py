"""The layers of a block: linear layers whose product a layout may replace, norms, and the MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.model import ModelConfig

Multiply = Callable[..., Tensor]
"""x weightᵀ + bias as F.linear computes it: (x, weight, bias=None)."""


class Linear(nn.Linear):
    """x weightᵀ + bias through `multiply`, which a layout may replace by a product with other kernels."""

    multiply: Multiply = staticmethod(F.linear)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        return self.multiply(input, self.weight, self.bias)


Project = Callable[[Sequence[Linear], Tensor], tuple[Tensor, ...]]
"""Applies linear layers to the same input: (layers, input) to one output each."""


def project(layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
    """Applies each of `layers` to `x` (..., inputs): (..., outputs) each."""
    return tuple([layer(x) for layer in layers])


Run = Callable[..., Tensor]
"""Calls a computation with its inputs: (computation, *inputs)."""


def run(compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Returns `compute(*inputs)`."""
    return compute(*inputs)


class Activation:
    """The nonlinearity of an MLP: GELU, exact or in its tanh form, or a SiLU gate (SwiGLU)."""

    def __init__(self, model: ModelConfig):
        self.gelu = "tanh" if model.activation == "gelu_tanh" else "none"

    def __call__(self, wide: Tensor, gate: Tensor | None = None) -> Tensor:
        """Applies it to the hidden activations, with those of the gate if there is one; the shape stays the same."""
        return F.gelu(wide, approximate=self.gelu) if gate is None else F.silu(gate) * wide


class MLP(nn.Module):
    """Two matrices around a GELU, or three with a SiLU gate (SwiGLU, Shazeer 2020), of hidden size `width`: by default
    the model's. A layout may replace `project`, which applies the matrices that read the input."""

    project: Project = staticmethod(project)

    def __init__(self, model: ModelConfig, width: int | None = None):
        super().__init__()
        width = width or model.ff_size
        self.activate = Activation(model)
        self.up = Linear(model.d_model, width, bias=model.bias)
        gated = model.gated
        self.gate = Linear(model.d_model, width, bias=model.bias) if gated else None
        self.down = Linear(width, model.d_model, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the MLP, (..., d_model) to the same shape."""
        return self.down(self.activate(*self.widen(x)))

    def widen(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the hidden activations, and the gate's if there is one, each (..., width)."""
        return self.project((self.up,) if self.gate is None else (self.up, self.gate), x)


def dense(model: ModelConfig, *_: object) -> MLP:
    """Returns the MLP of a block."""
    return MLP(model)


def make_norm(model: ModelConfig, width: int | None = None) -> nn.Module:
    """Returns the model's normalisation over `width` elements, by default d_model."""
    width = width or model.d_model
    if model.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=model.norm_eps)
    return nn.LayerNorm(width, eps=model.norm_eps, bias=model.bias)
